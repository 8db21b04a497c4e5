"""What carrying a decision out brings along."""

from typing import Any, cast

import pytest

from llamastead.supervisor.core import actions, events
from llamastead.supervisor.effects import Effects

NOT_ASKED: Any = None
OTHERS = (
    "holders",
    "build",
    "answer",
    "tell",
    "spawn",
    "on_view",
    "clean_up",
    "memory_of",
    "end_conversations",
)


class SleepStore:
    """Answers whether an instance may sleep."""

    def __init__(self, slept: bool) -> None:
        self.slept = slept

    async def sleep(self, instance: str) -> bool:
        """Return the scripted answer."""
        return self.slept

    async def observe(self) -> Any:
        """Return facts of nobody."""
        return events.Observed({}, {})


@pytest.mark.parametrize("slept", [True, False])
async def test_devices_are_read_again_when_an_instance_sleeps(slept: bool) -> None:
    """Let an instance sleep: what it gave back is looked for at once; not if somebody holds it."""
    looked: list[bool] = []
    store = cast("Any", SleepStore(slept))
    others = dict.fromkeys(OTHERS, NOT_ASKED)
    effects = Effects(store, running={}, on_freed=lambda: looked.append(True), host="h", number=1, **others)
    (outcome,) = await effects.perform(actions.TrySleep("h-1-1"))
    assert isinstance(outcome, events.Slept) is slept
    assert looked == [True] * slept
