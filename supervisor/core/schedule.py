"""What every step does after its event: look at the whole state and do all that now follows from it.

Nothing hangs on having seen a particular event, so a lost or late one costs time and nothing else.
"""

from dataclasses import replace

from llamastead.shared.errors import ApiError
from llamastead.shared.words import EndClass, InstanceState, WaitReason
from llamastead.supervisor.core import ledger, planner, queue, trouble
from llamastead.supervisor.core.actions import (
    AbortLoad,
    Decide,
    FailTickets,
    Grant,
    ShowFailed,
    Start,
    TryDrain,
    TrySleep,
    TryStop,
    TryUndrain,
    Wake,
    Want,
    Weighed,
)
from llamastead.supervisor.core.draft import Draft
from llamastead.supervisor.core.lifecycle import LOADS, SERVES, Change
from llamastead.supervisor.core.numbers import numbers
from llamastead.supervisor.core.reasons import RefuseReason
from llamastead.supervisor.core.state import Ask, Instance, Leaving, State, Wait

S = InstanceState


def look(draft: Draft) -> None:
    """Carry out all that follows from the state as it is. Before recovery is done nothing starts and none
    is refused.
    """
    if draft.state.recovering:
        waits = {entry.model: Wait(WaitReason.RECOVERING) for entry in queue.entries(draft.state)}
        draft.state = replace(draft.state, waits=waits)
        return
    _end_stalled(draft)
    _refuse(draft)
    _send_vanished_away(draft)
    _grant(draft)
    _send_ordered_away(draft)
    _lie_down(draft)
    _end_idle(draft)
    while _plan(draft):
        # What was spared for a refused entry goes by itself, or for an entry before it.
        _end_idle(draft)
    _want(draft)
    _undrain(draft)
    _stop_drained(draft)
    _set_alarm(draft)


def _instances(draft: Draft) -> list[Instance]:
    return [instance for _, instance in sorted(draft.state.instances.items())]


def _end_stalled(draft: Draft) -> None:
    """End loads that made no progress for the stall timer, and tell those who wait."""
    limit = draft.state.policy.stall_timeout
    for instance in _instances(draft):
        if not _is_timed(instance) or draft.now < instance.moved_at + limit:
            continue
        reason = f"no progress for {limit:g} s (stall-timeout)"
        leaving = Leaving(EndClass.FAILED_TO_START, reason=reason)
        draft.change(instance, Change.ABORT, leaving=leaving, ask=None)
        draft.do(AbortLoad(instance.id, EndClass.FAILED_TO_START, reason=reason))
        error = ApiError(
            503,
            f"model name={instance.model} failed to load: {reason}",
            {"reason": str(RefuseReason.STALLED), "end_class": str(EndClass.FAILED_TO_START)},
        )
        trouble.settle_failed(draft, instance.model, error, doomed=False)


def _refuse(draft: Draft) -> None:
    """Settle the tickets that cannot be served: unknown model, too old, or a start known to be doomed."""
    state = draft.state
    for model, demand in sorted(state.demands.items()):
        if state.closing:
            fields = {"reason": str(RefuseReason.CLOSING)}
            draft.fail(model, ApiError(503, "the herd is stopping", fields, retry_after=10))
            continue
        if model not in state.models:
            fields = {"reason": str(RefuseReason.NOT_FOUND)}
            draft.fail(model, ApiError(404, f"model '{model}' not found", fields))
            continue
        doomed = trouble.doomed_error(trouble.trouble_of(state, model), draft.now)
        if doomed and not state.instance_of(model):
            draft.fail(model, doomed)
        elif demand.expired:
            draft.do(FailTickets(model, _too_old(draft), demand.expired))
            left = replace(demand, tickets=demand.tickets - len(demand.expired), expired=())
            draft.drop_demand(model)
            if left.tickets > 0:
                draft.state = replace(draft.state, demands={**draft.state.demands, model: left})
    for model in sorted(state.orders):
        if model not in state.models:
            draft.drop_order(model)


def _too_old(draft: Draft) -> ApiError:
    limit = draft.state.policy.queue_timeout
    return ApiError(
        503,
        f"the request waited {limit:g} s for its model without success (queue-timeout)",
        {"reason": str(RefuseReason.QUEUE_TIMEOUT), "limit": "queue-timeout"},
        retry_after=1,
    )


def _send_vanished_away(draft: Draft) -> None:
    """Have the instances of models that left the registry go: loads at once, the others once nobody holds
    them.
    """
    for instance in _instances(draft):
        if instance.model in draft.state.models or (instance.leaving and instance.leaving.ordered):
            continue
        leaving = Leaving(EndClass.STOPPED, ordered=True)
        if instance.state in LOADS:
            draft.change(instance, Change.ABORT, leaving=leaving)
            draft.do(AbortLoad(instance.id, EndClass.STOPPED))
        elif instance.state is not S.STOP_FAILED and instance.state is not S.STOPPING:
            draft.set(instance, leaving=leaving)


def _grant(draft: Draft) -> None:
    """Grant tickets that were enrolled while their instance became ready; an ordered load of a ready one
    is done.
    """
    for instance in _instances(draft):
        if instance.state not in SERVES or instance.leaving:
            continue
        draft.drop_order(instance.model)
        if instance.state is S.READY and not instance.ask and instance.model in draft.state.demands:
            draft.set(instance, ask=Ask.GRANT)
            draft.do(Grant(instance.id, instance.model))


def _lie_down(draft: Draft) -> None:
    """Make asleep for all whose engine sleeps and whom nobody holds: the line came while somebody did, or
    those it was woken for have left, or asked what it answers in its sleep.
    """
    for instance in _instances(draft):
        held = instance.leases or instance.leaving or instance.ask or instance.stale
        awake = instance.state is S.READY or instance.state is S.WAKING
        if instance.drowsy and awake and not held:
            draft.change(instance, Change.ASLEEP, ask=Ask.SLEEP)
            draft.do(TrySleep(instance.id))


def _plan(draft: Draft) -> bool:
    """Go through the queue in order: start what has room, make room for the rest, note why each one waits.
    Return whether one was refused.
    """
    entries = queue.entries(draft.state)
    wanted = {entry.model for entry in entries}
    _forget_retries(draft, wanted)
    left = queue.snapshot(draft.state, entries, draft.now)
    owners: dict[str, str] = {}
    waits: dict[str, Wait] = {}
    for entry in entries:
        own = draft.state.instance_of(entry.model)
        wait = _waits_for_own(draft, entry, own)
        if wait is None:
            need, decided = planner.choose(left, queue.needs_of(draft.state, entry, own))
            wait = _commit(draft, need, decided, left, own, owners)
            now = draft.state.instance_of(entry.model)
            if own is None and now is not None:
                need = replace(need, amounts=queue.booked(now))
            left = planner.reserve(left, need, decided)
            if isinstance(decided, planner.Start) and now is not None:
                left = left.with_candidate(queue.candidate(draft.state, now, wanted))
        if wait is not None:
            waits[entry.model] = wait
    for instance in _instances(draft):
        leaving = instance.leaving
        if leaving and instance.state is not S.STOP_FAILED and leaving.for_model != owners.get(instance.id):
            draft.set(instance, leaving=replace(leaving, for_model=owners.get(instance.id)))
    releasing = {
        name: replace(ended, owner=owners.get(name)) for name, ended in draft.state.releasing.items()
    }
    draft.state = replace(draft.state, waits=waits, releasing=releasing)
    return waits.keys() < wanted


def _forget_retries(draft: Draft, waiting: set[str]) -> None:
    """A retry belongs to those who saw the first try; when they have all left, the next ones get their
    own.
    """
    for model, known in sorted(draft.state.troubles.items()):
        if known.retried and model not in waiting and draft.state.instance_of(model) is None:
            _forget_retry(draft, model)


def _forget_retry(draft: Draft, model: str) -> None:
    known = trouble.trouble_of(draft.state, model)
    trouble.remember(draft, model, replace(known, retried=False, evict_more=False))


def _waits_for_own(draft: Draft, entry: queue.Entry, own: Instance | None) -> Wait | None:
    """Return why the entry waits for its own instance or its back-off, or None when it is the planner's
    turn.
    """
    if own is None:
        until = trouble.trouble_of(draft.state, entry.model).until
        if until > draft.now:
            return Wait(WaitReason.BACK_OFF, until=until)
        if draft.state.models[entry.model].absent:
            return Wait(WaitReason.DOWNLOADING)
        return _waits_for_figures(draft, entry)
    if own.state is S.SLEEPING:
        reason = WaitReason.LEAVING if own.leaving else WaitReason.WAKING
        return Wait(reason, (own.id,)) if own.leaving or own.ask or own.stale else None
    if own.state is S.READY and own.leaving:
        return Wait(WaitReason.LEAVING, (own.id,))
    reasons = {
        S.RECOVERING: WaitReason.RECOVERING,
        S.STARTING: WaitReason.LOADING,
        S.LOADING: WaitReason.LOADING,
        S.READY: WaitReason.GRANTING,
        S.WAKING: WaitReason.WAKING,
        S.DRAINING: WaitReason.LEAVING,
        S.STOP_FAILED: WaitReason.STOP_FAILED,
    }
    return Wait(reasons[own.state], (own.id,)) if own.state in reasons else None


def _waits_for_figures(draft: Draft, entry: queue.Entry) -> Wait | None:
    """Return why the entry waits for a measurement: its own model's, for a while, or one that runs on a
    device it would start on.
    """
    state = draft.state
    spec = state.models[entry.model]
    until = entry.first + state.policy.measure_wait
    if spec.awaited and until > draft.now:
        return Wait(WaitReason.MEASURING, until=until)
    beside = {
        device
        for amounts in state.measuring.values()
        for device in amounts
        if device in state.devices and state.devices[device].frees_late
    }
    wanted = spec.needs.keys() | {name for place in spec.places for name in place.needs}
    return Wait(WaitReason.MEASURING) if beside & wanted else None


def _commit(
    draft: Draft,
    need: planner.Need,
    decided: planner.Plan,
    seen: planner.Snapshot,
    own: Instance | None,
    owners: dict[str, str],
) -> Wait | None:
    """Do what the plan says, note in `owners` whose the leaving instances are, and return why the entry
    still waits.
    """
    match decided:
        case planner.Refuse():
            draft.fail(need.model, _too_big(draft.state, need, decided))
            _forget_retry(draft, need.model)
            return None
        case planner.Start() if own is None:
            return Wait(WaitReason.LOADING, (_start(draft, need, seen).id,))
        case planner.Start() if own is not None and own.state is S.SLEEPING:
            draft.change(own, Change.WAKE, ask=Ask.GRANT, moved_at=draft.now, resting=False)
            draft.do(Wake(own.id, own.model))
            return Wait(WaitReason.WAKING, (own.id,))
        case planner.Start():
            return Wait(WaitReason.LEAVING, (own.id,) if own else ())
        case planner.Hold():
            owners.update(dict.fromkeys(decided.takes, need.model))
            return replace(decided.wait, blockers=(own.id,)) if own and not need.may_choose else decided.wait
        case planner.MakeRoom() if (
            own is None and decided.victims and (missing := draft.state.models[need.model].missing)
        ):
            # Nobody is sent away for a start that will fail. Where there is room it says itself why.
            trouble.settle_failed(draft, need.model, trouble.missing_error(need.model, missing), doomed=True)
            draft.do(ShowFailed(need.model, f"{missing} not found"))
            return None
        case planner.MakeRoom():
            owners.update(dict.fromkeys((*decided.takes, *decided.victims), need.model))
            _send_away(draft, need, decided, seen)
            if own and not need.may_choose:
                return Wait(WaitReason.LEAVING, (own.id,))
            return _waits_for_room(draft.state, decided)


def _waits_for_room(state: State, decided: planner.MakeRoom) -> Wait:
    """Return what an entry waits for whose room others make: those that stop, else what ends by itself."""
    measured = {queue.measured_as(model) for model in state.measuring}
    instances = tuple(sorted({*decided.takes, *decided.victims} - measured))
    if not instances:
        return Wait(WaitReason.MEASURING)
    gone = all(name in state.releasing for name in instances)
    return Wait(WaitReason.RELEASING if gone else WaitReason.VICTIM, instances)


def _start(draft: Draft, need: planner.Need, seen: planner.Snapshot) -> Instance:
    """Book what the model needs, and of its growth what has room now."""
    model = need.model
    state = draft.state
    spec = state.models[model]
    booked, share = ledger.fit(_bytes(need.amounts), need.grows, seen.free)
    beyond: dict[str, int] = {}
    if not need.place:
        beyond = {d: n - booked[d] for d, n in spec.needs.items() if n > booked.get(d, n)}
    if beyond:
        state = replace(state, tried={**state.tried, model: spec.revision})
    instance = Instance(
        id=f"{state.prefix}-{state.next_number}",
        model=model,
        revision=spec.revision,
        state=S.STARTING,
        started_at=draft.now,
        moved_at=draft.now,
        place=need.place,
        needs=booked,
    )
    draft.state = replace(state.put(instance), next_number=state.next_number + 1)
    draft.do(Start(instance.id, model, spec.revision, share, need.place, booked, beyond))
    return instance


def _bytes(amounts: planner.Amounts) -> dict[str, int]:
    return {key: amount for key, amount in amounts.items() if key != planner.SLOT}


def _send_away(draft: Draft, need: planner.Need, decided: planner.MakeRoom, seen: planner.Snapshot) -> None:
    """Ask the victims to go. A plan that only counts on what goes already decides nothing new."""
    if not decided.victims:
        return
    weighed = tuple(
        Weighed(c.instance, c.model, planner.verdict(c, need, decided, draft.now)) for c in seen.candidates
    )
    demand = draft.state.demands.get(need.model)
    draft.do(Decide(need.model, weighed, demand.requests if demand else ()))
    evicted = Leaving(EndClass.EVICTED, need.model)
    for name in decided.aborts:
        abandoned = replace(evicted, end_class=EndClass.ABANDONED)
        draft.change(draft.state.instances[name], Change.ABORT, leaving=abandoned)
        draft.do(AbortLoad(name, EndClass.ABANDONED, need.model))
    for name in decided.stops:
        _try_stop(draft, draft.state.instances[name], evicted)
    for name in decided.drains:
        victim = draft.set(draft.state.instances[name], leaving=evicted)
        if victim.state is not S.DRAINING:
            _try_drain(draft, victim, evicted)


def _try_stop(draft: Draft, instance: Instance, leaving: Leaving) -> None:
    draft.set(instance, leaving=leaving, ask=Ask.STOP)
    draft.do(TryStop(instance.id, leaving.end_class, leaving.for_model))


def _try_drain(draft: Draft, instance: Instance, leaving: Leaving) -> None:
    draft.set(instance, leaving=leaving, ask=Ask.DRAIN)
    draft.do(TryDrain(instance.id, leaving.for_model, leaving.ordered))


def _want(draft: Draft) -> None:
    """Have those hurry who hold an instance that an entry waits for: it may be held unused."""
    busy = {n for wait in draft.state.waits.values() if wait.reason is WaitReason.BUSY for n in wait.blockers}
    for instance in _instances(draft):
        if instance.id in busy and instance.leases and not instance.wanted:
            draft.set(instance, wanted=True)
            draft.do(Want(instance.id))


def _undrain(draft: Draft) -> None:
    """Let an instance serve again whose drain nobody needs any more: its entry ended, or found room
    elsewhere.
    """
    for instance in _instances(draft):
        leaving = instance.leaving
        unneeded = leaving is None or not (leaving.ordered or leaving.for_model)
        if instance.state is S.DRAINING and unneeded and not instance.ask and not instance.stale:
            draft.set(instance, leaving=None, ask=Ask.UNDRAIN)
            draft.do(TryUndrain(instance.id))


def _send_ordered_away(draft: Draft) -> None:
    """Move on what is to go in any case: stop it when nobody holds it, else drain it first."""
    for instance in _instances(draft):
        leaving = instance.leaving
        if leaving is None or not leaving.ordered or instance.ask or instance.stale:
            continue
        if instance.leases == 0 and (instance.state in SERVES or instance.state is S.DRAINING):
            _try_stop(draft, instance, leaving)
        elif instance.state is S.READY:
            _try_drain(draft, instance, leaving)


def _stop_drained(draft: Draft) -> None:
    """Stop what was drained for an entry once nobody holds it."""
    for instance in _instances(draft):
        drained = instance.state is S.DRAINING and instance.leases == 0
        if drained and instance.leaving and not instance.ask and not instance.stale:
            _try_stop(draft, instance, instance.leaving)


def _end_idle(draft: Draft) -> None:
    """End instances that inference has not used for their unload-after. A pinned one stays."""
    for instance in _instances(draft):
        due = _idle_end(draft, instance)
        if due is not None and due <= draft.now:
            _try_stop(draft, instance, Leaving(EndClass.IDLE))


def _idle_end(draft: Draft, instance: Instance) -> float | None:
    """Return when an instance that nobody holds or wants goes by itself, or None."""
    spec = draft.state.models.get(instance.model)
    if spec is None or spec.unload_after is None or spec.pinned or instance.state not in SERVES:
        return None
    held = instance.leases or instance.leaving or instance.ask or instance.stale
    return None if held or instance.model in draft.state.demands else instance.last_used + spec.unload_after


def _is_timed(instance: Instance) -> bool:
    return instance.state in LOADS or instance.state is S.WAKING


def _set_alarm(draft: Draft) -> None:
    """Ask to be woken when the next thing is due by itself."""
    policy = draft.state.policy
    for instance in draft.state.instances.values():
        if _is_timed(instance):
            draft.wake(instance.moved_at + policy.stall_timeout)
        due = _idle_end(draft, instance)
        if due is not None:
            draft.wake(due)
    for demand in draft.state.demands.values():
        draft.wake(demand.first + policy.queue_timeout)
    for wait in draft.state.waits.values():
        if wait.until is not None:
            draft.wake(wait.until)


def _too_big(state: State, need: planner.Need, refused: planner.Refuse) -> ApiError:
    """Return the refusal with its numbers: what is needed, what there is, who holds the rest."""
    short = dict(sorted(refused.short.items()))
    text, memory = numbers(state, "needs", {device: need.amounts[device] for device in short})
    if planner.SLOT in short:
        slots = (
            f"needs {need.amounts[planner.SLOT]} slots, which is {short[planner.SLOT]} more than there are"
        )
        text = "; ".join(part for part in (slots, text) if part)
    fields = {"reason": str(refused.reason), "short": short, "memory": memory}
    return ApiError(503, f"model name={need.model} is too big: {text}", fields)
