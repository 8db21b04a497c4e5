"""Why something waits, is refused, or was spared: the same words in logs, events, metrics and HTTP errors."""

from enum import StrEnum


class RefuseReason(StrEnum):
    """Why tickets end without being served; stands in the error's `reason`."""

    NOT_FOUND = "not_found"
    DOOMED = "doomed"
    TOO_BIG = "too_big"
    QUEUE_TIMEOUT = "queue_timeout"
    LOAD_FAILED = "load_failed"
    OUT_OF_MEMORY = "out_of_memory"
    STALLED = "stalled"
    UNLOADED = "unloaded"
    CLOSING = "closing"


class Verdict(StrEnum):
    """What a decision did with an instance it looked at: took it, or the filter that spared it."""

    STOP = "stop"
    DRAIN = "drain"
    ABORT = "abort"
    NOT_NEEDED = "not_needed"
    BUSY = "busy"
    WANTED = "wanted"
    PINNED = "pinned"
    RESIDENCE = "residence"
    LOADING = "loading"
    DRAINING = "draining"
    LEAVING = "leaving"
    STOP_FAILED = "stop_failed"
    SETTLING = "settling"
