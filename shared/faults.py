"""Fault points: named places at which a test kills, pauses or fails this very process.

Off unless the process was started with LLAMASTEAD_FAULTS, the path of a folder that nobody else may write to.
Then a place called `ready.after` looks there for a file of that name, whose word says what happens: `kill`
(SIGKILL), `pause` (SIGSTOP) or `fail` (an OSError). Who renames the file has it, so that one order strikes
one process once; what stays, `ready.after.hit.<pid>`, proves where. supervisor/holder/faults.py is the
holder's twin, since a holder imports nothing of ours.
"""

import errno
import os
import signal
from pathlib import Path

VARIABLE = "LLAMASTEAD_FAULTS"


def faults_folder() -> Path | None:
    """Return the folder with orders, None where faults are off: not asked for, or open to other users."""
    if not os.environ.get(VARIABLE):
        return None
    folder = Path(os.environ[VARIABLE])
    try:
        found = folder.stat()
    except OSError:
        return None
    return folder if found.st_uid == os.geteuid() and not found.st_mode & 0o022 else None


_FOLDER = faults_folder()


def fault_point(name: str) -> None:
    """Do here what a test ordered for this point; without an order nothing. Raises OSError for `fail`."""
    if _FOLDER is not None:
        _strike(_FOLDER / name)


def _strike(order: Path) -> None:
    hit = order.with_name(f"{order.name}.hit.{os.getpid()}")
    try:
        order.rename(hit)
    except FileNotFoundError:
        return
    match hit.read_text():
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "fail":
            raise OSError(errno.EIO, "ordered by a fault point", order.name)
