"""The queue: one entry per model that somebody waits for, its order, and what the planner is shown of the
rest.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from llamastead.shared.words import InstanceState
from llamastead.supervisor.core import ledger
from llamastead.supervisor.core.lifecycle import LOADS, SERVES
from llamastead.supervisor.core.planner import SLOT, Amounts, Candidate, Going, Need, Snapshot
from llamastead.supervisor.core.reasons import Verdict
from llamastead.supervisor.core.state import Ask, Instance, ModelSpec, State
from llamastead.supervisor.core.trouble import trouble_of

S = InstanceState


@dataclass(frozen=True)
class Entry:
    """A model with all that wait for it: `first` is the earliest arrival, `ordered` that its load was
    asked for.
    """

    model: str
    first: float
    tickets: int
    ordered: bool
    overdue_at: float


def entries(state: State) -> list[Entry]:
    """Return the queue in order: by first arrival, each priority class being worth a head start.

    A head start instead of classes that are compared first is what makes age win in the end: an entry that
    has waited long enough is overtaken by nobody, and the order of two entries never changes while they
    wait.
    """
    found = []
    for model in state.demands.keys() | state.orders.keys():
        spec = state.models.get(model)
        demand = state.demands.get(model)
        waiting = demand.tickets - len(demand.expired) if demand else 0
        arrivals = [state.orders[model]] if model in state.orders else []
        if demand and waiting > 0:
            arrivals.append(demand.first)
        if spec and arrivals:
            first = min(arrivals)
            found.append(Entry(model, first, waiting, model in state.orders, first + max_wait(state, spec)))
    return sorted(found, key=lambda e: (rank(state, e), e.first, e.model))


def rank(state: State, entry: Entry) -> float:
    """Return what orders the queue: the arrival, less the head start of the model's priority class."""
    return entry.first - state.policy.priority_step * state.models[entry.model].priority


def max_wait(state: State, spec: ModelSpec) -> float:
    """Return how long an entry of this model may wait before busy ones are drained for it."""
    return state.policy.max_wait if spec.max_wait is None else spec.max_wait


def needs_of(state: State, entry: Entry, own: Instance | None) -> tuple[Need, ...]:
    """Return what the planner must find for an entry, as alternatives: whole on one device or another, and
    last as configured. A sleeper keeps its slot and its place, and needs its bytes back.

    An estimate never says more than all there is: whether it fits is then seen. So is what is measured to be
    too big, once, when nothing of ours is in its way.
    """
    spec = state.models[entry.model]
    asleep = own is not None and own.state is S.SLEEPING
    needs = cut_to_size(state, spec.needs) if not spec.measured or may_try(state, spec) else spec.needs
    need = Need(
        model=entry.model,
        amounts=_wakes_with(own) if own and asleep else {SLOT: 1, **needs},
        overdue_at=entry.overdue_at,
        max_wait=max_wait(state, spec),
        evict_more=trouble_of(state, entry.model).evict_more,
        may_choose=own is None or asleep,
        grows=spec.grows,
    )
    if asleep:
        return (need,)
    whole = (
        replace(need, place=place.device, amounts={SLOT: 1, **place.needs}, grows=place.grows)
        for place in spec.places
    )
    return (*whole, need)


def snapshot(state: State, queue: Iterable[Entry], now: float) -> Snapshot:
    """Return what the first entry may plan with."""
    wanted = {entry.model for entry in queue}
    hungry = {model for model in wanted if _is_hungry(state.instance_of(model))}
    capacity, free = ledger.capacity(state), ledger.free(state)
    if state.policy.models_max > 0:
        capacity[SLOT] = state.policy.models_max
        free[SLOT] = state.policy.models_max - len(state.instances)
    candidates = []
    going = [
        Going(name, ended.amounts, ended.owner if ended.owner in hungry else None, failed=ended.failed)
        for name, ended in sorted(state.releasing.items())
    ]
    # It ends by itself, soon: nobody else is to go for what it takes.
    going += [
        Going(measured_as(model), amounts, None, failed=True)
        for model, amounts in sorted(state.measuring.items())
    ]
    for _, instance in sorted(state.instances.items()):
        held = booked(instance)
        leaving = instance.leaving
        owner = leaving.for_model if leaving and leaving.for_model in hungry else None
        sure = instance.state is S.STOPPING or instance.ask is Ask.STOP
        if sure or (owner and instance.state is not S.STOP_FAILED):
            going.append(Going(instance.id, held, owner, sure))
        else:
            candidates.append(candidate(state, instance, wanted))
    debt = {key: -left for key, left in free.items() if left < 0}
    return Snapshot(now, free, capacity, tuple(going), tuple(candidates), debt, ledger.emptied(state))


def measured_as(model: str) -> str:
    """Return what the measurement of a model is called among instances that go."""
    return f"measuring {model}"


def cut_to_size(state: State, needs: Amounts) -> Amounts:
    """Return what of these bytes the devices would have now if everything of ours were gone."""
    limits = ledger.emptied(state)
    return {name: min(amount, limits.get(name, amount)) for name, amount in needs.items()}


def may_try(state: State, spec: ModelSpec) -> bool:
    """Whether a model that is too big for its devices may be started all the same, to see: once, on empty
    ones. The engine may find room where the figures do not.
    """
    if state.tried.get(spec.name) == spec.revision:
        return False
    limits = ledger.capacity(state)
    short = {name for name, amount in spec.needs.items() if amount > limits.get(name, amount)}
    ours = any(ledger.booked(i).get(name) for i in state.instances.values() for name in short)
    return bool(short) and not ours


def _wakes_with(own: Instance) -> Amounts:
    more = {name: amount - own.rests.get(name, 0) for name, amount in own.needs.items()}
    return {name: amount for name, amount in more.items() if amount > 0} if own.resting else {}


def booked(instance: Instance) -> Amounts:
    """Return what an instance holds: a slot until its process is gone, and its bytes."""
    return {SLOT: 1, **ledger.booked(instance)}


def residence(state: State, instance: Instance) -> float:
    """Return the minimum residence in seconds: 0 for one that served nobody yet."""
    return max(state.policy.min_residence, instance.load_time / 2) if instance.served else 0.0


def is_pinned(state: State, instance: Instance) -> bool:
    """Return whether the scheduler may never send this instance away."""
    spec = state.models.get(instance.model)
    return spec is not None and spec.pinned


def _is_hungry(own: Instance | None) -> bool:
    return own is None or own.state in {S.SLEEPING, S.STOPPING}


def candidate(state: State, instance: Instance, wanted: set[str]) -> Candidate:
    """Return an instance as one that could make room, with what protects it; `wanted` are the models in
    the queue.
    """
    spared = _spared(state, instance, wanted)
    abandoned = spared is None and instance.state in LOADS
    asleep = instance.state is S.SLEEPING
    leaving = instance.leaving
    return Candidate(
        instance=instance.id,
        model=instance.model,
        frees=booked(instance),
        spared=spared,
        rank=(
            0 if abandoned else 1 if asleep else 2,
            instance.last_used,
            instance.used,
            instance.model,
            instance.id,
        ),
        ready_at=instance.ready_at or 0.0,
        residence=residence(state, instance),
        abandoned=abandoned,
        undecided=instance.state is S.DRAINING
        and not instance.ask
        and not instance.stale
        and not (leaving and leaving.ordered)
        and not is_pinned(state, instance),
    )


def _spared(state: State, instance: Instance, wanted: set[str]) -> Verdict | None:
    """Return the filter that protects an instance from being chosen, or None."""
    if instance.state is S.STOP_FAILED:
        return Verdict.STOP_FAILED
    if instance.state is S.DRAINING or instance.leaving:
        return Verdict.DRAINING
    if instance.state in LOADS:
        return Verdict.LOADING if instance.model in wanted else None
    if instance.state not in SERVES:
        return Verdict.LOADING
    if is_pinned(state, instance):
        return Verdict.PINNED
    if instance.ask or instance.stale:
        return Verdict.SETTLING
    if instance.model in wanted:
        return Verdict.WANTED
    return Verdict.BUSY if instance.leases else None
