"""The invariants of scheduling, over random histories of a simulated world (see core_world).

LLAMASTEAD_CORE_EXAMPLES sets how many histories are tried, for a longer run.
"""

import os
import random
from dataclasses import replace
from typing import Any

from core_herd import spec
from core_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamastead.shared.words import EndClass
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core.state import Policy

EXAMPLES = int(os.environ.get("LLAMASTEAD_CORE_EXAMPLES", "60"))
FEW_MODELS = "abcdefgh"
ENDS = [EndClass.FAILED_TO_START, EndClass.OUT_OF_MEMORY, EndClass.CRASHED, EndClass.KILLED]


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    devices = draw(st.dictionaries(st.sampled_from(["gpu0", "gpu1", "host"]), st.integers(4, 24), max_size=3))
    return Policy(
        models_max=draw(st.sampled_from([1, 2, 2, 3, 4, 0])),
        max_wait=draw(st.sampled_from([5.0, 30.0])),
        min_residence=draw(st.sampled_from([0.0, 2.0, 20.0])),
        queue_timeout=600.0,
        stall_timeout=draw(st.sampled_from([20.0, 120.0])),
        capacity=devices,
    )


@st.composite
def registries(draw: st.DrawFn, names: str = FEW_MODELS) -> dict[str, Any]:
    some = draw(st.lists(st.sampled_from(names), min_size=2, unique=True))
    amounts = st.dictionaries(st.sampled_from(["gpu0", "gpu1", "host"]), st.integers(0, 8), max_size=3)
    return {
        name: spec(
            name,
            pinned=draw(st.sampled_from([False] * 7 + [True])),
            load_on_startup=draw(st.sampled_from([False] * 5 + [True])),
            unload_after=draw(st.sampled_from([None, None, 3.0, 40.0])),
            priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
            max_wait=draw(st.sampled_from([None, None, 2.0])),
            needs=draw(amounts),
        )
        for name in some
    }


class Scheduling(RuleBasedStateMachine):
    """Clients, persons, engines and the clock take turns at random; the core hears of it late or at once."""

    world: World

    @initialize(policy=policies(), specs=registries(), seed=st.integers(0, 2**16))
    def begin(self, policy: Policy, specs: dict[str, Any], seed: int) -> None:
        chance = random.Random(seed)
        self.models = sorted(specs)
        self.world = World(specs, policy, shuffle=lambda items: chance.sample(items, len(items)))

    def some_model(self, data: Any) -> str:
        return str(data.draw(st.sampled_from(self.models)))

    def some_instance(self, data: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(self.world.instances))))

    @precondition(lambda self: self.world.state.recovering)
    @rule(preload=st.booleans())
    def recover(self, preload: bool) -> None:
        self.world.deliver(ev.RecoveryDone(preload))

    @rule(data=st.data(), count=st.integers(1, 3), look=st.booleans())
    def arrive(self, data: Any, count: int, look: bool) -> None:
        model = self.some_model(data)
        for _ in range(count):
            self.world.arrive(model)
        if look:
            self.world.see()

    @rule(data=st.data(), look=st.booleans())
    def client_leaves(self, data: Any, look: bool) -> None:
        self.world.leave(self.some_model(data))
        if look:
            self.world.see()

    @precondition(lambda self: self.world.instances)
    @rule(data=st.data(), look=st.booleans())
    def finish(self, data: Any, look: bool) -> None:
        self.world.finish(self.some_instance(data))
        if look:
            self.world.see()

    @precondition(lambda self: self.world.inbox)
    @rule(count=st.integers(1, 4))
    def pump(self, count: int) -> None:
        for _ in range(count):
            self.world.pump()

    @rule()
    def see(self) -> None:
        self.world.see()

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 6.0, 31.0, 400.0, 5000.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.world.instances)
    @rule(data=st.data(), times=st.integers(1, 2))
    def engine_goes_on(self, data: Any, times: int) -> None:
        for _ in range(times):
            self.world.engine_goes_on(self.some_instance(data))

    @precondition(lambda self: self.world.instances)
    @rule(data=st.data(), end=st.sampled_from(ENDS), doomed=st.booleans())
    def engine_fails(self, data: Any, end: EndClass, doomed: bool) -> None:
        self.world.engine_fails(self.some_instance(data), end, doomed=doomed)

    @precondition(lambda self: self.world.instances)
    @rule(data=st.data())
    def engine_sleeps(self, data: Any) -> None:
        self.world.engine_sleeps(self.some_instance(data))

    @precondition(lambda self: self.world.instances)
    @rule(data=st.data())
    def stop_fails(self, data: Any) -> None:
        self.world.stop_fails(self.some_instance(data))

    @precondition(lambda self: self.world.instances)
    @rule(data=st.data())
    def unresponsive(self, data: Any) -> None:
        self.world.inbox.append(ev.Unresponsive(self.some_instance(data), "no answer to /health"))

    @precondition(lambda self: self.world.instances)
    @rule(data=st.data(), value=st.sampled_from([None, 0.2, 0.7]))
    def progress(self, data: Any, value: float | None) -> None:
        name = self.some_instance(data)
        if self.world.instances[name].engine == "loading":
            self.world.inbox.append(ev.Loading(name, value) if value else ev.Moved(name))

    @rule()
    def scripts_refuse(self) -> None:
        self.world.refuse_next = True

    @rule(data=st.data())
    def load(self, data: Any) -> None:
        self.world.load(self.some_model(data))

    @rule(data=st.data(), force=st.booleans())
    def unload(self, data: Any, force: bool) -> None:
        self.world.unload(self.some_model(data), force=force)

    @rule(data=st.data(), gone=st.booleans())
    def registry(self, data: Any, gone: bool) -> None:
        model = self.some_model(data)
        old = self.world.specs[model]
        fresh = replace(old, revision=f"rev-{self.world.arrived}", needs=old.needs)
        self.world.change_registry(model, None if gone else fresh)

    @invariant()
    def engines_are_within_the_limit(self) -> None:
        limit = self.world.policy.models_max
        assert limit == 0 or len(self.world.instances) <= limit

    def teardown(self) -> None:
        if hasattr(self, "world"):
            if self.world.state.recovering:
                self.world.deliver(ev.RecoveryDone())
            self.world.calm_down()


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_three_hundred_models_take_turns_within_their_bounds() -> None:
    """Random histories of 300 models in 40 slots: every invariant holds at every step and every ticket ends."""
    for seed in range(max(1, EXAMPLES // 40)):
        chance = random.Random(seed)
        specs = {f"m{k:03}": spec(f"m{k:03}", priority=chance.choice([0, 0, 1])) for k in range(300)}
        world = World(specs, Policy(models_max=40), shuffle=lambda items: chance.sample(items, len(items)))
        world.deliver(ev.RecoveryDone())
        for _ in range(60):
            for model in chance.choices(sorted(specs), k=4):
                world.arrive(model)
            world.see()
            while world.inbox:
                world.pump()
            for name in chance.sample(sorted(world.instances), len(world.instances) // 2):
                world.engine_goes_on(name)
                world.finish(name)
            world.advance(chance.choice([0.1, 3.0]))
        world.calm_down()
