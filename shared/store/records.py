"""What the store hands out: plain frozen values. Every `_ms` is Redis time, milliseconds since the epoch."""

from collections.abc import Mapping
from dataclasses import dataclass

from llamastead.shared.words import UseKind, WaitReason


@dataclass(frozen=True)
class Granted:
    """A lease was booked: forward to `address`; the instance's key follows from id and nonce."""

    instance: str
    address: str
    nonce: str
    state_revision: int


@dataclass(frozen=True)
class Waiting:
    """The ticket stands in the queue; its end comes through the inbox.

    Keep `first_arrival_ms`: a ticket that got lost is enrolled again with it.
    """

    first_arrival_ms: int


@dataclass(frozen=True)
class HeartbeatResult:
    """What a heartbeat found.

    `known_before`: this gateway was registered already; False after a sweep or with an emptied Redis.
    `skipped`: the last one that Redis knows of is not the one before this: some did not arrive, or Redis
    is back with older data. `herd_open`: a leader has opened the herd; while False nothing is reported
    lost or missing. `lost_leases`: instances whose asserted lease is worth nothing any more (ended or
    stopping). `missing_tickets`: asserted tickets that do not wait (any more): settled by a message at or
    before `inbox_id`, or lost. Those still unsettled once the inbox is read up to `inbox_id` are to be
    enrolled again.
    """

    known_before: bool
    skipped: bool
    herd_open: bool
    lost_leases: tuple[str, ...]
    missing_tickets: tuple[str, ...]
    inbox_id: str


@dataclass(frozen=True)
class Message:
    """An entry of a stream."""

    id: str
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Messages:
    """What `read_wait` brought, each list in order; both empty when the time was over."""

    inbox: tuple[Message, ...]
    events: tuple[Message, ...]


@dataclass(frozen=True)
class Cursors:
    """Where a gateway begins to read its inbox and `events`: the last ids, taken before reading facts."""

    inbox_id: str
    events_id: str


@dataclass(frozen=True)
class Ticket:
    """One waiting request."""

    id: str
    gateway: str
    kind: UseKind
    request_id: str
    enqueued_ms: int
    deadline_ms: int


@dataclass(frozen=True)
class Demand:
    """A queue entry: one model and all its tickets, oldest first; `first_ms` orders the queue."""

    first_ms: int
    tickets: tuple[Ticket, ...]


@dataclass(frozen=True)
class Wait:
    """Why a queue entry waits. `reason` None is a fault: the supervisor knows none.

    `blockers` is instance → model of what is in its way, `until_ms` when that ends by itself, if known.
    `since_ms` is its first arrival, `rank_ms` what orders the queue; `ordered`: its load was asked for.
    """

    reason: WaitReason | None
    blockers: Mapping[str, str]
    until_ms: int | None
    since_ms: int
    rank_ms: int
    ordered: bool


@dataclass(frozen=True)
class Claims:
    """Who holds an instance: gateway → lease id; when it was last used for inference (0 = never)."""

    leases: Mapping[str, str]
    last_used_ms: int


@dataclass(frozen=True)
class Leadership:
    """The present leadership, or the last one while nobody leads; `number` 0: there was none.

    `ready` is what the leader says of its scheduling; it has said nothing yet while it takes over.
    """

    number: int
    leading: bool
    ready: bool
    oldest_demand_ms: int
    heartbeat_ms: int

    @property
    def trouble(self) -> str:
        """What keeps requests from being scheduled, empty for nothing; it names no model."""
        if not self.leading:
            return "no supervisor leads"
        return "" if self.ready else "the supervisor is not ready"


@dataclass(frozen=True)
class Facts:
    """One consistent look at what the scheduler decides on. `queue` is in order of first arrival."""

    now_ms: int
    queue: Mapping[str, Demand]
    claims: Mapping[str, Claims]
    gateways: Mapping[str, int]


@dataclass(frozen=True)
class Stopping:
    """The stop was granted: no lease existed, and none can be booked from now on."""


@dataclass(frozen=True)
class Claimed:
    """The stop was refused: so many leases are held."""

    leases: int


@dataclass(frozen=True)
class Command:
    """Something asked of the supervisor.

    Verbs of gateways: load, unload, logs, … (`gateway` set: answer it). Verbs that scripts and jobs write (no
    answer): demand{model}, left{model}, idle{instance, last_used_ms}, broken{instance, errors},
    metadata{identity, model}. `expired`:
    its deadline had passed when it was read; answer so and do nothing. `again`: it was read before, by
    a leader that may have done it without saying so.
    """

    id: str
    verb: str
    gateway: str
    deadline_ms: int | None
    expired: bool
    fields: Mapping[str, str]
    again: bool = False
