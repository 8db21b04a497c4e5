"""What became of this process's requests, by model: added to the herd's totals with each heartbeat."""

from collections import defaultdict
from collections.abc import Mapping

ANSWERS = "answers:"
CUT = "answers_cut"
WAITS = "waits"
WAITED_MS = "waited_ms"

Counts = dict[str, dict[str, int]]


class Tally:
    """Counts since the last batch, and the batch that is on its way.

    A batch whose answer was lost is sent again as it was, by its number: Redis adds it once.
    """

    def __init__(self) -> None:
        self._fresh: Counts = defaultdict(lambda: defaultdict(int))
        self._sending: Counts = {}
        self._number = 0

    def answered(self, model: str, status: int) -> None:
        """Count a request by the status it is answered with."""
        self._fresh[model][f"{ANSWERS}{status}"] += 1

    def cut(self, model: str) -> None:
        """Count an answer that broke off after its status had been sent."""
        self._fresh[model][CUT] += 1

    def waited(self, model: str, wait_ms: int) -> None:
        """Count a request that waited for its model, and how long."""
        self._fresh[model][WAITS] += 1
        self._fresh[model][WAITED_MS] += wait_ms

    def batch(self) -> tuple[int, Mapping[str, Mapping[str, int]]]:
        """Return the number and the counts of the batch to send, 0 and nothing where there is none."""
        if not self._sending and self._fresh:
            self._sending, self._fresh = self._fresh, defaultdict(lambda: defaultdict(int))
            self._number += 1
        return (self._number, self._sending) if self._sending else (0, {})

    def sent(self, number: int) -> None:
        """Forget a batch that has arrived."""
        if number == self._number:
            self._sending = {}
