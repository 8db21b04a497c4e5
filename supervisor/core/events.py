"""What the core is told. Facts may be late or repeated; news of an instance that is gone is ignored.

The driver reads `Observed` only after it has carried out the actions of the step before, otherwise tickets
that were just settled would seem to wait again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llamastead.shared.errors import ApiError
from llamastead.shared.words import EndClass, InstanceState
from llamastead.supervisor.core.state import Claims, Demand, Device, ModelSpec


@dataclass(frozen=True)
class Tick:
    """Time has passed; nothing else happened. A spurious one changes nothing."""


@dataclass(frozen=True)
class Observed:
    """All waiting tickets by model and all claims by instance, as one read of the shared state showed
    them.
    """

    demands: Mapping[str, Demand] = field(default_factory=dict)
    claims: Mapping[str, Claims] = field(default_factory=dict)


@dataclass(frozen=True)
class DevicesRead:
    """All devices as read just now, and what each instance's process uses of them, so far as they tell.

    Not `complete`: before it is known what lives, so what they show as used may be ours.
    """

    devices: Mapping[str, Device]
    seen: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    complete: bool = True


@dataclass(frozen=True)
class MeasuringBegan:
    """A model's memory is being measured, which takes so many bytes per device itself."""

    model: str
    amounts: Mapping[str, int]


@dataclass(frozen=True)
class MeasuringEnded:
    """No measurement of this model is under way any more."""

    model: str


@dataclass(frozen=True)
class RegistryChanged:
    """The registry, whole, with what is known of each model's memory. Models that are not in it drain and
    go; a changed revision only marks what runs.
    """

    models: Mapping[str, ModelSpec]


@dataclass(frozen=True)
class RestartOrdered:
    """Instances whose model's revision has changed since they started are to start anew: idle ones now,
    busy ones once nobody holds them. Sleepers go without being loaded again.
    """


@dataclass(frozen=True)
class Found:
    """A record of an instance from before our time, not verified yet: it counts, and nothing else."""

    instance: str
    model: str
    revision: str


@dataclass(frozen=True)
class Adopted:
    """An instance from before our time was verified and is in `state`.

    `ordered` says that its drain or stop was asked for by a person; `end_class` is the class its stop was
    given; `needs` is what was booked for it last, None if nobody noted that; `place` is the device it was put
    on whole.
    """

    instance: str
    model: str
    revision: str
    state: InstanceState
    started_at: float
    ready_at: float | None = None
    load_time: float = 0.0
    leases: int = 0
    last_used: float | None = None
    ordered: bool = False
    end_class: EndClass = EndClass.STOPPED
    needs: Mapping[str, int] | None = None
    place: str = ""


@dataclass(frozen=True)
class RecoveryDone:
    """Every record was verified, or the deadline passed. `preload`: the herd is new, so load-on-startup
    applies. `ordered`: loads that an earlier leader had been ordered to do and had not done.
    """

    preload: bool = True
    ordered: tuple[str, ...] = ()


@dataclass(frozen=True)
class Started:
    """The engine's process exists."""

    instance: str


@dataclass(frozen=True)
class Loading:
    """The engine's state line says loading; `progress` is its value (0..1) if it gave one. A repeated value
    is none.
    """

    instance: str
    progress: float | None = None


@dataclass(frozen=True)
class Moved:
    """Another sign that a load goes on: its log or its resident memory grew."""

    instance: str


@dataclass(frozen=True)
class BecameReady:
    """The engine's state line says ready."""

    instance: str


@dataclass(frozen=True)
class Took:
    """What an instance says it took per device at its load (or wake), and how much of that its devices show
    as used.
    """

    instance: str
    needs: Mapping[str, int]
    shown: Mapping[str, int]


@dataclass(frozen=True)
class FellAsleep:
    """The engine's state line says sleeping."""

    instance: str


@dataclass(frozen=True)
class Unresponsive:
    """A ready instance is of no use: it answers no probes, or requests with errors only; `reason` says
    which.
    """

    instance: str
    reason: str


@dataclass(frozen=True)
class TurnsAway:
    """An instance finishes what it has and lets nobody new in: somebody else told its engine or its holder
    to stop.
    """

    instance: str


@dataclass(frozen=True)
class Exited:
    """The process is gone, confirmed by its holder or by the kernel.

    `doomed` says that no retry can help until the model's files or options change; `log` are its last lines.
    """

    instance: str
    end_class: EndClass
    reason: str
    code: int | None = None
    doomed: bool = False
    log: tuple[str, ...] = ()


@dataclass(frozen=True)
class StopFailed:
    """KILL had no effect within the time allowed; the process still holds what it holds. KILL goes on being
    tried.
    """

    instance: str


@dataclass(frozen=True)
class Granted:
    """Outcome of `Grant` and `Wake`: so many leases were booked for the tickets that waited."""

    instance: str
    leases: int


@dataclass(frozen=True)
class StopGranted:
    """Outcome of `TryStop`: nobody can come any more and the holder was told to stop the engine."""

    instance: str


@dataclass(frozen=True)
class StopRefused:
    """Outcome of `TryStop`: there are claims, or the instance was not in a state to stop (`claims` 0)."""

    instance: str
    claims: int


@dataclass(frozen=True)
class Drained:
    """Outcome of `TryDrain`: nobody new is let in, `claims` go on."""

    instance: str
    claims: int


@dataclass(frozen=True)
class DrainRefused:
    """Outcome of `TryDrain`: the instance was not ready."""

    instance: str


@dataclass(frozen=True)
class Undrained:
    """Outcome of `TryUndrain`: ready again, with so many leases booked for the tickets that waited."""

    instance: str
    leases: int


@dataclass(frozen=True)
class UndrainRefused:
    """Outcome of `TryUndrain`: the instance was not draining."""

    instance: str


@dataclass(frozen=True)
class Slept:
    """Outcome of `TrySleep`: the shared state says sleeping."""

    instance: str


@dataclass(frozen=True)
class SleepRefused:
    """Outcome of `TrySleep`: somebody holds it, so its request will wake the engine; `claims` of them."""

    instance: str
    claims: int


@dataclass(frozen=True)
class LoadOrdered:
    """A person asks for a model to be loaded; `command` is answered at once. `again`: an earlier leader may
    have done it.
    """

    model: str
    command: str
    again: bool = False


@dataclass(frozen=True)
class DownloadFailed:
    """The files of a model that is waited for could not be had, for this reason."""

    model: str
    error: ApiError


@dataclass(frozen=True)
class ShutDown:
    """The whole herd is to stop: nothing starts any more, idle instances go at once, busy ones when they
    are done or, with `force`, now.
    """

    force: bool = False


@dataclass(frozen=True)
class UnloadOrdered:
    """A person asks for a model to go; `force` cuts what runs. An `instance` that is not current any more
    does nothing. `again`: an earlier leader may have done it.
    """

    model: str
    command: str
    force: bool = False
    instance: str | None = None
    again: bool = False


InstanceEvent = (
    Started
    | Loading
    | Moved
    | BecameReady
    | Took
    | FellAsleep
    | Unresponsive
    | TurnsAway
    | Exited
    | StopFailed
    | Granted
    | StopGranted
    | StopRefused
    | Drained
    | DrainRefused
    | Undrained
    | UndrainRefused
    | Slept
    | SleepRefused
)
Event = (
    Tick
    | Observed
    | DevicesRead
    | MeasuringBegan
    | MeasuringEnded
    | RegistryChanged
    | RestartOrdered
    | Found
    | Adopted
    | RecoveryDone
    | LoadOrdered
    | UnloadOrdered
    | DownloadFailed
    | ShutDown
    | InstanceEvent
)
