"""What each event changes by itself. What follows from the state as a whole is left to `schedule.look`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llamastead.shared.words import EndClass, InstanceState
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core import explain, ledger, trouble
from llamastead.supervisor.core.actions import Discrepancy, Ended, ForceStop, Grant, ShowTaken, TrySleep
from llamastead.supervisor.core.draft import Draft
from llamastead.supervisor.core.lifecycle import LOADS, Change
from llamastead.supervisor.core.orders import (
    on_load_ordered,
    on_restart_ordered,
    on_shut_down,
    on_unload_ordered,
)
from llamastead.supervisor.core.state import Ask, Claims, Instance, Leaving

S = InstanceState


def handle(draft: Draft, event: ev.Event) -> None:
    """Apply one event. News of an instance that is not known (any more) changes nothing."""
    if isinstance(event, ev.InstanceEvent):
        instance = draft.state.instances.get(event.instance)
        if instance is not None:
            _INSTANCE_HANDLERS[type(event)](draft, instance, event)
        return
    _HANDLERS[type(event)](draft, event)


def on_tick(draft: Draft, _: ev.Tick) -> None:
    """Change nothing: the look that follows does what is due."""


def on_observed(draft: Draft, event: ev.Observed) -> None:
    """Take the facts as they are, in place of all that was known of tickets and claims."""
    demands = {model: demand for model, demand in event.demands.items() if demand.tickets > 0}
    instances = {
        name: _with_claims(instance, event.claims.get(name, Claims(0)))
        for name, instance in draft.state.instances.items()
    }
    draft.state = replace(draft.state, demands=demands, instances=instances)


def _with_claims(instance: Instance, claims: Claims) -> Instance:
    used = claims.last_used is not None
    return replace(
        instance,
        leases=claims.leases,
        last_used=max(instance.last_used, claims.last_used or 0.0) if used else instance.last_used,
        used=instance.used or used,
        served=instance.served or used or claims.leases > 0,
        stale=False,
        wanted=instance.wanted and 0 < claims.leases <= instance.leases,  # a new holder was not told
    )


def on_devices_read(draft: Draft, event: ev.DevicesRead) -> None:
    """Take what the devices show; what was awaited too long to show as free is put on record."""
    read = ledger.take_reading(draft.state, event.devices, event.seen, draft.now, complete=event.complete)
    draft.state = read.state
    draft.do(*(Discrepancy(device, amount) for device, amount in sorted(read.missing.items())))


def on_measuring_began(draft: Draft, event: ev.MeasuringBegan) -> None:
    """Book what a measurement takes."""
    draft.state = replace(draft.state, measuring={**draft.state.measuring, event.model: event.amounts})


def on_measuring_ended(draft: Draft, event: ev.MeasuringEnded) -> None:
    """Give back what a measurement took."""
    rest = {model: taken for model, taken in draft.state.measuring.items() if model != event.model}
    draft.state = replace(draft.state, measuring=rest)


def on_registry_changed(draft: Draft, event: ev.RegistryChanged) -> None:
    """Take the new registry; what was remembered of a start that would differ now is forgotten."""
    models = dict(event.models)
    troubles = {
        name: known
        for name, known in draft.state.troubles.items()
        if name in models and models[name].revision == known.revision
    }
    tried = {
        name: revision
        for name, revision in draft.state.tried.items()
        if name in models and models[name].revision == revision
    }
    draft.state = replace(draft.state, models=models, troubles=troubles, tried=tried)


def on_download_failed(draft: Draft, event: ev.DownloadFailed) -> None:
    """Tell those who wait for it why, and for a while those who come next."""
    if event.model in draft.state.models:
        trouble.settle_failed(draft, event.model, event.error, doomed=True)


def on_found(draft: Draft, event: ev.Found) -> None:
    """Count an instance from before our time, whatever it turns out to be."""
    if event.instance not in draft.state.instances:
        draft.state = draft.state.put(_from_before(draft, event.instance, event.model, event.revision))


def on_adopted(draft: Draft, event: ev.Adopted) -> None:
    """Take over an instance from before our time. What it is now is written again: the old leader may not
    have.
    """
    known = draft.state.instances.get(event.instance)
    before = known or _from_before(draft, event.instance, event.model, event.revision)
    used = event.last_used is not None
    adopted = replace(
        before,
        state=event.state,
        started_at=event.started_at,
        ready_at=event.ready_at,
        load_time=event.load_time,
        last_used=max(event.ready_at or 0.0, event.last_used or 0.0),
        used=used,
        served=used or event.leases > 0,
        leases=event.leases,
        place=event.place,
        needs=before.needs if event.needs is None else event.needs,
        drowsy=event.state is S.SLEEPING,
    )
    if event.state in {S.READY, S.DRAINING}:
        # A device that does not tell of processes shows it as used all the same.
        adopted = replace(adopted, shown={**adopted.needs, **adopted.shown})
    if event.ordered or event.state in {S.STOPPING, S.STOP_FAILED}:
        adopted = replace(adopted, leaving=Leaving(event.end_class, ordered=True))
    draft.state = draft.state.put(adopted)
    if event.state is S.READY:
        _grant(draft, adopted)
    elif event.state is S.SLEEPING:
        _try_sleep(draft, adopted)


def _from_before(draft: Draft, name: str, model: str, revision: str) -> Instance:
    spec = draft.state.models.get(model)
    return Instance(
        id=name,
        model=model,
        revision=revision,
        state=S.RECOVERING,
        started_at=draft.now,
        moved_at=draft.now,
        needs=spec.needs if spec else {},
    )


def on_recovery_done(draft: Draft, event: ev.RecoveryDone) -> None:
    """Begin to decide; a new herd loads what is wanted from the start, any what was ordered."""
    orders = dict(draft.state.orders)
    if event.preload and draft.state.recovering:
        for name, spec in draft.state.models.items():
            if spec.load_on_startup and draft.state.instance_of(name) is None:
                orders.setdefault(name, draft.now)
    for name in event.ordered:
        if name in draft.state.models and draft.state.instance_of(name) is None:
            orders.setdefault(name, draft.now)
    draft.state = replace(draft.state, recovering=False, orders=orders)


def on_started(draft: Draft, instance: Instance, _: ev.Started) -> None:
    """Count the spawn as progress: a queue for the spare holder is not a stall."""
    if instance.state in LOADS:
        draft.set(instance, moved_at=draft.now)


def on_loading(draft: Draft, instance: Instance, event: ev.Loading) -> None:
    """Note progress. An awake or sleeping instance that loads is waking, whoever woke it."""
    moved = event.progress != instance.progress or instance.state not in {S.LOADING, S.WAKING}
    fields: dict[str, Any] = {"progress": event.progress, "moved_at": draft.now} if moved else {}
    loading = draft.change(instance, Change.LOADING, drowsy=False, **fields)
    draft.set(loading, resting=instance.resting and loading.state is not S.WAKING)


def on_moved(draft: Draft, instance: Instance, _: ev.Moved) -> None:
    """Renew the stall timer of a load; lines that an engine writes at work mean nothing here."""
    if instance.state in LOADS or instance.state is S.WAKING:
        draft.set(instance, moved_at=draft.now)


def on_became_ready(draft: Draft, instance: Instance, _: ev.BecameReady) -> None:
    """Make it ready and grant those who wait. A repeated line changes nothing, so it may be sent at every
    look.
    """
    ready = draft.change(instance, Change.READY, drowsy=False, resting=False)
    if instance.state is not S.READY:
        draft.state = ledger.settle(draft.state, ready, {**ready.needs, **ready.shown})
        ready = draft.state.instances[ready.id]
    if ready.state is not S.READY or instance.state is S.READY:
        return
    if ready.ready_at is None:
        took = draft.now - ready.started_at
        ready = draft.set(ready, ready_at=draft.now, load_time=took, last_used=draft.now)
    trouble.on_ready(draft, ready.model)
    draft.drop_order(ready.model)
    _grant(draft, draft.set(ready, progress=None))


def on_took(draft: Draft, instance: Instance, event: ev.Took) -> None:
    """Book what it really took, more or less than was reckoned. Nobody goes for it: that is seen to when
    somebody needs room.
    """
    if not instance.resting:
        took = draft.set(instance, needs=event.needs)
        draft.state = ledger.settle(draft.state, took, event.shown)
        draft.do(ShowTaken(took.id, took.model, took.needs))


def on_fell_asleep(draft: Draft, instance: Instance, _: ev.FellAsleep) -> None:
    """Note it. It is made asleep for all by the look that finds that nobody holds it, who would wake it."""
    if instance.state in LOADS:
        on_became_ready(draft, instance, ev.BecameReady(instance.id))
    elif instance.state is S.RECOVERING:
        _try_sleep(draft, draft.change(instance, Change.ASLEEP))
    draft.set(draft.state.instances[instance.id], drowsy=True)


def on_unresponsive(draft: Draft, instance: Instance, event: ev.Unresponsive) -> None:
    """End an instance that never answers, or never right; it counts as crashed."""
    if instance.state is S.STOPPING and instance.leaving:
        # Its holder waits for what it still does, which is nothing.
        draft.do(ForceStop(instance.id, instance.leaving.end_class, event.reason))
    if instance.state not in {S.READY, S.DRAINING}:
        return
    old = instance.leaving or Leaving(EndClass.CRASHED)
    leaving = replace(old, end_class=EndClass.CRASHED, reason=event.reason)
    draft.change(instance, Change.FORCE, leaving=leaving, ask=None)
    draft.do(ForceStop(instance.id, EndClass.CRASHED, event.reason))


def on_turns_away(draft: Draft, instance: Instance, _: ev.TurnsAway) -> None:
    """Let it finish and send nobody there any more; who comes from now on waits for a fresh load."""
    if instance.state in {S.READY, S.DRAINING, S.SLEEPING, S.WAKING}:
        old = instance.leaving or Leaving(EndClass.KILLED, reason="told to stop from outside")
        draft.set(instance, leaving=replace(old, ordered=True))


def on_exited(draft: Draft, instance: Instance, event: ev.Exited) -> None:
    """Record the end, give its room back, and do what its class asks for."""
    leaving = instance.leaving
    asked = leaving if instance.state in {S.STOPPING, S.STOP_FAILED} else None
    if asked and asked.end_class is EndClass.KILLED and event.end_class is not EndClass.STOPPED:
        # It refused connections because it was dying, and died before our stop reached it.
        asked = None
    broke = asked is None or asked.reason is not None
    end_class = asked.end_class if asked else event.end_class
    reason = event.reason
    if asked and asked.reason:
        reason = asked.reason
    elif asked and event.end_class is EndClass.STOPPED:
        reason = f"{event.reason}: {explain.why_stopped(asked)}"
    ended = draft.change(instance, Change.BROKE if broke else Change.ENDED, ask=None)
    draft.drop_instance(ended)
    draft.state = ledger.release(draft.state, instance, draft.now, failed=instance.state in LOADS)
    draft.do(Ended(ended.id, ended.model, ended.state, end_class, reason, event.code, event.log))
    if leaving and leaving.for_model:
        known = trouble.trouble_of(draft.state, leaving.for_model)
        trouble.remember(draft, leaving.for_model, replace(known, evict_more=False))
    if not broke:
        trouble.on_good_end(draft, instance)
    elif instance.state in LOADS:
        trouble.on_failed_start(draft, instance, event)
    elif instance.ready_at is not None:
        trouble.on_crash(draft, instance)


def on_stop_failed(draft: Draft, instance: Instance, _: ev.StopFailed) -> None:
    """Keep it booked, and let the entry that counted on its room plan anew."""
    leaving = replace(instance.leaving, for_model=None) if instance.leaving else None
    draft.change(instance, Change.STUCK, leaving=leaving)


def on_granted(draft: Draft, instance: Instance, event: ev.Granted) -> None:
    """Count the leases."""
    _settle(draft, instance, leases=instance.leases + event.leases, served=event.leases > 0)
    draft.drop_demand(instance.model)


def on_stop_granted(draft: Draft, instance: Instance, _: ev.StopGranted) -> None:
    """It goes for sure now."""
    leaving = instance.leaving or Leaving(EndClass.EVICTED)
    draft.change(_settle(draft, instance, leases=0), Change.STOP, leaving=leaving)


def on_stop_refused(draft: Draft, instance: Instance, event: ev.StopRefused) -> None:
    """It is busy again: give the victim up, unless it drains or a person wants it gone."""
    leaving = instance.leaving
    keep = instance.state in {S.DRAINING, S.STOPPING, S.STOP_FAILED} or (leaving and leaving.ordered)
    settled = _settle(draft, instance, leases=event.claims, served=event.claims > 0, stale=event.claims == 0)
    if not keep:
        draft.set(settled, leaving=None)


def on_drained(draft: Draft, instance: Instance, event: ev.Drained) -> None:
    """Nobody new is let in."""
    settled = _settle(draft, instance, leases=event.claims, served=event.claims > 0)
    draft.change(settled, Change.DRAIN)


def on_drain_refused(draft: Draft, instance: Instance, _: ev.DrainRefused) -> None:
    """Plan anew once facts are read again."""
    leaving = instance.leaving if instance.leaving and instance.leaving.ordered else None
    if instance.state in {S.STOPPING, S.STOP_FAILED}:
        leaving = instance.leaving
    _settle(draft, instance, stale=True, leaving=leaving)


def on_undrained(draft: Draft, instance: Instance, event: ev.Undrained) -> None:
    """It serves again, those first who waited for it."""
    settled = _settle(draft, instance, leases=instance.leases + event.leases, served=event.leases > 0)
    draft.change(settled, Change.UNDRAIN)
    draft.drop_demand(instance.model)


def on_undrain_refused(draft: Draft, instance: Instance, _: ev.UndrainRefused) -> None:
    """Try again once facts are read again."""
    _settle(draft, instance, stale=True)


def on_slept(draft: Draft, instance: Instance, _: ev.Slept) -> None:
    """It is asleep for all. Until a reading shows what it keeps, its devices show all it held as used, and so
    much stays booked: if it is woken before, it needs nothing that it does not have.
    """
    resting = instance.state is S.SLEEPING
    _settle(draft, instance, resting=resting, rests=dict(instance.needs) if resting else {})


def on_sleep_refused(draft: Draft, instance: Instance, event: ev.SleepRefused) -> None:
    """Somebody holds it: for all it is ready. Their request wakes the engine, or a later look tries again."""
    settled = _settle(draft, instance, leases=event.claims, served=event.claims > 0)
    if settled.state is S.SLEEPING:
        draft.change(settled, Change.READY)


def _settle(draft: Draft, instance: Instance, *, served: bool = False, **fields: Any) -> Instance:
    """Note that the script that was asked for has answered."""
    return draft.set(instance, ask=None, served=instance.served or served, **fields)


def _grant(draft: Draft, instance: Instance) -> None:
    draft.set(instance, ask=Ask.GRANT)
    draft.do(Grant(instance.id, instance.model))


def _try_sleep(draft: Draft, instance: Instance) -> None:
    draft.set(instance, ask=Ask.SLEEP)
    draft.do(TrySleep(instance.id))


_INSTANCE_HANDLERS: Mapping[type, Callable[[Draft, Instance, Any], None]] = {
    ev.Started: on_started,
    ev.Loading: on_loading,
    ev.Moved: on_moved,
    ev.BecameReady: on_became_ready,
    ev.Took: on_took,
    ev.FellAsleep: on_fell_asleep,
    ev.Unresponsive: on_unresponsive,
    ev.TurnsAway: on_turns_away,
    ev.Exited: on_exited,
    ev.StopFailed: on_stop_failed,
    ev.Granted: on_granted,
    ev.StopGranted: on_stop_granted,
    ev.StopRefused: on_stop_refused,
    ev.Drained: on_drained,
    ev.DrainRefused: on_drain_refused,
    ev.Undrained: on_undrained,
    ev.UndrainRefused: on_undrain_refused,
    ev.Slept: on_slept,
    ev.SleepRefused: on_sleep_refused,
}
_HANDLERS: Mapping[type, Callable[[Draft, Any], None]] = {
    ev.Tick: on_tick,
    ev.Observed: on_observed,
    ev.DevicesRead: on_devices_read,
    ev.MeasuringBegan: on_measuring_began,
    ev.MeasuringEnded: on_measuring_ended,
    ev.RegistryChanged: on_registry_changed,
    ev.Found: on_found,
    ev.Adopted: on_adopted,
    ev.RecoveryDone: on_recovery_done,
    ev.LoadOrdered: on_load_ordered,
    ev.UnloadOrdered: on_unload_ordered,
    ev.RestartOrdered: on_restart_ordered,
    ev.DownloadFailed: on_download_failed,
    ev.ShutDown: on_shut_down,
}
