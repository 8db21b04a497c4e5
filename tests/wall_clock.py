"""The wall clock of the processes that preload `clock_jump.c`, which a test sets."""

from collections.abc import Mapping
from pathlib import Path

from compiled import compile_library

SOURCE = Path(__file__).parent / "clock_jump.c"


class WallClock:
    """Right at first. `env` is what a process needs in its environment to go by it."""

    def __init__(self, folder: Path) -> None:
        library, self._ahead = folder / "clock.so", folder / "ahead"
        compile_library(SOURCE, library)
        self.jump(0)
        self.env: Mapping[str, str] = {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(self._ahead)}

    def jump(self, seconds: int) -> None:
        """Be so many seconds ahead of the real time."""
        part = self._ahead.with_suffix(".part")
        part.write_text(str(seconds))
        part.rename(self._ahead)
