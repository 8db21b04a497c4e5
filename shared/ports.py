"""Listening sockets, and who holds one that is taken."""

import contextlib
import errno
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

LISTEN = "0A"  # state of a listening socket in /proc/net/tcp
PROC = Path("/proc")
BACKLOG = 2048
SILENT_S, PROBE_S, PROBES = 60, 15, 4
"""After so many seconds without a word a client is asked whether it is there, so often, so many times."""


class ListenError(Exception):
    """The address can't be listened on; the message is one line: why, who holds it, what to do."""


def addresses_of(host: str) -> list[str]:
    """Return the addresses and socket paths that a `--host` names, separated by commas."""
    return [part.strip() for part in host.split(",") if part.strip()]


def listen_on(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Return a listening socket for each address in `host`, all of TCP on one port. Raises ListenError."""
    made: list[socket.socket] = []
    try:
        for one in addresses_of(host) or [host]:
            made.append(listen(one, port, reuse_port=reuse_port))
            if not port and made[-1].family != socket.AF_UNIX:
                port = made[-1].getsockname()[1]
    except ListenError:
        for listener in made:
            listener.close()
        raise
    return made


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Return a listening socket: a unix one if `host` ends in `.sock`, else TCP. Raises ListenError.

    A socket file that nobody answers on any more is replaced. `reuse_port` lets others listen there as well.
    """
    try:
        return _listen_unix(host) if host.endswith(".sock") else _listen_tcp(host, port, reuse_port)
    except OSError as problem:
        where = host if host.endswith(".sock") else f"port {port} on {host}"
        if problem.errno != errno.EADDRINUSE:
            raise ListenError(f"can't listen on {where}: {problem.strerror or problem}") from None
        holder = describe(None if host.endswith(".sock") else holder_of_port(port))
        raise ListenError(f"{where} is taken by {holder}: stop that one, or give another --port") from None


def holder_of_port(port: int) -> int | None:
    """Return the pid of a process that listens on a TCP port, None when it can't be seen."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for pid in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError):
            for fd in (PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(fd.readlink()) in inodes:
                        return pid
    return None


def describe(pid: int | None) -> str:
    """Return `pid 42 (command)`, or a phrase when the process can't be seen."""
    return "a process that is not visible from here" if pid is None else f"pid {pid} ({command_of(pid)})"


def command_of(pid: int) -> str:
    """Return the command line of a process, or what is known instead."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        name = (PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return "not visible from here"
    return " ".join(word.decode(errors="replace") for word in words if word) or f"[{name}]"


def _listen_tcp(host: str, port: int, reuse_port: bool) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections take these over. Who is gone without a goodbye would else hold its model while it waits.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _listen_unix(path: str) -> socket.socket:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(Path(path).stat().st_mode):
            _remove_if_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_if_stale(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
