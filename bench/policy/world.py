"""A herd in virtual time: engines that load, serve and stop, clients that send, and a policy that decides.

Seconds throughout. Nothing here is random and nothing asks for the time, so a run can be repeated exactly.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Protocol


@dataclass(frozen=True)
class Model:
    """How long a model takes to load and to stop, and its priority class."""

    load: float
    stop: float = 0.5
    priority: int = 0


@dataclass(frozen=True)
class Client:
    """Somebody who sends requests to one model, each a pause after the last answer, the first at `starts`.

    `requests` are pairs of that pause and of the time the engine works on the request.
    """

    model: str
    starts: float
    requests: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Trace:
    """What arrives at a herd of at most `models_max` engines, each answering `parallel` requests at once."""

    name: str
    models: Mapping[str, Model]
    models_max: int
    clients: tuple[Client, ...]
    parallel: int = 4


@dataclass(eq=False)
class Request:
    """One request; it waits from `arrived` until a ready engine gets it at `admitted`."""

    model: str
    arrived: float
    service: float
    rest: Iterator[tuple[float, float]]
    admitted: float | None = None


class Phase(Enum):
    """Where an engine is in its life."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    GONE = "gone"


@dataclass(eq=False)
class Engine:
    """One llama-server. `busy` is the number of requests it was given and has not answered."""

    model: str
    times: Model
    slots: list[float]
    phase: Phase = Phase.LOADING
    busy: int = 0
    last_used: float = 0.0
    ends: float = 0.0

    def rest(self, now: float) -> float:
        """Return how long it will work on what it was given, what waits for a slot of its own included."""
        return max(0.0, self.ends - now) if self.busy else 0.0


class Policy(Protocol):
    """What a scheduler hears of. It answers through the herd's `start`, `stop` and `admit`."""

    def on_arrival(self, request: Request) -> None:
        """Take in a request, which the policy admits now or later."""

    def on_ready(self, engine: Engine) -> None:
        """An engine has loaded."""

    def on_done(self, engine: Engine) -> None:
        """An engine has given an answer; `engine.busy` says whether it has more to do."""

    def on_gone(self, engine: Engine) -> None:
        """An engine has stopped and its room is free."""


class BrokenPolicyError(AssertionError):
    """A policy did what none may: cut an answer, take more room than there is, or leave a request waiting."""


@dataclass
class Herd:
    """Clock, engines and the record of a run; `answered_at` is the time of the last answer."""

    trace: Trace
    now: float = 0.0
    engines: list[Engine] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    loads: int = 0
    swaps: int = 0
    answered_at: float = 0.0
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _policy: Policy | None = None

    def run(self, policy: Policy) -> None:
        """Replay the trace to its end. Raises BrokenPolicyError."""
        self._policy = policy
        for client in self.trace.clients:
            self._send_next(client.model, client.starts, iter(client.requests))
        while self._due:
            self.now, _, call = heappop(self._due)
            call()
        left = [request for request in self.requests if request.admitted is None]
        if left:
            raise BrokenPolicyError(f"{len(left)} requests were never let in, the first for {left[0].model}")

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have something happen later; what is due at the same time happens in the order asked for."""
        heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def engine_of(self, model: str) -> Engine | None:
        """Return the engine of a model, if there is one, in whatever phase."""
        return next((engine for engine in self.engines if engine.model == model), None)

    def start(self, model: str) -> Engine:
        """Start an engine; it is ready after the model's load time."""
        if len(self.engines) >= self.trace.models_max or self.engine_of(model):
            raise BrokenPolicyError(f"no room to start {model} at {self.now:.3f}")
        times = self.trace.models[model]
        engine = Engine(model, times, [0.0] * self.trace.parallel)
        self.engines.append(engine)
        self.loads += 1
        self.at(self.now + times.load, lambda: self._becomes_ready(engine))
        return engine

    def stop(self, engine: Engine) -> None:
        """Stop an idle engine to make room; it is gone after the model's stop time."""
        if engine.busy or engine.phase is not Phase.READY:
            raise BrokenPolicyError(
                f"{engine.model} was stopped while {engine.phase.value}, {engine.busy} busy"
            )
        engine.phase = Phase.STOPPING
        self.swaps += 1
        self.at(self.now + engine.times.stop, lambda: self._is_gone(engine))

    def admit(self, engine: Engine, request: Request) -> None:
        """Hand a request to a ready engine, which answers in this order, as many at once as it has slots."""
        if engine.phase is not Phase.READY or engine.model != request.model or request.admitted is not None:
            raise BrokenPolicyError(f"a request for {request.model} can't go to {engine.model} now")
        request.admitted = self.now
        engine.busy += 1
        engine.last_used = self.now
        ends = max(self.now, engine.slots[0]) + request.service
        heapreplace(engine.slots, ends)
        engine.ends = max(engine.ends, ends)
        self.at(ends, lambda: self._is_answered(engine, request))

    def _becomes_ready(self, engine: Engine) -> None:
        engine.phase = Phase.READY
        engine.last_used = self.now
        heapify(engine.slots)
        self._told().on_ready(engine)

    def _is_gone(self, engine: Engine) -> None:
        engine.phase = Phase.GONE
        self.engines.remove(engine)
        self._told().on_gone(engine)

    def _is_answered(self, engine: Engine, request: Request) -> None:
        engine.busy -= 1
        engine.last_used = self.answered_at = self.now
        self._told().on_done(engine)
        self._send_next(request.model, self.now, request.rest)

    def _send_next(self, model: str, after: float, rest: Iterator[tuple[float, float]]) -> None:
        following = next(rest, None)
        if following is None:
            return
        pause, service = following
        self.at(after + pause, lambda: self._arrives(Request(model, self.now, service, rest)))

    def _arrives(self, request: Request) -> None:
        self.requests.append(request)
        self._told().on_arrival(request)

    def _told(self) -> Policy:
        if self._policy is None:
            raise BrokenPolicyError("nobody decides")
        return self._policy
