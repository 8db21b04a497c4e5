"""Our policy: the real core, told what a supervisor would tell it and obeyed as a driver would obey."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bench.policy.bound import Stay
from bench.policy.world import BrokenPolicyError, Engine, Herd, Request
from llamastead.shared.words import EndClass
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core.state import Claims, Demand, ModelSpec, Policy, State, initial
from llamastead.supervisor.core.step import Step, step

# Seconds from a change of the shared state until the core is told: a message, a read, a step.
REACTION = 0.005

StepFunction = Callable[[State, ev.Event, float], Step]


@dataclass(eq=False)
class Shared:
    """An instance as the shared state shows it to gateways: `open` while it lets requests in."""

    engine: Engine
    open: bool = False
    rest_at_drain: float = 0.0


@dataclass
class Ours:
    """Gateways, shared state and driver around the core; `stays` records each entry of the queue."""

    herd: Herd
    policy: Policy
    take_step: StepFunction = step
    stays: list[Stay] = field(default_factory=list)
    _tickets: dict[str, list[Request]] = field(default_factory=dict)
    _instances: dict[str, Shared] = field(default_factory=dict)
    _entries: dict[str, Stay] = field(default_factory=dict)
    _look_is_due: bool = False
    _wakes_at: float | None = None
    _state: State = field(init=False)

    def __post_init__(self) -> None:
        models = self.herd.trace.models
        specs = {name: ModelSpec(name, "1", priority=model.priority) for name, model in models.items()}
        self._state = initial(self.policy, "h-1", specs)
        self._tell(ev.RecoveryDone())

    # What gateways do

    def on_arrival(self, request: Request) -> None:
        """Book a lease where the instance is open, else enrol a ticket."""
        for shared in self._instances.values():
            if shared.engine.model == request.model and shared.open:
                self.herd.admit(shared.engine, request)
                return
        if request.model not in self._entries:
            priority = self.herd.trace.models[request.model].priority
            self._entries[request.model] = Stay(request.model, self.herd.now, priority)
        self._tickets.setdefault(request.model, []).append(request)
        self._look_soon()

    def on_done(self, engine: Engine) -> None:
        """Tell of an instance that nobody holds any more."""
        if not engine.busy:
            self._look_soon()

    # What holders tell

    def on_ready(self, engine: Engine) -> None:
        """Pass on the engine's line."""
        self._tell(ev.BecameReady(self._name_of(engine)))

    def on_gone(self, engine: Engine) -> None:
        """Pass on the exit, noting what this victim cost the entry that asked for its room."""
        name = self._name_of(engine)
        leaving = self._state.instances[name].leaving
        entry = self._entries.get(leaving.for_model or "") if leaving else None
        if entry is not None:
            entry.victim_gone(self._instances[name].rest_at_drain, engine.times.stop, engine.times.load)
        self._tell(ev.Exited(name, EndClass.STOPPED, "stopped"))

    # What the driver does

    def _look_soon(self) -> None:
        if not self._look_is_due:
            self._look_is_due = True
            self.herd.at(self.herd.now + REACTION, self._look)

    def _look(self) -> None:
        self._look_is_due = False
        demands = {m: Demand(min(r.arrived for r in held), len(held)) for m, held in self._tickets.items()}
        claims = {
            name: Claims(shared.engine.busy, shared.engine.last_used if shared.engine.ends else None)
            for name, shared in self._instances.items()
        }
        self._tell(ev.Observed(demands, claims))

    def _tell(self, event: ev.Event) -> None:
        """Step with an event and the outcomes of what follows, and come back when the core asks for it."""
        pending: deque[ev.Event] = deque((event,))
        while pending:
            done = self.take_step(self._state, pending.popleft(), self.herd.now)
            self._state = done.state
            for action in done.actions:
                pending.extend(self._carry_out(action))
            wakes_at = done.wake_at
        if wakes_at is not None and wakes_at != self._wakes_at:
            self.herd.at(wakes_at, lambda: self._wake(wakes_at))
        self._wakes_at = wakes_at

    def _wake(self, asked_for: float) -> None:
        if self._wakes_at == asked_for:
            self._wakes_at = None
            self._tell(ev.Tick())

    # What scripts and holders do

    def _carry_out(self, action: act.Action) -> Iterable[ev.Event]:
        match action:
            case act.Start():
                self._instances[action.instance] = Shared(self.herd.start(action.model))
                if action.model in self._entries:
                    self._entries[action.model].load = self.herd.trace.models[action.model].load
                return (ev.Started(action.instance), ev.Loading(action.instance))
            case act.Grant():
                return (ev.Granted(action.instance, self._let_in(self._instances[action.instance])),)
            case act.TryStop():
                return (self._try_stop(action.instance),)
            case act.TryDrain():
                shared = self._instances[action.instance]
                if not shared.open:
                    return (ev.DrainRefused(action.instance),)
                shared.open = False
                shared.rest_at_drain = shared.engine.rest(self.herd.now)
                return (ev.Drained(action.instance, shared.engine.busy),)
            case act.TryUndrain():
                return (ev.Undrained(action.instance, self._let_in(self._instances[action.instance])),)
            case act.Ended():
                del self._instances[action.instance]
                return ()
            case act.Decide() | act.Want():  # no lease lingers in a trace
                return ()
        raise BrokenPolicyError(f"nothing in a trace asks for {action}")

    def _try_stop(self, name: str) -> ev.Event:
        shared = self._instances[name]
        if shared.engine.busy:
            return ev.StopRefused(name, shared.engine.busy)
        shared.open = False
        self.herd.stop(shared.engine)
        return ev.StopGranted(name)

    def _let_in(self, shared: Shared) -> int:
        """Open an instance and turn the tickets that wait for it into leases; return how many."""
        shared.open, shared.rest_at_drain = True, 0.0
        held = self._tickets.pop(shared.engine.model, [])
        for request in held:
            self.herd.admit(shared.engine, request)
        entry = self._entries.pop(shared.engine.model, None)
        if entry is not None:
            entry.until = self.herd.now
            self.stays.append(entry)
        return len(held)

    def _name_of(self, engine: Engine) -> str:
        return next(name for name, shared in self._instances.items() if shared.engine is engine)
