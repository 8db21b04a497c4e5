"""The leases this gateway process holds, and the claims of single requests on them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from llamastead.shared.words import UseKind


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lease points: a model's instance, its address and its own API key."""

    model: str
    instance: str
    address: str
    key: str


class Claim:
    """One request's share of a lease; see gateway/seams.py for what each member says."""

    __slots__ = ("_lease", "kind", "load_ms", "path", "request_id", "wait_ms")

    def __init__(
        self, lease: "Lease", kind: UseKind, request_id: str, path: str, wait_ms: int, load_ms: int
    ) -> None:
        self._lease: Lease | None = lease
        self.kind = kind
        self.request_id = request_id
        self.path = path
        self.wait_ms = wait_ms
        self.load_ms = load_ms

    @property
    def place(self) -> Place:
        """Where the claimed instance is. Requires: not closed."""
        if self._lease is None:
            raise RuntimeError("the claim is closed")
        return self._lease.place

    @property
    def model(self) -> str:
        """The canonical name of the model."""
        return self.place.model

    @property
    def instance(self) -> str:
        """The instance's id."""
        return self.place.instance

    @property
    def address(self) -> str:
        """Where the instance listens."""
        return self.place.address

    @property
    def key(self) -> str:
        """The instance's own API key."""
        return self.place.key

    def answered(self, status: int) -> None:
        """Note the status with which the instance answers this request. Requires: not closed."""
        if self._lease is not None and self.kind is UseKind.INFERENCE:
            self._lease.answered(status)

    def close(self) -> None:
        """Give the share back; idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.drop(self.kind)


class Lease:
    """This process's lease on one instance, shared by all its requests.

    It lives as long as a request uses it, and after the last inference request for the linger time, so that a
    client that asks again at once meets a warm path, unless somebody waits for the instance's room. A retired
    lease serves those who have it and nobody new.
    """

    __slots__ = (
        "_linger",
        "_linger_until",
        "_loop",
        "_on_answer",
        "_on_idle",
        "_timer",
        "count",
        "ids",
        "place",
        "retired",
        "used",
    )

    def __init__(
        self,
        place: Place,
        linger_s: float,
        on_idle: Callable[["Lease"], None],
        on_answer: Callable[[Place, int], None],
    ) -> None:
        self.place = place
        # Every id Redis may know this lease by: two grants may cross, and only the later one counts there.
        self.ids: list[str] = []
        self.count = 0
        self.used = False
        self.retired = False
        self._linger = linger_s
        self._linger_until = 0.0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._on_idle = on_idle
        self._on_answer = on_answer

    def claim(self, kind: UseKind, request_id: str, path: str, wait_ms: int, load_ms: int) -> Claim:
        """Count one more request."""
        self.count += 1
        self.used = self.used or kind is UseKind.INFERENCE
        return Claim(self, kind, request_id, path, wait_ms, load_ms)

    def drop(self, kind: UseKind) -> None:
        """Count one request less; the last one starts the linger time, or ends the lease."""
        self.count -= 1
        if kind is UseKind.INFERENCE:
            self._linger_until = self._loop.time() + self._linger
        if self.count == 0:
            self.settle()

    def answered(self, status: int) -> None:
        """Note the status of an inference answer."""
        self._on_answer(self.place, status)

    def settle(self) -> None:
        """End the lease if nobody uses it and its linger time is over, else look again when that is."""
        if self.count:
            return
        now = self._loop.time()
        if self.retired or now >= self._linger_until:
            self._stop_timer()
            self._on_idle(self)
        elif self._timer is None:
            # One timer per linger time, not per request: it re-arms itself when the lease was used since.
            self._timer = self._loop.call_at(self._linger_until, self._on_timer)

    def hurry(self) -> None:
        """Don't linger: somebody waits for the instance's room."""
        self._linger = self._linger_until = 0.0
        self._stop_timer()
        self.settle()

    def retire(self) -> None:
        """Serve nobody new, and don't linger."""
        self.retired = True
        self.settle()

    def _on_timer(self) -> None:
        self._timer = None
        self.settle()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Leases:
    """All leases of this process: at most one per instance, one of them per model for newcomers."""

    def __init__(
        self, linger_s: float, release: Callable[[Lease], None], report: Callable[[str, bool], None]
    ) -> None:
        """`release` is called once a lease is over, `report` with an instance and whether it answered right:
        for its first right answer, and for errors before that. They tell Redis, and must not block.
        """
        self._linger_s = linger_s
        self._release = release
        self._by_instance: dict[str, Lease] = {}
        self._warm: dict[str, Lease] = {}
        self._report = report
        self._proven: dict[str, str] = {}

    def warm(self, model: str) -> Lease | None:
        """Return the lease that a request for `model` may share right now."""
        return self._warm.get(model)

    def book(self, place: Place, lease_id: str, *, warm: bool = True) -> Lease:
        """Note a lease that Redis granted, and make it the one for newcomers unless `warm` is False: then its
        instance may sleep.

        The caller claims it or calls `settle`.
        """
        lease = self._by_instance.get(place.instance)
        if lease is None:
            lease = self._by_instance[place.instance] = Lease(
                place, self._linger_s, self._on_idle, self._on_answer
            )
        if lease_id not in lease.ids:
            lease.ids.append(lease_id)
        lease.retired = False
        if warm:
            self._warm[place.model] = lease
        return lease

    def retire(self, instance: str) -> None:
        """Send nobody new to an instance: it drains, ended, refused or is lost to us."""
        lease = self._by_instance.get(instance)
        if lease is None:
            return
        if self._warm.get(lease.place.model) is lease:
            del self._warm[lease.place.model]
        lease.retire()

    def hurry(self, instance: str) -> None:
        """Give a lease back as soon as no request uses it; none is fine."""
        lease = self._by_instance.get(instance)
        if lease is not None:
            lease.hurry()

    def ids(self) -> dict[str, str]:
        """Return instance → the id that Redis most likely knows: ids are numbered, the latest grant wins."""
        return {instance: max(lease.ids, key=number_of) for instance, lease in self._by_instance.items()}

    def in_flight(self) -> int:
        """Return how many requests hold a claim now."""
        return sum(lease.count for lease in self._by_instance.values())

    def busy(self) -> dict[str, int]:
        """Return instance → how many requests hold a claim on it now."""
        return {name: lease.count for name, lease in self._by_instance.items() if lease.count}

    def _on_answer(self, place: Place, status: int) -> None:
        right = status in _RIGHT
        if self._proven.get(place.model) == place.instance or not (right or status in _BROKEN):
            return
        if right:
            self._proven[place.model] = place.instance
        self._report(place.instance, right)

    def _on_idle(self, lease: Lease) -> None:
        del self._by_instance[lease.place.instance]
        if self._warm.get(lease.place.model) is lease:
            del self._warm[lease.place.model]
        self._release(lease)


_RIGHT = range(200, 300)
# Not 501 (the model can't do this) nor 503 (not now), which a sound engine says too.
_BROKEN = frozenset({500, 502, 504})


PEEK_MARK = "p"


def is_peek(lease_id: str) -> bool:
    """Return whether a lease was taken for peeks alone: no request of another kind shares such a one."""
    return lease_id.endswith(PEEK_MARK)


def number_of(ticket: str) -> int:
    """Return the number in an id: `<gateway>.<number>`, a peek's with its mark, a grant's with a `+`."""
    return int(ticket.rpartition(".")[2].rstrip(f"+{PEEK_MARK}"))
