"""Hundreds of models in a few dozen slots: random histories of the simulated world (see core_world)."""

import random

import pytest
from core_herd import EXAMPLES, shuffler, spec
from core_world import World

from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core.state import Policy


@pytest.mark.parametrize("seed", range(max(1, EXAMPLES // 80)))
def test_three_hundred_models_take_turns_within_their_bounds(seed: int) -> None:
    """300 models in 40 slots: every invariant holds at every step and every ticket ends."""
    chance = random.Random(seed)
    specs = {f"m{k:03}": spec(f"m{k:03}", priority=chance.choice([0, 0, 1])) for k in range(300)}
    world = World(specs, Policy(models_max=40), shuffle=shuffler(seed))
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
