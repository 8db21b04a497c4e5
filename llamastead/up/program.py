"""One child process of `up`: what to run, and how it is tied to us."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Loaded before any fork: between fork and exec a child may not import.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(frozen=True)
class Program:
    """What a child runs.

    `role` is the role word, `name` tells several of one role apart. `leash` is what the kernel sends it if
    `up` itself dies. Standard output and error are ours, standard input is empty.
    """

    role: str
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    leash: signal.Signals = signal.SIGTERM
    pass_fds: tuple[int, ...] = ()

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in its own process group, so that a terminal's Ctrl-C reaches only us. Raises OSError."""
        return subprocess.Popen(
            self.argv,
            env=self.env,
            stdin=subprocess.DEVNULL,
            pass_fds=self.pass_fds,
            process_group=0,
            preexec_fn=_tie(self.leash, os.getpid()),
        )


def _tie(leash: signal.Signals, parent: int) -> Callable[[], None]:
    def before_exec() -> None:
        # Ignored from birth: a SIGHUP that comes before the program has its own handler must not end it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _prctl(PR_SET_PDEATHSIG, int(leash), 0, 0, 0)
        if os.getppid() != parent:  # we died before the leash was on
            os._exit(1)

    return before_exec


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants whose own parent dies."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
