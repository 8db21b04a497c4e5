"""How long an entry of the queue may wait at most, told from what the victims and loads of a run cost."""

from collections.abc import Sequence
from dataclasses import dataclass

# Seconds on top per entry for the steps between: told, decided, carried out, told again.
STEPS = 0.05


@dataclass(eq=False)
class Stay:
    """One entry of the queue: a model from the first request that had to wait until all of them were let in.

    `rest`, `stop` and `residence` are what the costliest of its victims took: to finish what it had admitted
    before its drain, to stop, and to stay its minimum time; `load` is its own load.
    """

    model: str
    first: float
    priority: int = 0
    rest: float = 0.0
    stop: float = 0.0
    residence: float = 0.0
    load: float = 0.0
    until: float = 0.0

    @property
    def wait(self) -> float:
        """How long its first request waited."""
        return self.until - self.first

    def victim_gone(self, rest: float, stop: float, residence: float) -> None:
        """Note what one of its victims cost."""
        self.rest = max(self.rest, rest)
        self.stop = max(self.stop, stop)
        self.residence = max(self.residence, residence)


@dataclass(frozen=True)
class Bounded:
    """A stay beside its bound; both in seconds."""

    stay: Stay
    bound: float


def bounded(stays: Sequence[Stay], max_wait: float, priority_step: float) -> list[Bounded]:
    """Return each stay with its bound, for the herd's max-wait and the head start of a priority class.

    The bound is max-wait, and for the entry itself and each one that waited before it: the rest of what its
    victims had admitted before their drain, their stop, and its load. An entry behind others may get the room
    of an instance that was loaded for one of them only just now, so each but the first adds what its victims
    stay at least. Who waited before whom is told by arrival and priority, not by what the scheduler made of
    them.
    """

    def key(stay: Stay) -> tuple[float, float, str]:
        return stay.first - priority_step * stay.priority, stay.first, stay.model

    ordered = sorted(stays, key=key)
    found = []
    for place, stay in enumerate(ordered):
        upto = [s for s in ordered[: place + 1] if s.until > stay.first and s.first < stay.until]
        costs = sum(s.rest + s.stop + s.load + STEPS for s in upto) + sum(s.residence for s in upto[1:])
        found.append(Bounded(stay, max_wait + costs))
    return found
