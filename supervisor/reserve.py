"""Open files that are kept back, so that a process that has no more of them can still say so."""

import contextlib
import os
from collections.abc import Iterator

SIZE = 32
"""As many as a reign opens at once while it takes over, reads its folders and tells who waits."""


class Reserve:
    """Descriptors that stand for nothing. Let go, they are what others may open."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def fill(self) -> None:
        """Hold as many as belong here. Raises OSError, and holds none, where so many can't be had."""
        try:
            while len(self._held) < SIZE:
                self._held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Let all of them go."""
        while self._held:
            os.close(self._held.pop())

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[None]:
        """Let go of them for something that opens files. Raises OSError where they can't be had."""
        self.fill()
        self.release()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.fill()
