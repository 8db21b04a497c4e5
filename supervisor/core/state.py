"""What the supervisor knows and has decided: plain frozen values, nothing that does I/O.

Times are monotonic seconds of the supervisor (floats), bytes are integers, models and instances are named by
their ids. Mappings are never changed in place: `step` returns a new `State` that shares what did not change.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from llamastead.shared.errors import ApiError
from llamastead.shared.words import EndClass, InstanceState, WaitReason


@dataclass(frozen=True)
class Policy:
    """The limits the scheduler works under.

    `models_max` instances at once (0: no limit); seconds elsewhere. `priority_step` is the head start one
    priority class is worth, which is what makes waiting outweigh priority in the end. `measure_wait` is how
    long an entry waits for its model to be measured.
    """

    models_max: int = 4
    max_wait: float = 30.0
    min_residence: float = 2.0
    queue_timeout: float = 600.0
    stall_timeout: float = 120.0
    priority_step: float = 30.0
    measure_wait: float = 5.0


@dataclass(frozen=True)
class Device:
    """A device's memory in bytes. `free` is what it showed last (None: it does not tell), `margin` what stays
    free, `external` what others use; `frees_late`: bytes of an ended process show as free only after a while.
    `strangers` are bytes by process that is not ours, so far as the device tells. `lasting` is how much of
    `external` is there for good: that it is more, since `more_since`, may pass; before it is `judged` nothing
    of that is known.
    """

    total: int
    free: int | None = None
    margin: int = 0
    external: int = 0
    frees_late: bool = False
    strangers: Mapping[str, int] = field(default_factory=dict)
    lasting: int = 0
    more_since: float = 0.0
    judged: bool = False


@dataclass(frozen=True)
class Releasing:
    """Bytes of an ended instance that do not show as free yet: for `owner`, awaited `until` then; `failed`:
    it ended while it loaded, and nobody sent it away.
    """

    model: str
    amounts: Mapping[str, int]
    until: float
    owner: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class Place:
    """One device that a model may be put on whole, and what it needs and may grow by then, in bytes per
    device: there, and on the host.
    """

    device: str
    needs: Mapping[str, int]
    grows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """What the scheduler must know of a registry entry.

    `revision` changes when a started instance would differ; `unload_after` is idle seconds until the process
    ends (None: never); `max_wait` None means the herd's.

    `needs` is bytes per device at the smallest context that will do, `grows` how much more the largest takes;
    `measured` says that these are no estimate, `awaited` that a measurement of them is under way or to come,
    `absent` that the model's files have yet to come from the hub, `missing` names files without which a start
    would fail.
    With `places` the model goes whole to one of those, and `needs` is for when it is too big for each of
    them and is split over several.
    """

    name: str
    revision: str
    pinned: bool = False
    load_on_startup: bool = False
    unload_after: float | None = None
    priority: int = 0
    max_wait: float | None = None
    needs: Mapping[str, int] = field(default_factory=dict)
    grows: Mapping[str, int] = field(default_factory=dict)
    measured: bool = False
    awaited: bool = False
    places: tuple[Place, ...] = ()
    absent: bool = False
    missing: str = ""


@dataclass(frozen=True)
class Demand:
    """Tickets that wait for a model: `first` is the arrival of the oldest, `expired` those past the queue
    time-out.

    `tickets` counts all of them, the expired ones included; `requests` names the oldest few by their request
    ids, for those who read of a decision.
    """

    first: float
    tickets: int
    expired: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claims:
    """Who holds an instance: `leases` (detached conversations included) and when inference last used it, if
    ever.
    """

    leases: int
    last_used: float | None = None


class Ask(StrEnum):
    """A script whose outcome is not known yet; an instance has at most one, and is left alone until it is
    in.
    """

    GRANT = "grant"
    STOP = "stop"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    SLEEP = "sleep"


@dataclass(frozen=True)
class Leaving:
    """Why an instance is to go.

    `for_model` is the queue entry that gets its room (None: nobody's, or back with the planner); `ordered`
    says that it goes whether or not that entry lasts (a person's unload, a vanished model); `reason` is the
    text of a failure that made us end it (a stall, no answers), which then counts as failed.
    """

    end_class: EndClass
    for_model: str | None = None
    ordered: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Instance:
    """One llama-server process, from the decision to start it until its confirmed exit.

    `moved_at` is the last sign of progress while it loads; `load_time` is measured at the first ready;
    `last_used` is set when the load succeeds and by inference only; `served` says that a ticket or lease
    was ever held on it; `drowsy` that its engine said it sleeps, and nothing since; `resting` that it sleeps
    for all and has given its bytes back but for `rests`; `stale` that the last refusal said nothing that
    helps, so no script is tried before facts are read again.

    `wanted`: those who held it when an entry began to wait for its room were told so.

    `place` is the one device it was put on whole, "" where it lies as configured or split over several;
    `needs` is what is booked for it awake, `shown` how much of that its devices show as used.
    """

    id: str
    model: str
    revision: str
    state: InstanceState
    started_at: float
    moved_at: float
    place: str = ""
    needs: Mapping[str, int] = field(default_factory=dict)
    progress: float | None = None
    ready_at: float | None = None
    load_time: float = 0.0
    last_used: float = 0.0
    used: bool = False
    served: bool = False
    leases: int = 0
    ask: Ask | None = None
    leaving: Leaving | None = None
    stale: bool = False
    wanted: bool = False
    drowsy: bool = False
    resting: bool = False
    rests: Mapping[str, int] = field(default_factory=dict)
    shown: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Trouble:
    """What went wrong with a model lately.

    `failures` counts starts that failed in a row, `crashes` ends in service; `until` is the end of its
    back-off; `doomed` the remembered error of a start that cannot succeed as things are; `retried` that
    the one retry of a failed start is used up; `evict_more` that the retry must free one more.
    """

    revision: str
    failures: int = 0
    crashes: int = 0
    until: float = 0.0
    doomed: ApiError | None = None
    retried: bool = False
    evict_more: bool = False


@dataclass(frozen=True)
class Wait:
    """Why an entry waits: `blockers` are the instances in its way, `until` when that ends by itself, if
    known.
    """

    reason: WaitReason
    blockers: tuple[str, ...] = ()
    until: float | None = None


@dataclass(frozen=True)
class State:
    """Everything the core knows. `prefix` and `next_number` make instance ids, `seed` the jitter of
    back-offs.

    `orders` holds the arrival of loads that a person or the start-up asked for and that are not ready yet;
    `waits` the reason each unserved entry waits, computed by the last step. `devices` are as read last,
    `releasing` what ended instances are about to free, `measuring` what is booked for a model's measurement,
    `tried` the revision of each model that was started although it is measured to be too big.
    """

    policy: Policy
    prefix: str
    seed: str = ""
    next_number: int = 1
    recovering: bool = True
    closing: bool = False
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    instances: Mapping[str, Instance] = field(default_factory=dict)
    demands: Mapping[str, Demand] = field(default_factory=dict)
    orders: Mapping[str, float] = field(default_factory=dict)
    troubles: Mapping[str, Trouble] = field(default_factory=dict)
    waits: Mapping[str, Wait] = field(default_factory=dict)
    devices: Mapping[str, Device] = field(default_factory=dict)
    releasing: Mapping[str, Releasing] = field(default_factory=dict)
    measuring: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tried: Mapping[str, str] = field(default_factory=dict)

    def instance_of(self, model: str) -> Instance | None:
        """Return the instance of a model, the one that serves best if an adoption brought two, or None."""
        own = [instance for instance in self.instances.values() if instance.model == model]
        return min(own, key=lambda i: (_SERVES_BEST.get(i.state, len(_SERVES_BEST)), i.id), default=None)

    def put(self, instance: Instance) -> "State":
        """Return the state with this instance added or replaced."""
        return replace(self, instances={**self.instances, instance.id: instance})


_SERVES_BEST = {
    state: rank
    for rank, state in enumerate(
        (InstanceState.READY, InstanceState.WAKING, InstanceState.SLEEPING, InstanceState.LOADING,
         InstanceState.STARTING, InstanceState.RECOVERING, InstanceState.DRAINING)
    )
}  # fmt: skip


def initial(policy: Policy, prefix: str, models: Mapping[str, ModelSpec], seed: str = "") -> State:
    """Return the state a supervisor starts in: RECOVERING, with the registry read and no instance known."""
    return State(policy=policy, prefix=prefix, models=dict(models), seed=seed)
