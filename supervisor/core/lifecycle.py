"""The life of an instance as a table: (state, what happened) → state. What is not in the table is illegal.

`WIRE_STATUS` says how each state is spelled on the wire, as llama-server's router spells it.
"""

from enum import StrEnum

from llamastead.shared.words import WIRE_STATUS, InstanceState, WireStatus

S = InstanceState


class Change(StrEnum):
    """What happens to an instance: what its engine says, what scripts decided, how it ends."""

    LOADING = "loading"
    READY = "ready"
    ASLEEP = "asleep"
    WAKE = "wake"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    STOP = "stop"
    ABORT = "abort"
    FORCE = "force"
    STUCK = "stuck"
    ENDED = "ended"
    BROKE = "broke"


class IllegalChangeError(Exception):
    """An instance in this state cannot undergo this change: whoever says so is mistaken. Nothing was
    changed.
    """


# The engine's lines may come late, twice, or not at all (a lost one is made good by the next): a stopping or
# draining instance keeps its state whatever its engine says.
_TABLE: dict[InstanceState, dict[Change, InstanceState]] = {
    S.RECOVERING: {
        Change.LOADING: S.LOADING,
        Change.READY: S.READY,
        Change.ASLEEP: S.SLEEPING,
        Change.FORCE: S.STOPPING,
        Change.STUCK: S.STOP_FAILED,
        Change.BROKE: S.FAILED,
    },
    S.STARTING: {
        Change.LOADING: S.LOADING,
        Change.READY: S.READY,
        Change.ABORT: S.STOPPING,
        Change.FORCE: S.STOPPING,
        Change.STUCK: S.STOP_FAILED,
        Change.BROKE: S.FAILED,
    },
    S.LOADING: {
        Change.LOADING: S.LOADING,
        Change.READY: S.READY,
        Change.ABORT: S.STOPPING,
        Change.FORCE: S.STOPPING,
        Change.STUCK: S.STOP_FAILED,
        Change.BROKE: S.FAILED,
    },
    S.READY: {
        Change.LOADING: S.WAKING,
        Change.READY: S.READY,
        Change.ASLEEP: S.SLEEPING,
        Change.DRAIN: S.DRAINING,
        Change.STOP: S.STOPPING,
        Change.FORCE: S.STOPPING,
        Change.STUCK: S.STOP_FAILED,
        Change.BROKE: S.FAILED,
    },
    S.DRAINING: {
        Change.LOADING: S.DRAINING,
        Change.READY: S.DRAINING,
        Change.ASLEEP: S.DRAINING,
        Change.UNDRAIN: S.READY,
        Change.STOP: S.STOPPING,
        Change.FORCE: S.STOPPING,
        Change.STUCK: S.STOP_FAILED,
        Change.BROKE: S.FAILED,
    },
    S.SLEEPING: {
        Change.LOADING: S.WAKING,
        Change.READY: S.READY,
        Change.ASLEEP: S.SLEEPING,
        Change.WAKE: S.WAKING,
        Change.DRAIN: S.DRAINING,
        Change.STOP: S.STOPPING,
        Change.FORCE: S.STOPPING,
        Change.STUCK: S.STOP_FAILED,
        Change.BROKE: S.FAILED,
    },
    S.WAKING: {
        Change.LOADING: S.WAKING,
        Change.READY: S.READY,
        Change.ASLEEP: S.SLEEPING,
        Change.DRAIN: S.DRAINING,
        Change.STOP: S.STOPPING,
        Change.ABORT: S.STOPPING,
        Change.FORCE: S.STOPPING,
        Change.STUCK: S.STOP_FAILED,
        Change.BROKE: S.FAILED,
    },
    S.STOPPING: {
        Change.LOADING: S.STOPPING,
        Change.READY: S.STOPPING,
        Change.ASLEEP: S.STOPPING,
        Change.UNDRAIN: S.STOPPING,
        Change.DRAIN: S.STOPPING,
        Change.STOP: S.STOPPING,
        Change.FORCE: S.STOPPING,
        Change.STUCK: S.STOP_FAILED,
        Change.ENDED: S.STOPPED,
        Change.BROKE: S.FAILED,
    },
    S.STOP_FAILED: {
        Change.LOADING: S.STOP_FAILED,
        Change.READY: S.STOP_FAILED,
        Change.ASLEEP: S.STOP_FAILED,
        Change.UNDRAIN: S.STOP_FAILED,
        Change.DRAIN: S.STOP_FAILED,
        Change.STOP: S.STOP_FAILED,
        Change.FORCE: S.STOP_FAILED,
        Change.STUCK: S.STOP_FAILED,
        Change.ENDED: S.STOPPED,
        Change.BROKE: S.FAILED,
    },
    S.STOPPED: {},
    S.FAILED: {},
}

LOADS = frozenset({S.STARTING, S.LOADING})
SERVES = frozenset({S.READY, S.SLEEPING})
GOES = frozenset({S.DRAINING, S.STOPPING, S.STOP_FAILED})


def after(state: InstanceState, change: Change) -> InstanceState:
    """Return the state that follows, or raise IllegalChangeError."""
    following = _TABLE[state].get(change)
    if following is None:
        raise IllegalChangeError(f"an instance that is {state} cannot undergo {change}")
    return following


def wire_status(state: InstanceState | None) -> WireStatus:
    """Return the wire's word for a model whose instance is in this state (None: it has no instance)."""
    return WireStatus.UNLOADED if state is None else WIRE_STATUS[state]


def page() -> str:
    """Return docs/lifecycle.md: both tables, as a diagram and as rows. Changes that lead nowhere are left
    out.
    """
    arrows: dict[tuple[InstanceState, InstanceState], list[Change]] = {}
    for state, row in _TABLE.items():
        for change, following in row.items():
            if following is not state:
                arrows.setdefault((state, following), []).append(change)
    lines = [
        "# The life of an instance",
        "",
        "Made by `page()` in `supervisor/core/lifecycle.py` from its tables; a test keeps it current.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        f"    [*] --> {S.STARTING}",
        f"    [*] --> {S.RECOVERING}: supervisor starts",
    ]
    lines += [f"    {old} --> {new}: {', '.join(changes)}" for (old, new), changes in arrows.items()]
    lines += [f"    {state} --> [*]" for state, row in _TABLE.items() if not row]
    lines += ["```", "", "| state | `status.value` on the wire |", "|---|---|"]
    lines += [f"| {state} | {status} |" for state, status in WIRE_STATUS.items()]
    return "\n".join(lines) + "\n"
