"""What persons order: load and unload. Each command is answered at once; what follows is seen in the
model's status.
"""

from collections.abc import Mapping
from dataclasses import replace

from llamastead.shared.errors import ApiError
from llamastead.shared.words import EndClass, InstanceState
from llamastead.supervisor.core import trouble
from llamastead.supervisor.core.actions import AbortLoad, Answer, ForceStop
from llamastead.supervisor.core.draft import Draft
from llamastead.supervisor.core.events import (
    LoadOrdered,
    RestartOrdered,
    ShutDown,
    UnloadOrdered,
)
from llamastead.supervisor.core.lifecycle import GOES, LOADS, Change
from llamastead.supervisor.core.reasons import RefuseReason
from llamastead.supervisor.core.state import Ask, Instance, Leaving, ModelSpec

S = InstanceState


def on_load_ordered(draft: Draft, event: LoadOrdered) -> None:
    """Queue a load like any demand. One ordered while the model is still on its way out waits until it is
    gone.
    """
    if event.model not in draft.state.models:
        draft.do(Answer(event.command, ApiError(404, "model is not found")))
        return
    if draft.state.closing:
        draft.do(Answer(event.command, ApiError(503, "the herd is stopping", retry_after=10)))
        return
    own = draft.state.instance_of(event.model)
    if own is not None and not _goes(own):
        running = ApiError(400, "model is already running")
        draft.do(Answer(event.command, None if event.again else running))
        return
    trouble.forgive(draft, event.model)
    orders = {event.model: draft.now, **draft.state.orders}
    draft.state = replace(draft.state, orders=orders)
    draft.do(Answer(event.command))


def on_unload_ordered(draft: Draft, event: UnloadOrdered) -> None:
    """Send a model away: abort its load, stop it when idle, drain it when busy, cut it by force, or
    unqueue its load.
    """
    own = draft.state.instance_of(event.model)
    if event.model not in draft.state.models and own is None:
        draft.do(Answer(event.command, ApiError(400, "model is not found")))
        return
    current = own is not None and event.instance in {None, own.id}
    ordered = event.model in draft.state.orders and event.instance is None
    if not current and not ordered:
        missing = ApiError(400, "model is not running")
        draft.do(Answer(event.command, None if event.again else missing))
        return
    draft.drop_order(event.model)
    draft.do(Answer(event.command))
    if own is not None and current:
        _unload(draft, own, force=event.force)


def on_restart_ordered(draft: Draft, event: RestartOrdered) -> None:
    """Send outdated instances away and order their loads, which wait until the old ones are gone. Those who
    wait for one that loads wait on for the next.
    """
    del event
    models, instances = draft.state.models, draft.state.instances
    for _, own in sorted(instances.items()):
        if own.model not in models or own.revision == models[own.model].revision or _goes(own):
            continue
        leaving = Leaving(EndClass.STOPPED, ordered=True)
        if own.state in LOADS:
            draft.change(own, Change.ABORT, leaving=leaving)
            draft.do(AbortLoad(own.id, EndClass.STOPPED))
        elif own.state is not S.STOP_FAILED:
            draft.set(own, leaving=leaving)
        if own.state is not S.SLEEPING:
            draft.state = replace(draft.state, orders={own.model: draft.now, **draft.state.orders})


def on_shut_down(draft: Draft, event: ShutDown) -> None:
    """Send every instance away and let nothing new begin; those who wait are told so by the next look."""
    draft.state = replace(draft.state, closing=True, recovering=False, orders={})
    for _, instance in sorted(draft.state.instances.items()):
        _unload(draft, instance, force=event.force)


def _goes(own: Instance) -> bool:
    ordered = own.leaving is not None and own.leaving.ordered
    return own.state in GOES or own.ask is Ask.STOP or ordered


def _unload(draft: Draft, own: Instance, *, force: bool) -> None:
    old = own.leaving or Leaving(EndClass.STOPPED)
    leaving = replace(old, end_class=EndClass.STOPPED, ordered=True)
    if own.state in LOADS:
        draft.change(own, Change.ABORT, leaving=leaving)
        draft.do(AbortLoad(own.id, EndClass.STOPPED))
        error = ApiError(
            503,
            f"model name={own.model} was unloaded while it was loading",
            {"reason": str(RefuseReason.UNLOADED)},
        )
        draft.fail(own.model, error)
    elif force:
        kept = old if own.state in {S.STOPPING, S.STOP_FAILED} else leaving
        draft.change(own, Change.FORCE, leaving=kept, ask=None)
        draft.do(ForceStop(own.id, EndClass.STOPPED))
    elif own.state not in {S.STOPPING, S.STOP_FAILED}:
        draft.set(own, leaving=leaving)


def preload_problem(models_max: int, models: Mapping[str, ModelSpec]) -> str | None:
    """Return what is wrong with the load-on-startup entries at start, or None: more than `models_max`
    can't be.
    """
    count = sum(spec.load_on_startup for spec in models.values())
    if 0 < models_max < count:
        return f"number of models to load on startup ({count}) exceeds models_max ({models_max})"
    return None
