"""The leadership number on disk: what a holder trusts when Redis has forgotten it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Yield a descriptor of the epoch file under its exclusive lock; the file is made when missing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def read_epoch(path: Path) -> int:
    """Return the highest leadership number written to `path`, 0 when there is none."""
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0


def write_epoch(path: Path, number: int) -> bool:
    """Write a leadership number unless a larger one stands there; return whether it stands there now.

    Written in place under the lock: a holder takes the same lock on the same file before it starts its
    engine, so a rename would let the two lock different files. The fixed width makes it one short write.
    Raises OSError naming the file.
    """
    try:
        with _locked(path) as descriptor:
            if int(os.pread(descriptor, 32, 0) or 0) > number:
                return False
            os.pwrite(descriptor, b"%020d\n" % number, 0)
            os.fsync(descriptor)
            return True
    except OSError as error:
        error.filename = str(path)
        raise
