"""The engine's output: lines out of pipes, and log files with a size bound."""

import contextlib
import fcntl
import os

from loop import READ

CHUNK = 1 << 16
CHUNKS_AT_ONCE = 16
FINAL_ROUNDS = 4


class LinePipe:
    """Reads a pipe as it fills and hands over blocks of complete lines, without the last one's end.

    A full pipe stops the engine, so all that is there is read, whatever becomes of it; then `pause_s` seconds
    pass, since an engine flushes each line and to be woken for each costs more than the line. An unfinished
    line longer than `longest` bytes is handed over in parts.
    """

    def __init__(self, loop, fd, on_lines, longest, pause_s=0.0):
        self._loop, self._fd, self._on_lines, self._longest = loop, fd, on_lines, longest
        self._pause_s = pause_s
        self._rest = b""
        os.set_blocking(fd, False)
        if pause_s:
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, CHUNK * CHUNKS_AT_ONCE)
        self._watch()

    def finish(self):
        """Hand over what is still in the pipe, the unfinished line included, and close it.

        Bounded, since a stray process may hold the other end and write on.
        """
        for _ in range(FINAL_ROUNDS):
            if self._fd is None or not self._read():
                break
        if self._rest:
            self._on_lines(self._rest)
            self._rest = b""
        self._close()

    def _watch(self):
        if self._fd is not None:
            self._loop.watch(self._fd, READ, lambda _: self._on_readable())

    def _on_readable(self):
        self._read()
        if self._pause_s and self._fd is not None:
            self._loop.unwatch(self._fd)
            self._loop.after(self._pause_s, self._watch)

    def _read(self):
        """Read what is there, a MiB at most, and hand it over; return whether there was anything."""
        chunks = []
        with contextlib.suppress(BlockingIOError):
            while len(chunks) < CHUNKS_AT_ONCE:
                chunks.append(os.read(self._fd, CHUNK))
                if len(chunks[-1]) < CHUNK:
                    break
        got = b"".join(chunks)
        self._take(got)
        if chunks and not chunks[-1]:
            self._close()
        return bool(got)

    def _take(self, got):
        lines, end, rest = (self._rest + got).rpartition(b"\n")
        if end:
            self._on_lines(lines)
        while len(rest) > self._longest:
            self._on_lines(rest[: self._longest])
            rest = rest[self._longest :]
        self._rest = rest

    def _close(self):
        if self._fd is not None:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = None


class BoundedLog:
    """A file that is appended to and moved to `<path>.1` before it would outgrow `limit` bytes.

    Two holders may write the log of one model for a while (one stopping, one starting). Each looks whether
    the file it has open is still the one at the path, so neither moves the other's fresh file away. A full
    disk loses log lines and nothing else.
    """

    def __init__(self, path, limit):
        self._path, self._limit, self._fd = path, limit, None
        self._torn = False

    def write(self, lines):
        """Append a block of lines (bytes, without the last one's end), whole where it fits."""
        with contextlib.suppress(OSError):
            if self._fd is None:
                self._open()
            # After a line that a full disk cut off the next one begins anew.
            block = b"\n" * self._torn + lines + b"\n"
            while len(block) > (room := self._limit - os.fstat(self._fd).st_size):
                fits = block.rfind(b"\n", 0, max(0, room)) + 1
                if not fits and room == self._limit:
                    # A line that no file holds.
                    block = block[block.index(b"\n") + 1 :]
                    continue
                self._append(block[:fits])
                block = block[fits:]
                self._rotate()
            self._append(block)

    def _append(self, block):
        self._torn = os.write(self._fd, block) < len(block)

    def _open(self):
        os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _rotate(self):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                os.rename(self._path, self._path + ".1")
        os.close(self._fd)
        self._fd = None
        self._open()
