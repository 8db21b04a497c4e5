"""Taking a process the files that it may open."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def no_more_files(pid: int, beyond: int = 0) -> Iterator[None]:
    """Let a process open no more files than it has open now, and `beyond`."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # Looked at again: a list of our own files has the one by which it was made.
    taken = {int(path.name) for path in list(Path(f"/proc/{pid}/fd").iterdir()) if path.is_symlink()}
    # The limit is on the number that a new file would get, which is the lowest free one.
    free = sorted(set(range(len(taken) + beyond + 1)) - taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[beyond], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
