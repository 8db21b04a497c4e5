"""What follows from a bad end: one retry where it can help, an error for those who wait, a growing
back-off.
"""

from dataclasses import replace
from hashlib import blake2b
from math import ceil
from typing import Any

from llamastead.shared.errors import ApiError
from llamastead.shared.words import EndClass
from llamastead.supervisor.core.draft import Draft
from llamastead.supervisor.core.events import Exited
from llamastead.supervisor.core.numbers import numbers
from llamastead.supervisor.core.reasons import RefuseReason
from llamastead.supervisor.core.state import Instance, State, Trouble

# Seconds. The first back-off after a passing failure is 0; a doomed start waits from the first failure on.
_PASSING_FIRST, _PASSING_MOST = 1.0, 60.0
_DOOMED_FIRST, _DOOMED_MOST = 5.0, 300.0
# An instance that served this long has proved itself: its crash counts as a first one.
_PROVEN = 60.0
_JITTER = 0.2


def trouble_of(state: State, model: str) -> Trouble:
    """Return what is remembered of a model at its current revision: nothing if that has changed since."""
    spec = state.models.get(model)
    revision = spec.revision if spec else ""
    known = state.troubles.get(model)
    return known if known and known.revision == revision else Trouble(revision)


def remember(draft: Draft, model: str, trouble: Trouble) -> None:
    """Keep what is known of a model's trouble; nothing is kept when there is none, or no such model any
    more.
    """
    troubles = {name: other for name, other in draft.state.troubles.items() if name != model}
    if model in draft.state.models and trouble != Trouble(trouble.revision):
        troubles[model] = trouble
    if troubles != draft.state.troubles:
        draft.state = replace(draft.state, troubles=troubles)


def on_ready(draft: Draft, model: str) -> None:
    """A start succeeded: only crashes in service are still counted."""
    known = trouble_of(draft.state, model)
    remember(draft, model, Trouble(known.revision, crashes=known.crashes))


def on_good_end(draft: Draft, instance: Instance) -> None:
    """An instance that was ready went because it was asked to: all is forgiven."""
    if instance.ready_at is not None and instance.model in draft.state.troubles:
        known = trouble_of(draft.state, instance.model)
        remember(draft, instance.model, replace(known, crashes=0))


def on_crash(draft: Draft, instance: Instance) -> None:
    """An instance broke in service: those who wait reload it, at once the first time, then ever later."""
    known = trouble_of(draft.state, instance.model)
    proven = instance.ready_at is not None and draft.now - instance.ready_at >= _PROVEN
    crashes = 1 if proven else known.crashes + 1
    until = draft.now + _delay(draft.state.seed, instance.model, crashes, doomed=False)
    remember(draft, instance.model, replace(known, crashes=crashes, until=until))


def on_failed_start(draft: Draft, instance: Instance, exited: Exited) -> None:
    """A start failed: retry once if that can help, else settle all who wait, once, and back off."""
    model = instance.model
    known = trouble_of(draft.state, model)
    memory = exited.end_class is EndClass.OUT_OF_MEMORY
    can_help = not exited.doomed and not known.retried and (not memory or _others_may_go(draft.state, model))
    if can_help:
        remember(draft, model, replace(known, retried=True, evict_more=memory))
        return
    error = load_error(draft.state, instance, exited)
    settle_failed(draft, model, error, doomed=exited.doomed)


def settle_failed(draft: Draft, model: str, error: ApiError, *, doomed: bool) -> None:
    """Give the error to all who wait for the model and start its back-off."""
    draft.fail(model, error)
    known = trouble_of(draft.state, model)
    failures = known.failures + 1
    until = draft.now + _delay(draft.state.seed, model, failures, doomed=doomed)
    remember(
        draft,
        model,
        Trouble(known.revision, failures, known.crashes, until, doomed=error if doomed else None),
    )


def forgive(draft: Draft, model: str) -> None:
    """A person asks for the load: it is tried now, whatever happened before."""
    known = trouble_of(draft.state, model)
    remember(draft, model, Trouble(known.revision, known.failures, known.crashes))


def load_error(state: State, instance: Instance, exited: Exited) -> ApiError:
    """Return the error of a failed load: what failed, the class of the end, and the engine's last lines.

    If it was for memory, also what it was given and what there is.
    """
    memory = exited.end_class is EndClass.OUT_OF_MEMORY
    why = RefuseReason.OUT_OF_MEMORY if memory else RefuseReason.LOAD_FAILED
    fields: dict[str, Any] = {"reason": str(why), "end_class": str(exited.end_class), "log": list(exited.log)}
    text = f"model name={instance.model} failed to load: {exited.reason}"
    if memory:
        told, accounts = numbers(state, "it was given", instance.needs)
        text = "; ".join(part for part in (text, told) if part)
        fields |= {"memory": accounts}
    return ApiError(503 if memory else 500, text, fields)


def missing_error(model: str, missing: str) -> ApiError:
    """Return the error of a load that was not tried, since these files can't be found."""
    fields = {"reason": str(RefuseReason.LOAD_FAILED), "end_class": str(EndClass.FAILED_TO_START)}
    return ApiError(500, f"model name={model} failed to load: {missing} not found", fields)


def doomed_error(trouble: Trouble, now: float) -> ApiError | None:
    """Return the remembered error of a doomed start while its back-off lasts, with the seconds left, else
    None.
    """
    if trouble.doomed is None or trouble.until <= now:
        return None
    fields = {**trouble.doomed.fields, "reason": str(RefuseReason.DOOMED)}
    return ApiError(
        trouble.doomed.status, trouble.doomed.message, fields, retry_after=ceil(trouble.until - now)
    )


def _others_may_go(state: State, model: str) -> bool:
    pinned = {name for name, spec in state.models.items() if spec.pinned}
    return any(other.model != model and other.model not in pinned for other in state.instances.values())


def _delay(seed: str, model: str, count: int, *, doomed: bool) -> float:
    """Return the seconds of the `count`-th back-off in a row, spread by up to a fifth, the same for the
    same seed.
    """
    first, most = (_DOOMED_FIRST, _DOOMED_MOST) if doomed else (_PASSING_FIRST, _PASSING_MOST)
    doublings = count - 1 if doomed else count - 2
    if doublings < 0:
        return 0.0
    digest = blake2b(f"{seed} {model} {count}".encode(), digest_size=4).digest()
    spread = int.from_bytes(digest, "big") / 2**32
    return min(first * 2.0 ** min(doublings, 16), most) * (1 + _JITTER * spread)
