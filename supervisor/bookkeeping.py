"""Works models' figures out while the herd is open: those first that a decision is about, then all others."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import cast

from redis.asyncio import Redis

from llamastead.shared.files import missing, some_of
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.book import Book
from llamastead.supervisor.core.events import Event, RegistryChanged
from llamastead.supervisor.known import Key
from llamastead.supervisor.registry.model import ModelEntry

log = logging.getLogger(__name__)

SLICE = 50
"""So many models are reckoned at a time. A herd of no more is reckoned whole before it opens."""
TOLD_S = 30.0


class Bookkeeping:
    """Runs as long as the reign. `recall` takes into the book what earlier measurements and loads showed."""

    def __init__(
        self,
        book: Book,
        redis: Redis,
        keys: Keys,
        store: LeaderStore,
        recall: Callable[[Collection[Key]], Awaitable[None]],
        tell: Callable[[Event], None],
        in_use: Callable[[], Collection[str]],
    ) -> None:
        """`in_use` are the models that come first."""
        self._book = book
        self._redis = redis
        self._keys = keys
        self._store = store
        self._recall = recall
        self._tell = tell
        self._in_use = in_use
        self._wanted = asyncio.Event()
        # A refresh and the slices would reckon the same models twice side by side.
        self._choosing = asyncio.Lock()

    async def refresh(self, names: Iterable[str] | None = None) -> None:
        """Have these models reckoned anew (None: all): those in use and a slice of the others at once, the
        rest later.
        """
        self._book.refresh(names)
        async with self._choosing:
            stale = self._book.stale
            ahead = [name for name in self._in_use() if name in stale]
            await self._reckon(dict.fromkeys((*ahead, *itertools.islice(stale, SLICE))))
        if self._book.stale:
            self._wanted.set()

    async def know(self, models: Collection[str]) -> Event | None:
        """Reckon those of these models that are not, and look for the files of all; return what the core is
        to be told of it.
        """
        stale = [name for name in models if name in self._book.stale]
        if stale:
            await self._reckon(stale)
            await self._show(stale)
        entries = self._book.configuration.registry.entries
        wanted = [entries[name] for name in models if name in entries]
        changed = self._book.take_missing(await asyncio.to_thread(_missing_files, wanted))
        return RegistryChanged(self._book.specs()) if stale or changed else None

    async def run(self) -> None:
        """Reckon in slices what is stale, until cancelled, with as much time between them as they take."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            began, count = time.monotonic(), 0
            while self._book.stale:
                slice_began = time.monotonic()
                async with self._choosing:
                    names = list(itertools.islice(self._book.stale, SLICE))
                    found = await self._reckon(names)
                if not found:
                    break  # all of them are gone, which the book is told in a moment
                await self._show(names)
                self._tell(RegistryChanged(self._book.specs()))
                count += len(names)
                await asyncio.sleep(time.monotonic() - slice_began)
            if (took := time.monotonic() - began) > TOLD_S:
                log.info("all models are reckoned", extra={"models": count, "seconds": round(took)})

    async def _reckon(self, names: Iterable[str]) -> bool:
        """Reckon models and recall what was found of them before; False when none is there any more."""
        found = await asyncio.to_thread(self._book.reckon, names)
        self._book.take(found)
        known = [known for each in found for known in (each.whole, each.split) if known is not None]
        await self._recall({each.key for each in known})
        return bool(found)

    async def _show(self, names: Collection[str]) -> None:
        """Write what is known of models' memory where that is not what stands there."""
        memory = self._book.shown_memory(names)
        pipeline = self._redis.pipeline(transaction=False)
        for name in memory:
            pipeline.hget(self._keys.model(name), "memory")
        written = cast("list[str | None]", await pipeline.execute())
        for (name, text), before in zip(memory.items(), written, strict=True):
            if text != before and name in self._book.configuration.registry.entries:
                await self._store.put_model(name, {"memory": text})


def _missing_files(entries: Iterable[ModelEntry]) -> dict[str, str]:
    """Return model → its files that can't be found, in one text; "" where none is missing."""
    return {entry.name: some_of(missing(entry.files)) for entry in entries}
