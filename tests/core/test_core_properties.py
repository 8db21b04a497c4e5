"""The invariants of scheduling, over random histories of a simulated world (see core_world).

CORE_EXAMPLES sets how many are tried: `make test` tries 2 000, `make soak-core` as many as you like.
"""

from dataclasses import replace
from typing import Any

import pytest
from core_herd import EXAMPLES, shuffler, spec
from core_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamastead.shared.words import EndClass
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core.state import Place, Policy

FEW_MODELS = "abcdefgh"
ENDS = [EndClass.FAILED_TO_START, EndClass.OUT_OF_MEMORY, EndClass.CRASHED, EndClass.KILLED]


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    return Policy(
        models_max=draw(st.sampled_from([1, 2, 2, 3, 4, 0])),
        max_wait=draw(st.sampled_from([5.0, 30.0])),
        min_residence=draw(st.sampled_from([0.0, 2.0, 20.0])),
        queue_timeout=600.0,
        stall_timeout=draw(st.sampled_from([20.0, 120.0])),
    )


DEVICES = ["gpu0", "gpu1", "host"]
UNIT = 256 << 20  # large beside what a device's figures may be off by


def amounts_up_to(most: int, least: int = 0) -> st.SearchStrategy[dict[str, int]]:
    sizes = st.integers(least, most).map(lambda units: units * UNIT)
    return st.dictionaries(st.sampled_from(DEVICES), sizes, max_size=3)


@st.composite
def places(draw: st.DrawFn) -> tuple[Place, ...]:
    """Half of the models may go to one GPU or the other."""
    size, host, more = (draw(st.integers(0, 8)) * UNIT for _ in range(3))
    gpus = draw(st.sampled_from([(), ("gpu0", "gpu1")]))
    return tuple(Place(gpu, {gpu: size, "host": host // 4}, {gpu: more}) for gpu in gpus)


@st.composite
def registries(draw: st.DrawFn, names: str = FEW_MODELS) -> dict[str, Any]:
    some = draw(st.lists(st.sampled_from(names), min_size=2, unique=True))
    return {
        name: spec(
            name,
            pinned=draw(st.sampled_from([False] * 7 + [True])),
            load_on_startup=draw(st.sampled_from([False] * 5 + [True])),
            unload_after=draw(st.sampled_from([None, None, 3.0, 40.0])),
            priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
            max_wait=draw(st.sampled_from([None, None, 2.0])),
            needs=draw(amounts_up_to(8)),
            grows=draw(st.one_of(st.just({}), amounts_up_to(8))),
            measured=draw(st.booleans()),
            places=draw(places()),
        )
        for name in some
    }


class Scheduling(RuleBasedStateMachine):
    """Clients, persons, engines and the clock take turns at random; the core hears of it at once, or late
    while lazy.
    """

    world: World

    @initialize(
        policy=policies(),
        specs=registries(),
        capacity=amounts_up_to(24, least=4),
        margins=amounts_up_to(3),
        lag=st.sampled_from([0.0, 0.0, 1.0, 8.0, 40.0]),
        seed=st.integers(0, 2**16),
        recovered=st.booleans(),
    )
    def begin(
        self,
        policy: Policy,
        specs: dict[str, Any],
        capacity: dict[str, int],
        margins: dict[str, int],
        lag: float,
        seed: int,
        recovered: bool,
    ) -> None:
        self.models = sorted(specs)
        self.lazy = False
        self.world = World(specs, policy, capacity, margins, shuffler(seed), lag=lag)
        if recovered:
            self.world.deliver(ev.RecoveryDone())

    def news(self) -> None:
        if not self.lazy:
            self.world.hear_all()

    def some_model(self, data: Any) -> str:
        return str(data.draw(st.sampled_from(self.models)))

    def some_instance(self, data: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(self.world.instances))))

    @precondition(lambda self: self.world.state.recovering)
    @rule(preload=st.booleans())
    def recover(self, preload: bool) -> None:
        self.world.deliver(ev.RecoveryDone(preload))
        self.news()

    @rule(data=st.data(), count=st.integers(1, 4))
    def arrive(self, data: Any, count: int) -> None:
        for _ in range(count):
            self.world.arrive(self.some_model(data))
        self.news()

    @rule(data=st.data())
    def a_ticket_misses_the_edge(self, data: Any) -> None:
        self.world.miss_the_edge(self.some_model(data))
        self.news()

    @rule(data=st.data(), all_of_them=st.booleans())
    def clients_leave(self, data: Any, all_of_them: bool) -> None:
        model = self.some_model(data)
        for _ in range(len(self.world.tickets.get(model, [])) if all_of_them else 1):
            self.world.leave(model)
        self.news()

    @precondition(lambda self: self.world.instances)
    @rule(data=st.data())
    def finish_one(self, data: Any) -> None:
        self.world.finish(self.some_instance(data))
        self.news()

    @precondition(lambda self: self.world.instances)
    @rule()
    def finish_all(self) -> None:
        for name, own in self.world.instances.items():
            while own.leases and own.engine == "ready":
                self.world.finish(name)
        self.news()

    @precondition(lambda self: self.world.inbox)
    @rule(count=st.integers(1, 4))
    def pump(self, count: int) -> None:
        for _ in range(count):
            self.world.pump()

    @rule()
    def see(self) -> None:
        self.world.see()

    @rule()
    def devices_are_read(self) -> None:
        self.world.read_devices()
        self.news()

    @rule(used=amounts_up_to(20))
    def others_use_devices(self, used: dict[str, int]) -> None:
        self.world.foreign = used
        self.world.read_devices()
        self.news()

    @rule(size=st.sampled_from([UNIT, 2 * UNIT]))
    def a_model_is_measured_or_was(self, size: int) -> None:
        if self.world.measuring:
            self.world.end_measuring()
        else:
            self.world.begin_measuring(size)
        self.news()

    @precondition(lambda self: self.world.instances)
    @rule(data=st.data(), eighths=st.sampled_from([0, 4, 7, 9, 16]))
    def one_engine_tells_what_it_took(self, data: Any, eighths: int) -> None:
        self.world.engine_tells(self.some_instance(data), eighths)
        self.news()

    @rule()
    def be_lazy_or_not(self) -> None:
        self.lazy = not self.lazy
        self.news()

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 6.0]))
    def a_little_later(self, seconds: float) -> None:
        self.world.advance(seconds)
        self.news()

    @rule(seconds=st.sampled_from([16.0, 31.0, 31.0, 400.0, 5000.0]))
    def much_later(self, seconds: float) -> None:
        self.world.advance(seconds)
        self.news()

    @precondition(lambda self: self.world.instances)
    @rule(times=st.integers(1, 2))
    def engines_go_on(self, times: int) -> None:
        for _ in range(times):
            for name in list(self.world.instances):
                self.world.engine_goes_on(name)
        self.news()

    @precondition(lambda self: self.world.instances)
    @rule(data=st.data())
    def one_engine_goes_on(self, data: Any) -> None:
        self.world.engine_goes_on(self.some_instance(data))
        self.news()

    @precondition(lambda self: self.world.instances)
    @rule(
        data=st.data(),
        what=st.sampled_from(["sleeps", "sleeps", "fails", "stuck", "silent", "turns away", "moves"]),
    )
    def one_engine_misbehaves(self, data: Any, what: str) -> None:
        name = self.some_instance(data)
        if what == "sleeps":
            self.world.engine_sleeps(name)
        elif what == "fails":
            end = data.draw(st.sampled_from(ENDS))
            self.world.engine_fails(name, end, doomed=data.draw(st.booleans()))
        elif what == "stuck":
            self.world.stop_fails(name)
        elif what == "silent":
            self.world.inbox.append(ev.Unresponsive(name, "no answer to /health"))
        elif what == "turns away":
            self.world.inbox.append(ev.TurnsAway(name))
        elif self.world.instances[name].engine == "loading":
            value = data.draw(st.sampled_from([None, 0.2, 0.7]))
            self.world.inbox.append(ev.Loading(name, value) if value else ev.Moved(name))
        self.news()

    @rule(refuse=st.booleans())
    def scripts_surprise(self, refuse: bool) -> None:
        self.world.refuse_next, self.world.sneak_next = refuse, not refuse

    @rule(data=st.data(), what=st.sampled_from(["load", "unload", "cut", "gone", "changed", "restart"]))
    def a_person_acts(self, data: Any, what: str) -> None:
        model = self.some_model(data)
        if what == "load":
            self.world.load(model)
        elif what in {"unload", "cut"}:
            self.world.unload(model, force=what == "cut")
        else:
            fresh = replace(self.world.specs[model], revision=f"rev-{self.world.arrived}")
            self.world.change_registry(model, None if what == "gone" else fresh)
            if what == "restart":
                self.world.inbox.append(ev.RestartOrdered())
        self.news()

    @invariant()
    def engines_are_within_the_limit(self) -> None:
        limit = self.world.policy.models_max
        assert limit == 0 or len(self.world.instances) <= limit

    def teardown(self) -> None:
        if hasattr(self, "world"):
            if self.world.state.recovering:
                self.world.deliver(ev.RecoveryDone())
            self.world.calm_down()


TestScheduling = pytest.mark.timeout(0)(Scheduling.TestCase)  # as long as so many histories take
TestScheduling.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
