"""What tests of several layers read: /proc, and files that are being written."""

import contextlib
from pathlib import Path


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that have their end: of the last one a reader may see half."""
    return path.read_text().rpartition("\n")[0].splitlines()


def listening_tcp_ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens, read from /proc."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a file that was closed since it was listed
            links.append(str(link.readlink()))
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()
    ]
    listens = "0A"
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == listens and row[9] in inodes]


def words_of(pid: int) -> list[str]:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().removesuffix("\0").split("\0")


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_text().removesuffix("\0").split("\0")
    return dict(pair.split("=", 1) for pair in pairs)
