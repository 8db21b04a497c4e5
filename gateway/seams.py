"""What the byte path asks of the rest of the gateway: a catalog of models and an admission desk."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from llamastead.shared.errors import ApiError
from llamastead.shared.words import UseKind

Scope = MutableMapping[str, Any]


class CatalogModel(Protocol):
    """A registry entry as this gateway knows it now."""

    @property
    def name(self) -> str:
        """The canonical name, whatever alias the client wrote."""
        ...

    @property
    def running(self) -> bool:
        """True when a request needs no new load: the model is loading, loaded, draining or asleep."""
        ...

    @property
    def asleep(self) -> bool:
        """True while its engine sleeps: what it can't answer asleep wakes it."""
        ...

    @property
    def leaving(self) -> bool:
        """True while its instance drains or stops: a request may find it, or have it loaded again."""
        ...

    @property
    def timeouts(self) -> Mapping[str, float]:
        """Its own time-outs by the name of the setting, in seconds, 0 for none."""
        ...

    @property
    def state(self) -> str:
        """Our own word for the state of its instance, empty without one."""
        ...

    @property
    def progress(self) -> Mapping[str, Any]:
        """How far its load has come, in the engine's words; empty before it says so."""
        ...


class Catalog(Protocol):
    """The local copy of the registry."""

    def resolve(self, name: str) -> CatalogModel | None:
        """Return the entry of a name or alias, matched exactly as written, or None."""
        ...

    async def look_again(self, name: str) -> CatalogModel | None:
        """Ask Redis once for a name the local copy doesn't have. Raises ApiError when it can't be asked."""
        ...


class Claim(Protocol):
    """One request's share of this gateway's lease on an instance; lives as long as the ASGI call."""

    @property
    def instance(self) -> str:
        """The instance id, `<host>-<epoch>-<k>`."""
        ...

    @property
    def address(self) -> str:
        """Where the instance listens: `unix:<path>`."""
        ...

    @property
    def key(self) -> str:
        """The instance's own API key, to be sent as bearer."""
        ...

    @property
    def path(self) -> str:
        """`hot` when the instance was ready at once, `cold` when the request waited for it."""
        ...

    @property
    def wait_ms(self) -> int:
        """Milliseconds from the request's arrival at admission to the grant."""
        ...

    @property
    def load_ms(self) -> int:
        """Milliseconds of the load this request waited for, 0 when it waited for none."""
        ...

    def answered(self, status: int) -> None:
        """Note the status with which the instance answers; never awaits."""
        ...

    def close(self) -> None:
        """Give the share back; idempotent, never awaits."""
        ...


@dataclass(frozen=True)
class NoLoad:
    """That a request may not have its model loaded: the error it gets then, and whether it may wake it."""

    error: ApiError
    may_wake: bool


AnyClaim = TypeVar("AnyClaim", bound=Claim)


def may_load() -> None:
    """Return nothing against a load."""


class Admission(Protocol[AnyClaim]):
    """Grants claims on instances, at once or after a wait in the queue."""

    async def acquire(
        self, model: str, kind: UseKind, request_id: str, no_load: Callable[[], NoLoad | None] = may_load
    ) -> AnyClaim:
        """Return a claim on a ready instance of `model` (canonical name).

        `no_load` is asked where Redis is: a copy of the registry may be a moment behind, and only Redis knows
        whether the model is still there. Raises ApiError; cancelled, it gives its ticket back.
        """
        ...

    async def refused(self, claim: AnyClaim, no_load: Callable[[], NoLoad | None] = may_load) -> AnyClaim:
        """Trade a claim whose address refused, before any answer came, for one on another instance.

        The old claim is closed here, also when this is cancelled. Raises ApiError.
        """
        ...


class ProxiedRoute(Protocol):
    """What the route table says of a route that an instance answers."""

    @property
    def may_load(self) -> bool:
        """True when a model that isn't loaded is loaded for it without being asked to."""
        ...

    @property
    def streams(self) -> bool:
        """True when a request on it may ask for a stream of events."""
        ...

    @property
    def use(self) -> UseKind | None:
        """What a request on it is to the scheduler; never None where the proxy is called."""
        ...


class AnswerCut(Exception):  # noqa: N818
    """An answer that had begun can't be finished: the connection must close without a clean end."""


def owner_of(scope: Scope) -> str:
    """Return the short name of the client's key, empty where none is asked for."""
    found: str = scope["state"]["owner"](scope["headers"])
    return found


def probes(scope: Scope) -> bool:
    """Return whether the client's key may not have a model loaded."""
    found: bool = scope["state"]["probes"](scope["headers"])
    return found


def request_id(scope: Scope) -> str:
    """Return the request's id, which the edge put into `scope["state"]["request_id"]`."""
    found: str = scope["state"]["request_id"]
    return found


def route_of(scope: Scope) -> ProxiedRoute:
    """Return the request's route, which the edge put into `scope["state"]["route"]`."""
    found: ProxiedRoute = scope["state"]["route"]
    return found
