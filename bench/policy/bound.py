"""How long an entry of the queue may wait at most, told from what the victims and loads of a run cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from llamastead.supervisor.core.state import Policy

# Seconds on top per entry for the steps between: told, decided, carried out, told again.
STEPS = 0.05


@dataclass(eq=False)
class Stay:
    """One entry of the queue: a model from the first request that had to wait until all of them were let in.

    `rest` and `stop` are what the costliest of its victims took to finish what it had admitted before its
    drain, and to stop; `victim_load` is the longest load of a victim, `load` its own.
    """

    model: str
    first: float
    priority: int = 0
    rest: float = 0.0
    stop: float = 0.0
    victim_load: float = 0.0
    load: float = 0.0
    until: float = 0.0

    @property
    def wait(self) -> float:
        """How long its first request waited."""
        return self.until - self.first

    def victim_gone(self, rest: float, stop: float, load: float) -> None:
        """Note what one of its victims cost."""
        self.rest = max(self.rest, rest)
        self.stop = max(self.stop, stop)
        self.victim_load = max(self.victim_load, load)


@dataclass(frozen=True)
class Bounded:
    """A stay beside its bound; both in seconds."""

    stay: Stay
    bound: float


def bounded(stays: Sequence[Stay], promised: Policy) -> list[Bounded]:
    """Return each stay with its bound under these limits.

    The bound is max-wait, and for the entry itself and each one that waited before it: the rest of what its
    victims had admitted before their drain, their stop, and its load. An entry behind others may get the room
    of an instance that was loaded for one of them only just now, so each but the first adds the minimum
    residence of its victims. Who waited before whom is told by arrival and priority, not by what the
    scheduler made of them.
    """

    def key(stay: Stay) -> tuple[float, float, str]:
        return stay.first - promised.priority_step * stay.priority, stay.first, stay.model

    def residence(stay: Stay) -> float:
        return min(max(promised.min_residence, stay.victim_load / 2), promised.max_wait / 2)

    ordered = sorted(stays, key=key)
    found = []
    for place, stay in enumerate(ordered):
        upto = [s for s in ordered[: place + 1] if s.until > stay.first and s.first < stay.until]
        costs = sum(s.rest + s.stop + s.load + STEPS for s in upto) + sum(residence(s) for s in upto[1:])
        found.append(Bounded(stay, promised.max_wait + costs))
    return found
