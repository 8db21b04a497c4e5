"""A simulated world around the core: shared state with its scripts, engines with their moods, clients that
come and go.

It carries out the core's actions at once, as the driver does, and queues their outcomes; whoever drives it
decides when the core hears of what, and how engines behave. Every step is checked against the invariants
of scheduling.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llamastead.shared.words import EndClass, InstanceState, WaitReason
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core import ledger
from llamastead.supervisor.core.explain import explain, unexplained
from llamastead.supervisor.core.queue import entries
from llamastead.supervisor.core.state import Ask, Claims, Demand, Device, ModelSpec, Policy, State, initial
from llamastead.supervisor.core.step import Step, step

S = InstanceState
AT_REST = {"ready", "asleep", "dead"}
ALIVE_ENGINE = {"starting", "loading", "ready", "asleep", "waking", "stopping", "stuck"}


@dataclass
class Shared:
    """An instance as the shared state shows it, and the engine behind it."""

    model: str
    state: InstanceState = S.STARTING
    leases: int = 0
    last_used: float | None = None
    engine: str = "starting"
    killed_by_us: bool = False
    stopped_asleep: bool = False


@dataclass
class World:
    """Everything outside the core, and the core's state. `shuffle` reorders mappings, to prove that order
    is nothing. `takes` is what engines really take once they are ready, where that is not what was booked.
    """

    specs: Mapping[str, ModelSpec]
    policy: Policy
    capacity: Mapping[str, int] = field(default_factory=dict)
    margins: Mapping[str, int] = field(default_factory=dict)
    shuffle: Callable[[list[Any]], list[Any]] = list
    now: float = 1000.0
    state: State = field(init=False)
    registry: dict[str, ModelSpec] = field(init=False)
    instances: dict[str, Shared] = field(default_factory=dict)
    tickets: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    arrived: int = 0
    inbox: deque[ev.Event] = field(default_factory=deque)
    wake_at: float | None = None
    refuse_next: bool = False
    sneak_next: bool = False
    patient: bool = False
    forced: set[str] = field(default_factory=set)
    foreign: dict[str, int] = field(default_factory=dict)
    measuring: dict[str, int] = field(default_factory=dict)
    takes: dict[str, dict[str, int]] = field(default_factory=dict)
    lag: float = 0.0
    freed: list[tuple[float, Mapping[str, int]]] = field(default_factory=list)
    commands: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.registry = dict(self.specs)
        self.state = initial(self.policy, "h-1", self.registry, seed="w")
        self.read_devices()

    # What the driver does

    def deliver(self, event: ev.Event) -> None:
        """Let the core take one step, check it, and carry out what it wants."""
        before = self.state
        done = step(before, event, self.now)
        shuffled = step(self._shuffled(before), self._shuffled_event(event), self.now)
        assert shuffled == done, "the order of mappings changed the decision"
        self._check(before, done, event)
        again = step(done.state, ev.Tick(), self.now)
        assert again.actions == (), "a second look at the same time found more to do"
        assert _essence(again.state) == _essence(done.state), "a second look changed more"
        assert again.wake_at is None or (done.wake_at is not None and done.wake_at <= again.wake_at)
        self.state, self.wake_at = done.state, done.wake_at
        for action in done.actions:
            self._carry_out(action)

    def pump(self) -> None:
        """Deliver the oldest piece of news."""
        if self.inbox:
            self.deliver(self.inbox.popleft())

    def hear_all(self) -> None:
        """Deliver all news, and the facts after it."""
        while self.inbox:
            self.pump()
        self.see()
        while self.inbox:
            self.pump()

    def see(self) -> None:
        """Read the facts and deliver them."""
        limit = float("-inf") if self.patient else self.now - self.policy.queue_timeout
        demands = {
            model: Demand(min(t for _, t in held), len(held), tuple(str(i) for i, t in held if t <= limit))
            for model, held in self.tickets.items()
            if held
        }
        claims = {name: Claims(s.leases, s.last_used) for name, s in self.instances.items()}
        self.deliver(ev.Observed(demands, claims))

    def read_devices(self) -> None:
        """Read the devices, which show the bytes of ended processes as used for a while, and deliver that."""
        self.freed = [(due, amounts) for due, amounts in self.freed if due > self.now]
        seen = {name: self._uses(name) for name, s in self.instances.items() if s.engine != "dead"}
        devices = {}
        for device, total in self.capacity.items():
            parts = [*seen.values(), *(amounts for _, amounts in self.freed), self.foreign, self.measuring]
            used = sum(amounts.get(device, 0) for amounts in parts)
            margin = self.margins.get(device, 0)
            devices[device] = Device(total, max(0, total - used), margin, frees_late=True)
        known = {name: amounts for name, amounts in seen.items() if name in self.state.instances}
        self.deliver(ev.DevicesRead(devices, known))
        if not (self.inbox or self.freed or self.measuring or self.state.releasing):
            self._check_others(devices)

    def _check_others(self, devices: Mapping[str, Device]) -> None:
        """Where nothing of ours moves, what others are said to use is what they use, and nothing of ours."""
        if any(own.engine not in AT_REST for own in self.instances.values()):
            return
        for account in ledger.account(self.state):
            if devices[account.device].free:
                assert account.external == self.foreign.get(account.device, 0)

    def _uses(self, name: str) -> Mapping[str, int]:
        """Return what an engine's process holds: all it needs once it is ready, half of it before."""
        own = self.state.instances.get(name)
        part = {"starting": 0, "loading": 1, "asleep": 0}.get(self.instances[name].engine, 2)
        if own is None or self.instances[name].stopped_asleep:
            return {}
        return {device: n * part // 2 for device, n in self.takes.get(name, own.needs).items()}

    def begin_measuring(self, size: int) -> None:
        """Measure a model, if there is room for what that takes itself, and one at a time."""
        left = ledger.free(self.state)
        if left and not self.measuring and min(left.values()) >= size:
            self.measuring = dict.fromkeys(left, size)
            self.deliver(ev.MeasuringBegan("measured", self.measuring))

    def end_measuring(self) -> None:
        """The measurement under way is over."""
        self.measuring = {}
        self.deliver(ev.MeasuringEnded("measured"))

    def advance(self, seconds: float) -> None:
        """Let time pass, waking the core whenever it asked for that; a jump wakes it late instead."""
        self.now += seconds
        if self.wake_at is not None and self.wake_at <= self.now:
            self.deliver(ev.Tick())

    # What clients and persons do

    def arrive(self, model: str) -> None:
        """A request comes: a lease at once where the instance is ready, else a ticket."""
        self.arrived += 1
        own = self.shared_of(model)
        if own is not None and own.state is S.READY:
            own.leases += 1
            self._request_reaches(own)
        else:
            self.tickets.setdefault(model, []).append((self.arrived, self.now))

    def miss_the_edge(self, model: str) -> None:
        """A request's ticket is enrolled although its instance is ready, as in a race with the grant."""
        self.arrived += 1
        self.tickets.setdefault(model, []).append((self.arrived, self.now))

    def leave(self, model: str) -> None:
        """The oldest waiting request of a model is given up by its client."""
        if self.tickets.get(model):
            self.settled.add(self.tickets[model].pop(0)[0])

    def finish(self, name: str) -> None:
        """A running request ends."""
        own = self.instances[name]
        if own.leases and own.engine == "ready":
            own.leases -= 1
            own.last_used = self.now

    def load(self, model: str) -> None:
        """A person orders a load."""
        self.inbox.append(ev.LoadOrdered(model, self._command()))

    def unload(self, model: str, *, force: bool) -> None:
        """A person orders an unload."""
        if force:
            self.forced.add(model)
        self.inbox.append(ev.UnloadOrdered(model, self._command(), force))

    def change_registry(self, model: str, spec: ModelSpec | None) -> None:
        """A model changes in the registry, or leaves it."""
        self.registry = {name: s for name, s in {**self.registry, model: spec}.items() if s is not None}
        self.inbox.append(ev.RegistryChanged(self.registry))

    # What engines do

    def engine_goes_on(self, name: str) -> None:
        """An engine does the next thing a healthy one does."""
        own = self.instances[name]
        if own.engine == "starting":
            own.engine = "loading"
            self.inbox.append(ev.Loading(name, 0.0))
        elif own.engine in {"loading", "waking"}:
            own.engine = "ready"
            self.inbox.append(ev.BecameReady(name))
        elif own.engine in {"stopping", "stuck"}:
            self._ends(name, EndClass.KILLED if own.engine == "stuck" else EndClass.STOPPED)

    def engine_tells(self, name: str, eighths: int) -> None:
        """A ready engine says what it took: so many eighths of what was booked, and no more than is free."""
        own, left = self.state.instances.get(name), ledger.free(self.state)
        if own is not None and self.instances[name].engine == "ready" and own.state is S.READY:
            more = {d: min(n * eighths // 8, n + max(0, left.get(d, 0))) for d, n in own.needs.items()}
            self.takes[name] = more
            self.deliver(ev.Took(name, more, more))

    def engine_fails(self, name: str, end_class: EndClass, *, doomed: bool = False) -> None:
        """An engine ends by itself."""
        if self.instances[name].engine in ALIVE_ENGINE:
            self._ends(name, end_class, doomed=doomed)

    def engine_sleeps(self, name: str) -> None:
        """An engine without a request falls asleep."""
        own = self.instances[name]
        if own.engine == "ready" and own.leases == 0:
            own.engine = "asleep"
        if own.engine == "asleep":
            self.inbox.append(ev.FellAsleep(name))

    def stop_fails(self, name: str) -> None:
        """KILL has no effect for now."""
        if self.instances[name].engine == "stopping":
            self.instances[name].engine = "stuck"
            self.inbox.append(ev.StopFailed(name))

    def shared_of(self, model: str) -> Shared | None:
        """Return the instance of a model in the shared state."""
        return next((s for s in self.instances.values() if s.model == model), None)

    def _ends(self, name: str, end_class: EndClass, *, doomed: bool = False) -> None:
        self.freed.append((self.now + self.lag, self._uses(name)))
        self.instances[name].engine = "dead"
        self.instances[name].leases = 0
        self.inbox.append(ev.Exited(name, end_class, "simulated", 1, doomed))

    def _command(self) -> str:
        self.arrived += 1
        self.commands.add(f"c{self.arrived}")
        return f"c{self.arrived}"

    def _request_reaches(self, own: Shared) -> None:
        if own.engine == "asleep":
            name = next(n for n, s in self.instances.items() if s is own)
            own.engine = "waking"
            self.inbox.append(ev.Loading(name, 0.0))

    # The scripts

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.Start():
                self.instances[action.instance] = Shared(action.model)
                self.inbox.append(ev.Started(action.instance))
            case act.Grant() | act.Wake():
                own = self.instances[action.instance]
                own.state = S.READY if isinstance(action, act.Grant) else S.WAKING
                self.inbox.append(ev.Granted(action.instance, self._book(own)))
            case act.TryStop():
                own = self.instances[action.instance]
                if self.sneak_next:
                    self.sneak_next = False
                    self.arrive(own.model)
                stoppable = own.state in {S.READY, S.DRAINING, S.SLEEPING}
                if own.leases or not stoppable or self.refuse_next:
                    self.refuse_next = False
                    self.inbox.append(ev.StopRefused(action.instance, own.leases))
                else:
                    self._stop(own)
                    self.inbox.append(ev.StopGranted(action.instance))
            case act.TryDrain():
                own = self.instances[action.instance]
                if own.state is S.READY and not self.refuse_next:
                    own.state = S.DRAINING
                    self.inbox.append(ev.Drained(action.instance, own.leases))
                else:
                    self.refuse_next = False
                    self.inbox.append(ev.DrainRefused(action.instance))
            case act.TryUndrain():
                own = self.instances[action.instance]
                if own.state is S.DRAINING:
                    own.state = S.READY
                    self.inbox.append(ev.Undrained(action.instance, self._book(own)))
                else:
                    self.inbox.append(ev.UndrainRefused(action.instance))
            case act.TrySleep():
                own = self.instances[action.instance]
                if own.leases:
                    own.state = S.READY
                    self.inbox.append(ev.SleepRefused(action.instance, own.leases))
                else:
                    own.state = S.SLEEPING
                    self.inbox.append(ev.Slept(action.instance))
            case act.AbortLoad() | act.ForceStop():
                own = self.instances[action.instance]
                own.leases = 0
                self._stop(own)
            case act.FailTickets():
                held = self.tickets.get(action.model, [])
                hit = [i for i, _ in held if action.tickets is None or str(i) in action.tickets]
                self.settled |= set(hit)
                self.tickets[action.model] = [t for t in held if t[0] not in hit]
            case act.Ended():
                del self.instances[action.instance]
            case act.Answer():
                assert action.command in self.commands, "a command was answered twice"
                self.commands.remove(action.command)
            case act.Decide() | act.Discrepancy() | act.ShowTaken() | act.ShowFailed():
                pass

    def _book(self, own: Shared) -> int:
        held = self.tickets.pop(own.model, [])
        self.settled |= {i for i, _ in held}
        own.leases += len(held)
        if held:
            self._request_reaches(own)
        return len(held)

    def _stop(self, own: Shared) -> None:
        own.state = S.STOPPING
        own.killed_by_us = True
        if own.engine != "dead":
            own.stopped_asleep |= own.engine == "asleep"
            own.engine = "stopping"

    # What must hold

    def _check(self, before: State, done: Step, event: ev.Event) -> None:
        state = done.state
        assert done.wake_at is None or done.wake_at > self.now
        assert not unexplained(state)
        for row in explain(state, self.now):
            assert row.text
        limit = self.policy.models_max
        assert limit == 0 or len(state.instances) <= limit
        models = [i.model for i in state.instances.values()]
        assert len(models) == len(set(models)), "two instances of one model"
        self._check_ledger(state)
        for action in done.actions:
            self._check_action(before, state, action, event)
        self._check_victims(state)

    def _check_ledger(self, state: State) -> None:
        """Every byte has one name, none is below 0, and nothing of ours is beyond what a device has, less its
        margin.
        """
        for account in ledger.account(state):
            parts = (account.held, account.releasing, account.measuring)
            named = account.margin + account.external + sum(n for p in parts for n in p.values())
            assert named + account.free - account.debt == account.total
            assert all(n > 0 for p in parts for n in p.values())
            assert min(account.free, account.debt) == 0 <= account.external <= account.total
            if not self.foreign:
                alive = [i for n, i in state.instances.items() if self._is_alive(n)]
                ours = sum(ledger.booked(i).get(account.device, 0) for i in alive)
                ours += sum(amounts.get(account.device, 0) for due, amounts in self.freed if due > self.now)
                ours += sum(account.measuring.values())
                assert ours <= account.total - account.margin, "more was promised than there is"

    def _is_alive(self, name: str) -> bool:
        return name not in self.instances or self.instances[name].engine != "dead"

    def _check_victims(self, state: State) -> None:
        """A drain has an entry that waits for it, and where only slots are short no entry has two victims."""
        owners = [i.leaving.for_model for i in state.instances.values() if i.leaving and i.leaving.for_model]
        waiting = {entry.model for entry in entries(state)}
        assert set(owners) <= waiting
        for own in state.instances.values():
            needed = own.leaving is not None and (own.leaving.ordered or own.leaving.for_model)
            assert own.state is not S.DRAINING or needed or own.ask or own.stale, "it drains for nobody"
        if not self.capacity:
            assert len(owners) == len(set(owners)), "one entry has more victims than it needs"

    def _check_action(self, before: State, after: State, action: act.Action, event: ev.Event) -> None:
        match action:
            case act.TryStop(end_class=EndClass.EVICTED):
                own = after.instances[action.instance]
                was = before.instances.get(action.instance, own)
                spec = after.models.get(own.model)
                assert own.leases == 0
                assert own.state in {S.READY, S.SLEEPING, S.DRAINING}
                assert was.state not in {S.STARTING, S.LOADING, S.WAKING}
                if own.state is not S.DRAINING:
                    assert own.model not in after.demands, "a wanted instance was chosen"
                    assert spec is None or not spec.pinned
                self._check_residence(after, action.for_model, own.id)
            case act.Want():
                assert after.instances[action.instance].leases
                assert any(action.instance in wait.blockers for wait in after.waits.values())
            case act.TryDrain():
                own = after.instances[action.instance]
                assert own.state is S.READY
                if not action.ordered:
                    entry = next(e for e in entries(after) if e.model == action.for_model)
                    assert entry.overdue_at <= self.now
                    spec = after.models.get(own.model)
                    assert spec is None or not spec.pinned
                    self._check_residence(after, action.for_model, own.id)
            case act.AbortLoad(end_class=EndClass.ABANDONED):
                own = after.instances[action.instance]
                assert own.model not in after.demands
                assert own.model not in after.orders
                assert action.for_model in {e.model for e in entries(after)}
            case act.ForceStop():
                assert isinstance(event, ev.UnloadOrdered | ev.Unresponsive)
                assert self.instances[action.instance].model in self.forced or isinstance(
                    event, ev.Unresponsive
                )
            case act.Start():
                self._check_place(after, action)
                assert not before.recovering or isinstance(event, ev.RecoveryDone)
                known = before.troubles.get(action.model)
                same = known is not None and known.revision == action.revision
                ordered = isinstance(event, ev.LoadOrdered | ev.RegistryChanged)
                assert not (same and known and known.until > self.now) or ordered
            case act.Grant():
                assert after.instances[action.instance].ask is Ask.GRANT

    def _check_place(self, state: State, action: act.Start) -> None:
        """It is split only if no device can have it whole, and whole it lies there and on the host."""
        own, spec = state.instances[action.instance], state.models[action.model]
        assert own.place == action.place
        limits = ledger.capacity(state)
        able = [
            place.device
            for place in spec.places
            if all(amount <= limits.get(device, amount) for device, amount in place.needs.items())
        ]
        assert action.place in able or (not able and not action.place)
        assert not action.place or {d for d, n in own.needs.items() if n} <= {action.place, "host"}

    def _check_residence(self, state: State, for_model: str | None, name: str) -> None:
        own = state.instances[name]
        if for_model is None or own.state is S.DRAINING or not own.served or own.ready_at is None:
            return
        spec = state.models[for_model]
        bound = (self.policy.max_wait if spec.max_wait is None else spec.max_wait) / 2
        stays = min(max(self.policy.min_residence, own.load_time / 2), bound)
        assert self.now >= own.ready_at + stays, "sent away before its minimum residence"

    def _shuffled(self, state: State) -> State:
        names = (
            *("models", "instances", "demands", "orders", "troubles", "waits"),
            *("devices", "releasing", "measuring", "tried"),
        )
        return replace(
            state, **{name: dict(self.shuffle(list(getattr(state, name).items()))) for name in names}
        )

    def _shuffled_event(self, event: ev.Event) -> ev.Event:
        if isinstance(event, ev.Observed):
            demands = dict(self.shuffle(list(event.demands.items())))
            return replace(event, demands=demands, claims=dict(self.shuffle(list(event.claims.items()))))
        if isinstance(event, ev.RegistryChanged):
            return replace(event, models=dict(self.shuffle(list(event.models.items()))))
        return event

    # Liveness

    def calm_down(self) -> None:
        """From now on nobody comes, engines are well and nothing expires: all that wait must be served or
        told.

        Only those may be left over who wait for room that pinned models have.
        """
        self.refuse_next = self.sneak_next = False
        self.patient = True
        if self.measuring:
            self.end_measuring()
        bound = self.now + (len(self.specs) + 1) * (self.policy.max_wait + 30) + 400
        while self.inbox or not all(self._waits_for_pinned(model) for model in self._waiting()):
            assert self.now <= bound, f"still waiting: {self.tickets} {self.state.waits}"
            while self.inbox:
                self.pump()
            for name in list(self.instances):
                own = self.instances[name]
                self.engine_goes_on(name)
                while own.leases and own.engine == "ready":
                    self.finish(name)
            self.read_devices()
            self.see()
            if not self.inbox:
                self.advance(1.0 if self.wake_at is None else min(max(self.wake_at - self.now, 0.1), 5.0))

    def _waiting(self) -> set[str]:
        return {model for model, held in self.tickets.items() if held} | set(self.state.orders)

    def _waits_for_pinned(self, model: str) -> bool:
        wait = self.state.waits.get(model)
        return wait is not None and wait.reason is WaitReason.PINNED


def _essence(state: State) -> State:
    """Return a state without what a second look may tell better: reasons, and for whom each leaving
    instance goes.
    """
    instances = {
        name: replace(i, leaving=replace(i.leaving, for_model=None)) if i.leaving else i
        for name, i in state.instances.items()
    }
    releasing = {name: replace(ended, owner=None) for name, ended in state.releasing.items()}
    return replace(state, waits={}, instances=instances, releasing=releasing)
