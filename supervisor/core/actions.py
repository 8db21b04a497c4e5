"""What the core wants done, in order. Each `Try…`, `Grant` and `Wake` is answered by exactly one outcome
event, unless the instance ends first; until then the core leaves that instance alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llamastead.shared.errors import ApiError
from llamastead.shared.words import EndClass, InstanceState
from llamastead.supervisor.core.reasons import Verdict


@dataclass(frozen=True)
class Start:
    """Start an engine for a model, under this new instance id. Answered by Started…, BecameReady or
    Exited. `share` (0..1) is how far between its smallest and its largest context the model may go, `place`
    the one device it is put on whole ("": as configured, or split over several), `needs` what is booked for
    it per device. `beyond` is what it is said to need beyond all there is, which is tried once all the same.
    """

    instance: str
    model: str
    revision: str
    share: float = 1.0
    place: str = ""
    needs: Mapping[str, int] = field(default_factory=dict)
    beyond: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Grant:
    """Run the `ready` script: READY in the shared state, waiting tickets turned into leases. Answer:
    Granted.
    """

    instance: str
    model: str


@dataclass(frozen=True)
class Wake:
    """Run the `wake` script: WAKING in the shared state, waiting tickets turned into leases, whose requests
    then wake the engine. Answer: Granted (0: it sleeps on).
    """

    instance: str
    model: str


@dataclass(frozen=True)
class TryStop:
    """Run the `stop` script; if it grants, tell the holder to stop. Answer: StopGranted or StopRefused."""

    instance: str
    end_class: EndClass
    for_model: str | None = None


@dataclass(frozen=True)
class TryDrain:
    """Run the `drain` script. Answer: Drained or DrainRefused."""

    instance: str
    for_model: str | None = None
    ordered: bool = False


@dataclass(frozen=True)
class Want:
    """Run the `want` script: who holds the instance unused gives it back at once. No answer."""

    instance: str


@dataclass(frozen=True)
class TryUndrain:
    """Run the `undrain` script, which grants the waiting tickets. Answer: Undrained or UndrainRefused."""

    instance: str


@dataclass(frozen=True)
class TrySleep:
    """Run the `sleep` script. Answer: Slept or SleepRefused."""

    instance: str


@dataclass(frozen=True)
class AbortLoad:
    """Write STOPPING and have the holder end an engine that still loads. `reason` is set when that is a
    failure.
    """

    instance: str
    end_class: EndClass
    for_model: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class ForceStop:
    """Write STOPPING and have the holder end the engine now, whoever is cut. `reason` is set when that is a
    failure.
    """

    instance: str
    end_class: EndClass
    reason: str | None = None


@dataclass(frozen=True)
class FailTickets:
    """Settle tickets of a model with an error: those named, or all that wait (None). Harmless when none
    do.
    """

    model: str
    error: ApiError
    tickets: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ShowFailed:
    """Write down for people that a load failed which had no instance: it was refused before its start."""

    model: str
    reason: str


@dataclass(frozen=True)
class Answer:
    """Answer a command: done or accepted (None), or refused."""

    command: str
    error: ApiError | None = None


@dataclass(frozen=True)
class Ended:
    """Run the `ended` script and let the holder go. `state` is STOPPED or FAILED."""

    instance: str
    model: str
    state: InstanceState
    end_class: EndClass
    reason: str
    code: int | None
    log: tuple[str, ...] = ()


@dataclass(frozen=True)
class Weighed:
    """One instance a decision looked at, and what came of it."""

    instance: str
    model: str
    verdict: Verdict


@dataclass(frozen=True)
class Decide:
    """Record a decision that was taken: to make room for `model`, with every candidate and the filter that
    spared it. `requests` are the ids of requests it was taken for.
    """

    model: str
    weighed: tuple[Weighed, ...]
    requests: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShowTaken:
    """Write down what an instance holds per device, for the next leader and for people."""

    instance: str
    model: str
    needs: Mapping[str, int]


@dataclass(frozen=True)
class Discrepancy:
    """Record that so many bytes of ended processes never showed as free on a device; what it shows counts."""

    device: str
    amount: int


Action = (
    Start
    | Grant
    | Wake
    | TryStop
    | TryDrain
    | Want
    | TryUndrain
    | TrySleep
    | AbortLoad
    | ForceStop
    | FailTickets
    | ShowFailed
    | Answer
    | Ended
    | Decide
    | ShowTaken
    | Discrepancy
)
