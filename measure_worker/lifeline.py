"""Processes that end with the one that started them, however that ends."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. Call it in the child, right after the fork."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def end_with(parent: int) -> None:
    """The same for a parent known by its pid: if it is dead by now, this process ends at once."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
