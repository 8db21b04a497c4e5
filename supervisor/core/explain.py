"""Why each entry waits, in words for people, and which ticket waits without a reason."""

from dataclasses import dataclass

from llamastead.shared.waiting import sentence
from llamastead.shared.words import EndClass, InstanceState, WaitReason
from llamastead.supervisor.core import queue
from llamastead.supervisor.core.reasons import Verdict
from llamastead.supervisor.core.state import Ask, Instance, Leaving, State


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


def why_stopped(leaving: Leaving) -> str:
    """Return for whose sake an instance was stopped that ended as it was told to."""
    winner = leaving.for_model or "another model"
    words = {
        EndClass.EVICTED: f"made room for {winner}",
        EndClass.ABANDONED: f"made room for {winner} before it was loaded",
        EndClass.IDLE: "nobody used it for its unload-after",
    }
    return words.get(leaving.end_class, "as asked")


def spared(state: State, now: float) -> dict[str, Verdict | None]:
    """Return of each instance what keeps it from being sent away for another model now (None: it may go)."""
    wanted = {entry.model for entry in queue.entries(state)}
    return {name: _spared(state, instance, wanted, now) for name, instance in state.instances.items()}


def _spared(state: State, instance: Instance, wanted: set[str], now: float) -> Verdict | None:
    if instance.state is InstanceState.STOPPING or instance.ask is Ask.STOP:
        return Verdict.LEAVING
    candidate = queue.candidate(state, instance, wanted)
    if candidate.spared is None and candidate.held_until(state.policy.max_wait) > now:
        return Verdict.RESIDENCE
    return candidate.spared


def _row(state: State, position: int, entry: queue.Entry, now: float) -> Explanation:
    wait = state.waits.get(entry.model)
    demand = state.demands.get(entry.model)
    reason, until = (wait.reason, wait.until) if wait else (None, None)
    blockers = tuple(name for name in wait.blockers if name in state.instances) if wait else ()
    held = tuple(state.instances[name].model for name in blockers)
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
