"""Folders that jobs work in, below the run folder, and what killed ones leave there."""

import contextlib
import fcntl
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

log = logging.getLogger(__name__)

_LOCK = "lock"


@contextlib.contextmanager
def work_folder(run_dir: Path) -> Iterator[Path]:
    """Yield an empty folder `<run-dir>/w/…`, short enough for sockets below it; it is gone afterwards.

    It is locked as long as this process lives, so that `clean_up` knows it from one that was left behind.
    """
    clean_up(run_dir)
    (run_dir / "w").mkdir(parents=True, exist_ok=True, mode=0o700)
    made = Path(mkdtemp(prefix=".", dir=run_dir / "w"))
    with (made / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Only now it gets a name that clean_up looks at.
        folder = made.rename(made.with_name(made.name[1:]))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clean_up(run_dir: Path) -> int:
    """End processes of jobs that were killed, and remove their folders; return how many there were."""
    count = 0
    for folder in run_dir.glob("w/[!.]*"):
        with contextlib.suppress(OSError):  # somebody else cleans up as well
            if not _is_in_use(folder):
                _end_processes(folder)
                shutil.rmtree(folder)
                count += 1
    return count


def _is_in_use(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # half removed
        pass
    return False


def _end_processes(folder: Path) -> None:
    """Kill what has this folder in its environment: an engine that outlived its job through a wrapper."""
    needle = os.fsencode(folder)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if needle in (entry / "environ").read_bytes():
                log.warning("a dead job's process is ended", extra={"pid": int(entry.name)})
                os.kill(int(entry.name), signal.SIGKILL)
