"""Refusals of the store's scripts: one negative number in Lua, one exception in Python."""

from enum import IntEnum


class Code(IntEnum):
    """What a script answers when it refuses. The script loader gives these names to the scripts as locals."""

    STALE_LEADER = -1
    NO_HERD = -2
    UNKNOWN_MODEL = -3
    UNREGISTERED = -4
    QUEUE_FULL = -5
    UNKNOWN_INSTANCE = -6
    WRONG_STATE = -7
    NOT_LOADED = -8


class StoreError(Exception):
    """Anything that the store has to say against a call."""


class StoreUnreachable(StoreError):  # noqa: N818 - named for the fact, as the refusals are
    """Redis can't be used; the text names the address without its password and says what to do."""


class KeysLost(StoreError):  # noqa: N818
    """Redis has lost single keys of the herd: whoever leads next writes all of it anew."""


class StoreRefusal(StoreError):  # noqa: N818
    """A script looked at the facts and said no; nothing was changed."""


class StaleLeader(StoreRefusal):
    """This token does not lead (any more): stop deciding at once."""


class NoHerd(StoreRefusal):
    """No leader has opened the herd in this Redis yet (or Redis lost its data): wait, nothing is known."""


class UnknownModel(StoreRefusal):
    """The registry has no such model (canonical names only; aliases are resolved before)."""


class Unregistered(StoreRefusal):
    """The gateway is not in `gateways` (swept, or Redis emptied): heartbeat first."""


class QueueFull(StoreRefusal):
    """A bound on waiting tickets is reached: `limit_name` is the setting, `limit` its value."""

    def __init__(self, limit_name: str, limit: int) -> None:
        super().__init__(f"{limit_name} of {limit} waiting requests is reached")
        self.limit_name = limit_name
        self.limit = limit


class NotLoaded(StoreRefusal):
    """The call may not have the model loaded, or woken, and it is not there."""


class UnknownInstance(StoreRefusal):
    """No record of that instance."""


class WrongState(StoreRefusal):
    """The instance is in a state that this change does not start from: `state` is what was found."""

    def __init__(self, state: str) -> None:
        super().__init__(f"instance is {state}")
        self.state = state


def refusal(code: int, details: list[str]) -> StoreRefusal:
    """Return the exception for a script's negative answer; `details` are what the script added to it."""
    match Code(code):
        case Code.STALE_LEADER:
            return StaleLeader("another supervisor leads")
        case Code.NO_HERD:
            return NoHerd("no herd in this Redis yet")
        case Code.UNKNOWN_MODEL:
            return UnknownModel("no such model")
        case Code.UNREGISTERED:
            return Unregistered("this gateway is not registered")
        case Code.QUEUE_FULL:
            return QueueFull(details[0], int(details[1]))
        case Code.UNKNOWN_INSTANCE:
            return UnknownInstance("no such instance")
        case Code.NOT_LOADED:
            return NotLoaded("model is not loaded")
        case Code.WRONG_STATE:
            return WrongState(details[0])
