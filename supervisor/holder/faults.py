"""Fault points of the holder: the twin of shared/faults.py, which says how they work."""

import errno
import os
import signal

FOLDER = os.environ.get("LLAMASTEAD_FAULTS")


def fault_point(name):
    """Do here what a test ordered for this point; without an order nothing. Raises OSError for `fail`."""
    if FOLDER:
        _strike(os.path.join(FOLDER, name))


def _strike(order):
    hit = f"{order}.hit.{os.getpid()}"
    try:
        os.rename(order, hit)
    except FileNotFoundError:
        return
    with open(hit) as file:
        word = file.read()
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "pause":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif word == "fail":
        raise OSError(errno.EIO, "ordered by a fault point", order)
