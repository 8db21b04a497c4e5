"""A small file system of a test's own, and filling it to the last byte. Needs root, as CI has it."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

PIECE = 1 << 16


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Yield the folder `place` with a file system of this size mounted on it."""
    place.mkdir(exist_ok=True)
    options = f"size={size},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def full(place: Path) -> Iterator[None]:
    """Leave no byte free on the file system of `place` while inside; fail where it does not get full."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(1 << 12):
            file.write(b"x" * PIECE)
    try:
        assert is_full(place)
        yield
    finally:
        ballast.unlink()


def is_full(place: Path) -> bool:
    """Return whether a file there can take nothing."""
    probe = place / "probe"
    try:
        probe.write_bytes(b"x")
    except OSError:
        return True
    finally:
        probe.unlink(missing_ok=True)
    return False
