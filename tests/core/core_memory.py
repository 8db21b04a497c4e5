"""What the tests of memory share: models that need some, devices that show some, and looks at the ledger."""

from core_herd import Herd, spec

from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core import ledger
from llamastead.supervisor.core.state import Device, ModelSpec
from llamastead.supervisor.core.step import Step

GIB = 1 << 30


def needs(name: str, gib: float, **fields: object) -> ModelSpec:
    """Return a model that needs so much of gpu0, measured unless said otherwise."""
    fields.setdefault("measured", True)
    return spec(name, needs={"gpu0": int(gib * GIB)}, **fields)


def gpu(total: int, free: float | None = None, **fields: object) -> Device:
    """Return a device of so many GiB that frees late."""
    fields.setdefault("frees_late", True)
    return Device(total * GIB, None if free is None else int(free * GIB), **fields)  # type: ignore[arg-type]


def error_of(done: Step) -> act.FailTickets:
    """Return the refusal of a step."""
    (failed,) = [action for action in done.actions if isinstance(action, act.FailTickets)]
    return failed


def account(herd: Herd) -> ledger.Account:
    """Return the account of the one device."""
    (only,) = ledger.account(herd.state)
    return only


def stop(herd: Herd, model: str) -> str:
    """Let an asked stop be granted and return the instance."""
    own = herd.of(model).id
    herd.do(ev.StopGranted(own))
    return own
