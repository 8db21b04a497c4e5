"""Ordering faults at the named points of shared/faults.py, and seeing which process they struck."""

import asyncio
from pathlib import Path

from llamastead.shared.faults import VARIABLE


class FaultOrders:
    """A folder of orders; processes that are started with `env` look there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder = folder

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment to obey."""
        return {VARIABLE: str(self.folder)}

    def order(self, point: str, word: str = "kill") -> None:
        """Order `kill`, `pause` or `fail` for the next process that comes by a point."""
        draft = self.folder / f".{point}"
        draft.write_text(word)
        draft.rename(self.folder / point)

    def withdraw(self, point: str) -> None:
        """Take back an order that nobody carried out yet."""
        (self.folder / point).unlink(missing_ok=True)

    def clear(self) -> None:
        """Take back all orders and forget all who were struck."""
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)

    def struck(self, point: str) -> list[int]:
        """Return the pids of the processes that were struck at a point."""
        return sorted(int(path.suffix[1:]) for path in self.folder.glob(f"{point}.hit.*"))

    async def hit(self, point: str, patience_s: float = 30.0) -> int:
        """Wait until one process was struck at a point, and return its pid: one that is to pause stands then.

        Its mark comes a moment before the blow: whom we woke in between would pause for good.
        """
        async with asyncio.timeout(patience_s):
            while not (pids := self.struck(point)):  # noqa: ASYNC110 - a file made by another process
                await asyncio.sleep(0.01)
            (pid,) = pids
            if (self.folder / f"{point}.hit.{pid}").read_text() == "pause":
                while not _is_stopped(pid):  # noqa: ASYNC110 - the state of another process
                    await asyncio.sleep(0.001)
        return pid


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
