"""Which processes descend from which, from /proc."""

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def children_of(parents: set[int]) -> set[int]:
    """Return the pids whose parent is one of `parents`."""
    return {pid for pid in _pids() if _parent(pid) in parents}


def descendants_of(pid: int, without: set[int]) -> set[int]:
    """Return all pids below `pid` at every depth, save `without` and what is below those."""
    found: set[int] = set()
    layer = {pid}
    while layer := children_of(layer) - found - without:
        found |= layer
    return found


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def _parent(pid: int) -> int | None:
    try:
        # The command in parentheses may hold anything, also blanks and parentheses.
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None
