"""Finds what should never be: a ticket that the scheduler did not look at, or that waits without a reason."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.store.records import Facts
from llamastead.supervisor.core.state import State

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """What one look at all tickets found.

    `oldest_ms` is how long the oldest ticket waits that the scheduler has not looked at (0: none),
    `forgotten` the models whose tickets it did look at and has no reason for.
    """

    oldest_ms: int
    forgotten: tuple[str, ...]


@dataclass
class Watchdog:
    """Reads the tickets by itself and compares them with what the scheduler knows.

    `state` and `looked_ms` are the scheduler's: its state, and Redis's time of the facts it took in last;
    `look` has it read them again. What lasts longer than `too_old_s` makes the supervisor not ready, which
    stands in the hash `leadership` (`ready`, `oldest_demand_ms`, `trouble`) and in the log.
    """

    store: LeaderStore
    state: Callable[[], State]
    looked_ms: Callable[[], int]
    look: Callable[[], None]
    too_old_s: float
    _since: dict[str, int] = field(default_factory=dict)
    _trouble: str = ""

    async def run(self, every_s: float, ttl_ms: int) -> None:
        """Look every so often until cancelled; `ttl_ms` is how long the leadership lasts unrenewed."""
        while True:
            found = self.judge(await self.store.observe())
            trouble = "; ".join(self._troubles(found))
            if trouble:
                self.look()
            if trouble != self._trouble:
                if trouble:
                    log.error("the scheduler is not ready: %s", trouble)
                else:
                    log.info("the scheduler is ready again")
                self._trouble = trouble
            about = {"ready": "0" if trouble else "1", "trouble": trouble}
            await self.store.renew(ttl_ms, about | {"oldest_demand_ms": str(found.oldest_ms)})
            await asyncio.sleep(every_s)

    def judge(self, facts: Facts) -> Finding:
        """Compare tickets as they are now with what the scheduler knows."""
        waits, looked_ms = self.state().waits, self.looked_ms()
        oldest_ms, since, forgotten = 0, {}, set()
        for model, demand in facts.queue.items():
            for ticket in demand.tickets:
                if ticket.enqueued_ms > looked_ms:
                    oldest_ms = max(oldest_ms, facts.now_ms - ticket.enqueued_ms)
                elif model not in waits:
                    # It may be settled this very moment, so it counts only when it stays so.
                    since[ticket.id] = self._since.get(ticket.id, facts.now_ms)
                    if facts.now_ms - since[ticket.id] >= self.too_old_s * 1000:
                        forgotten.add(model)
        self._since = since
        return Finding(oldest_ms, tuple(sorted(forgotten)))

    def _troubles(self, found: Finding) -> Iterator[str]:
        if found.oldest_ms > self.too_old_s * 1000:
            yield f"a request has waited {found.oldest_ms / 1000:.0f} s and was not looked at"
        for model in found.forgotten:
            yield f"requests for '{model}' wait without a reason"
