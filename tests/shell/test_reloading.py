"""Reading the registry again, when the reign that does it ends in the middle."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from llamastead.shared.words import Source
from llamastead.supervisor.reloading import Reloading
from llamastead.supervisor.removing import Removing


class SlowSources:
    """A configuration whose reading takes until it is let go."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.registry: Any = SimpleNamespace(entries={})
        self.error = ""
        self.withheld: set[str] = set()

    def ask_silent_engines(self) -> None:
        """There are none."""

    def read_again(self) -> Any:
        """Block the thread."""
        self.began.set()
        assert self.go.wait(30)
        return self.registry


def reloading_of(sources: SlowSources) -> Reloading:
    """Return the part of a reign that reads these sources, without the others."""

    async def nothing(*_: object) -> None:
        return

    parts: Any = (nothing, nothing, lambda: None, lambda _: None)
    return Reloading(cast("Any", sources), cast("Any", None), asyncio.Event(), *parts)


async def test_whoever_waits_for_a_reading_goes_free_when_the_reign_ends() -> None:
    """End the loop while it reads: who waits for this reading, for the next, or asks later is not held."""
    sources = SlowSources()
    reloading = reloading_of(sources)
    running = asyncio.create_task(reloading.run())
    waiting = [asyncio.create_task(reloading.read())]
    assert await asyncio.to_thread(sources.began.wait, 30)
    waiting.append(asyncio.create_task(reloading.read()))
    await asyncio.sleep(0)
    running.cancel()
    sources.go.set()
    async with asyncio.timeout(30):
        await asyncio.wait([running, *waiting])
        await reloading.read()


async def test_a_removal_under_way_does_not_hold_up_the_end_of_its_reign() -> None:
    """Cancel a reign's tasks while a model is about to be removed: they end, and it is withheld no more."""
    sources = SlowSources()
    sources.registry.entries["m"] = SimpleNamespace(name="m", source=Source.CACHE, path=Path("/m.gguf"))
    reloading = reloading_of(sources)

    async def nobody() -> Any:
        return SimpleNamespace(queue={}, claims={})

    store, state = SimpleNamespace(observe=nobody), SimpleNamespace(instance_of=lambda _: None)
    removing = Removing(
        cast("Any", None),
        cast("Any", store),
        cast("Any", sources),
        lambda: cast("Any", state),
        reloading.read,
        cast("Any", None),
        cast("Any", None),
    )
    removing.order("c", "m", again=False)
    tasks = [asyncio.create_task(part.run()) for part in (reloading, removing)]
    assert await asyncio.to_thread(sources.began.wait, 30)
    assert sources.withheld == {"m"}
    for task in tasks:
        task.cancel()
    sources.go.set()
    async with asyncio.timeout(30):
        await asyncio.wait(tasks)
    assert sources.withheld == set()
