"""Taking a process the files that it may open."""

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path

LOOKS, LOOK_S = 5, 0.01


def open_files(pid: int) -> set[int]:
    """Return the numbers of the files that a process has open, without the one by which this list is made."""
    return {int(path.name) for path in list(Path(f"/proc/{pid}/fd").iterdir()) if path.is_symlink()}


@contextlib.contextmanager
def no_more_files(pid: int, beyond: int = 0) -> Iterator[None]:
    """Let a process open no more files than it has open now, and `beyond`."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # Those that are there at each of some looks, a moment apart: others are open for an instant only.
    taken = open_files(pid)
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        taken &= open_files(pid)
    # The limit is on the number that a new file would get, which is the lowest free one.
    free = sorted(set(range(len(taken) + beyond + 1)) - taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[beyond], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
