"""The engine's output: lines out of pipes, and log files with a size bound."""

import contextlib
import os

from loop import READ

CHUNK = 65536
FINAL_CHUNKS = 64


class LinePipe:
    """Reads a pipe as it fills and hands over complete lines, without their end.

    An unread pipe stops the engine, so everything that is there is read at once, whatever becomes of it. An
    unfinished line longer than `longest` bytes is handed over in parts.
    """

    def __init__(self, loop, fd, on_line, longest):
        self._loop, self._fd, self._on_line, self._longest = loop, fd, on_line, longest
        self._rest = b""
        os.set_blocking(fd, False)
        loop.watch(fd, READ, lambda _: self._read())

    def finish(self):
        """Hand over what is still in the pipe, the unfinished line included, and close it.

        Bounded, since a stray process may hold the other end and write on.
        """
        for _ in range(FINAL_CHUNKS):
            if self._fd is None or not self._read():
                break
        if self._rest:
            self._on_line(self._rest)
            self._rest = b""
        self._close()

    def _read(self):
        try:
            got = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        if not got:
            self._close()
            return False
        *lines, rest = (self._rest + got).split(b"\n")
        while len(rest) > self._longest:
            lines.append(rest[: self._longest])
            rest = rest[self._longest :]
        self._rest = rest
        for line in lines:
            self._on_line(line)
        return True

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

    def write(self, line):
        """Append one line (bytes, without its end)."""
        with contextlib.suppress(OSError):
            if self._fd is None:
                self._open()
            if os.fstat(self._fd).st_size + len(line) + 1 > self._limit:
                self._rotate()
            os.write(self._fd, line[: self._limit] + b"\n")

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
