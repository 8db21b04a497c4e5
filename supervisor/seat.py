"""The leader's lock on its run folder: unlike a lead in Redis, it ends when the leader's process does."""

import contextlib
import fcntl
import os
from pathlib import Path


class Seat:
    """A locked file that holds the token of the lead it stands for. One leader per run folder sits on it.

    It only makes a change of leaders quick: whoever leads without it, or finds it taken, goes by Redis alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: int | None = None

    def take(self, token: str) -> None:
        """Sit down with the token of our lead, unless somebody sits there, a leader that is paused, or the
        disk is full.
        """
        self.leave()
        seat = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(seat, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(seat, 0)
            os.pwrite(seat, token.encode(), 0)
        except OSError:
            os.close(seat)
            return
        self._held = seat

    def leave(self) -> None:
        """Stand up."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def token_of_the_dead(self) -> str:
        """Return the token of a leader that sat here and died without standing up; empty if there is none."""
        with contextlib.suppress(FileNotFoundError, BlockingIOError), self._path.open("rb") as seat:
            fcntl.flock(seat, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return seat.read().decode()
        return ""
