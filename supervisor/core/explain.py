"""Why each entry waits, in words for people, and which ticket waits without a reason."""

from dataclasses import dataclass

from llamastead.shared.waiting import sentence
from llamastead.shared.words import WaitReason
from llamastead.supervisor.core import queue
from llamastead.supervisor.core.state import State


@dataclass(frozen=True)
class Explanation:
    """One row of the queue.

    `position` counts from 1, `rank` orders the queue and does not change while an entry waits, `first` is its
    first arrival, `age` is in seconds. `blockers` are the instances in its way, `blocking` their models;
    `until` is when that ends by itself (a drain for it begins, a back-off is over), if known. `requests` are
    ids of those who wait.
    """

    position: int
    model: str
    tickets: int
    ordered: bool
    first: float
    rank: float
    age: float
    reason: WaitReason | None
    text: str
    blockers: tuple[str, ...]
    blocking: tuple[str, ...]
    until: float | None
    requests: tuple[str, ...]


def explain(state: State, now: float) -> tuple[Explanation, ...]:
    """Return the queue in its order, each entry with the one reason it waits for."""
    return tuple(
        _row(state, position, entry, now) for position, entry in enumerate(queue.entries(state), start=1)
    )


def unexplained(state: State) -> tuple[str, ...]:
    """Return the models whose entry waits without a reason. There must be none after any step."""
    return tuple(entry.model for entry in queue.entries(state) if entry.model not in state.waits)


def _row(state: State, position: int, entry: queue.Entry, now: float) -> Explanation:
    wait = state.waits.get(entry.model)
    demand = state.demands.get(entry.model)
    reason, blockers, until = (wait.reason, wait.blockers, wait.until) if wait else (None, (), None)
    held = tuple(state.instances[name].model for name in blockers if name in state.instances)
    return Explanation(
        position=position,
        model=entry.model,
        tickets=entry.tickets,
        ordered=entry.ordered,
        first=entry.first,
        rank=queue.rank(state, entry),
        age=max(0.0, now - entry.first),
        reason=reason,
        text=sentence(reason, held, seconds_left=None if until is None else until - now),
        blockers=blockers,
        blocking=held,
        until=until,
        requests=demand.requests if demand else (),
    )
