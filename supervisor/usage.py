"""Counts what instances do: their own figures, added up for each model over all its instances."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from llamastead.shared.store.errors import UnknownModel
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.usage import COUNTERS, GAUGES, named, samples
from llamastead.shared.words import InstanceState
from llamastead.supervisor.core.state import Instance, State
from llamastead.supervisor.running import Running, engine_client

log = logging.getLogger(__name__)

ASK_S = 5.0
_ASKED = frozenset({InstanceState.READY, InstanceState.DRAINING})
AT_REST = dict.fromkeys(GAUGES.values(), 0.0)


@dataclass
class Usage:
    """Asks instances as long as the reign runs. `secret` is the herd's, `spawn` runs a task.

    To older engines a look at their metrics is a task that wakes them or keeps them awake: one that has done
    nothing since it was asked at rest is not asked again.
    """

    store: LeaderStore
    secret: Callable[[], bytes]
    running: Mapping[str, Running]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    _rested: dict[str, float] = field(default_factory=dict)
    _ended: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, every_s: float, state: Callable[[], State]) -> None:
        """Ask each `every_s` seconds those that did something, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            instances = state().instances
            self._rested = {name: used for name, used in self._rested.items() if name in instances}
            await asyncio.gather(*(self._ask(own) for own in instances.values() if self._has_worked(own)))

    def _has_worked(self, own: Instance) -> bool:
        news = own.leases > 0 or self._rested.get(own.id) != own.last_used
        return own.state in _ASKED and news and own.id in self.running

    async def _ask(self, own: Instance) -> None:
        try:
            async with engine_client(self.secret(), own.id, self.running[own.id], ASK_S) as client:
                page = (await client.get("/metrics")).raise_for_status().text
        except httpx.HTTPError as problem:
            # It may be busy with a long batch, or on its way out; it is asked again, or tells at its end.
            log.debug("no answer about metrics", extra={"instance": own.id, "problem": str(problem)})
            return
        found = samples(page)
        if own.leases:
            self._rested.pop(own.id, None)
        else:
            self._rested[own.id] = own.last_used
        await self._count(own.id, own.model, found, at_rest=not own.leases)

    def on_end(self, instance: str, model: str, page: str) -> None:
        """Take the page that an instance answered last, to its holder before it was told to exit."""
        if page:
            task = self.spawn(self._count(instance, model, samples(page), at_rest=True))
            self._ended.add(task)
            task.add_done_callback(self._ended.discard)

    async def settle(self) -> None:
        """Return when what ended instances did is counted."""
        await asyncio.gather(*self._ended)

    async def _count(self, instance: str, model: str, found: Mapping[str, float], *, at_rest: bool) -> None:
        gauges = AT_REST if at_rest else {**AT_REST, **named(found, GAUGES)}
        try:
            await self.store.count(model, instance, named(found, COUNTERS), gauges)
        except UnknownModel:
            log.debug("nothing counted of a model that is gone", extra={"instance": instance})
