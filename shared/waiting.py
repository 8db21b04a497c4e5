"""Why a queue entry waits, as one sentence: said alike by the supervisor's log, its events and GET /queue."""

from collections.abc import Iterable

from llamastead.shared.words import WaitReason

_TEXTS = {
    WaitReason.RECOVERING: "waits until the supervisor has found out what runs",
    WaitReason.LOADING: "its model loads",
    WaitReason.GRANTING: "its model is ready",
    WaitReason.WAKING: "its model wakes",
    WaitReason.LEAVING: "its model is still on its way out and loads again after that{work}",
    WaitReason.STOP_FAILED: "waits for {names}, which could not be stopped",
    WaitReason.BACK_OFF: "its model failed; the next try is{until}",
    WaitReason.DOWNLOADING: "waits until its files have come from the hub",
    WaitReason.MEASURING: "waits until its memory is measured",
    WaitReason.RELEASING: "waits until memory that ended models or others still use shows as free",
    WaitReason.VICTIM: "waits for {names} to stop{work}",
    WaitReason.BUSY: "waits for {names}{use}{drain}",
    WaitReason.RESIDENCE: "waits for {names}: loaded a moment ago, may go{until}",
    WaitReason.PINNED: "waits for room; all that could make it is pinned ({names})",
    WaitReason.STARTING_OTHERS: "waits for {names} to finish loading",
    WaitReason.BEHIND: "waits behind those before it in the queue",
}
UNEXPLAINED = "waits without a reason, which is a fault"


def sentence(
    reason: WaitReason | None,
    models: Iterable[str],
    in_flight: int | None = None,
    seconds_left: float | None = None,
) -> str:
    """Return why an entry waits, for a person.

    `models` are those in its way, `in_flight` how many requests they answer (None: not known here),
    `seconds_left` when the wait for this reason ends by itself, if that is known. None as the reason is a
    fault.
    """
    if reason is None:
        return UNEXPLAINED
    work = f": {in_flight} request{'' if in_flight == 1 else 's'} in flight" if in_flight else ""
    left = None if seconds_left is None else f"in {max(0.0, seconds_left):.0f} s"
    return _TEXTS[reason].format(
        names=", ".join(sorted(set(models))) or "room",
        work=work,
        use=work or ", in use",
        drain=f", drains {left}" if left else "",
        until=f" {left}" if left else "",
    )
