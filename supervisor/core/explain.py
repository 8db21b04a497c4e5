"""Why each entry waits, in words for people, and which ticket waits without a reason."""

from dataclasses import dataclass

from llamastead.supervisor.core import queue
from llamastead.supervisor.core.reasons import WaitReason
from llamastead.supervisor.core.state import State, Wait


@dataclass(frozen=True)
class Explanation:
    """One row of the queue: `position` from 1, `age` and `drains_in` in seconds (None: no drain is due)."""

    position: int
    model: str
    tickets: int
    ordered: bool
    age: float
    reason: WaitReason | None
    text: str
    blockers: tuple[str, ...]
    drains_in: float | None


def explain(state: State, now: float) -> tuple[Explanation, ...]:
    """Return the queue in its order, each entry with the one reason it waits for."""
    rows = []
    for position, entry in enumerate(queue.entries(state), start=1):
        wait = state.waits.get(entry.model)
        drains = max(0.0, entry.overdue_at - now) if wait and wait.reason is WaitReason.BUSY else None
        rows.append(
            Explanation(
                position=position,
                model=entry.model,
                tickets=entry.tickets,
                ordered=entry.ordered,
                age=max(0.0, now - entry.first),
                reason=wait.reason if wait else None,
                text=_text(state, wait, now, drains) if wait else "waits without a reason, which is a fault",
                blockers=wait.blockers if wait else (),
                drains_in=drains,
            )
        )
    return tuple(rows)


def unexplained(state: State) -> tuple[str, ...]:
    """Return the models whose entry waits without a reason. There must be none after any step."""
    return tuple(entry.model for entry in queue.entries(state) if entry.model not in state.waits)


_TEXTS = {
    WaitReason.RECOVERING: "waits until the supervisor has found out what runs",
    WaitReason.LOADING: "its model loads",
    WaitReason.GRANTING: "its model is ready",
    WaitReason.WAKING: "its model wakes",
    WaitReason.LEAVING: "its model is still on its way out and loads again after that",
    WaitReason.STOP_FAILED: "waits for {names}, which could not be stopped",
    WaitReason.BACK_OFF: "its model failed; the next try is{until}",
    WaitReason.MEASURING: "waits until its memory is measured{until}",
    WaitReason.RELEASING: "waits until memory of models that ended shows as free",
    WaitReason.VICTIM: "waits for {names} to stop",
    WaitReason.BUSY: "waits for {names}: {leases} in use",
    WaitReason.RESIDENCE: "waits for {names}, which stays a little after its load{until}",
    WaitReason.PINNED: "waits for room; all that could make it is pinned ({names})",
    WaitReason.STARTING_OTHERS: "waits for {names} to finish loading",
    WaitReason.BEHIND: "waits behind those before it in the queue",
}


def _text(state: State, wait: Wait, now: float, drains: float | None) -> str:
    held = [state.instances[name] for name in wait.blockers if name in state.instances]
    names = ", ".join(sorted({instance.model for instance in held})) or "room"
    leases = sum(instance.leases for instance in held)
    until = "" if wait.until is None else f" in {max(0.0, wait.until - now):.0f} s"
    text = _TEXTS[wait.reason].format(names=names, leases=leases, until=until)
    return text if drains is None else f"{text}, drains in {drains:.0f} s"
