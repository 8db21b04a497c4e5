"""The one task that changes the core's state: takes events from one queue, steps, carries out the actions."""

import asyncio
import logging
import time
from collections import deque

from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.board import Board
from llamastead.supervisor.clock import RedisClock
from llamastead.supervisor.core.events import Event, Observed, Tick
from llamastead.supervisor.core.state import Claims, Demand, State
from llamastead.supervisor.core.step import step
from llamastead.supervisor.effects import Effects

log = logging.getLogger(__name__)

REQUESTS_NAMED = 10
"""So many requests of an entry are named where a decision about it is told."""


class Driver:
    """Feeds the core. `put` and `look` may be called from any task; only `run` touches the state.

    Facts are read (`look`) after the actions of earlier events are carried out, when something told us to,
    and every `reread` seconds in any case: streams and callbacks only say when to look, never what is true.
    `looked_ms` is Redis's time of the facts that the core took in last. `empty` is set while there is no
    instance and nothing told that is not taken yet.
    """

    def __init__(
        self,
        state: State,
        store: LeaderStore,
        effects: Effects,
        board: Board,
        clock: RedisClock,
        reread: float,
    ) -> None:
        self.state = state
        self._store = store
        self._effects = effects
        self._clock = clock
        self._reread = reread
        self._events: deque[Event] = deque()
        self._awake = asyncio.Event()
        self.empty = asyncio.Event()
        self._look_wanted = True
        self._board = board
        self.looked_ms = 0

    def put(self, event: Event) -> None:
        """Tell the core something; it is taken in the order told."""
        self._events.append(event)
        self.empty.clear()
        self._awake.set()

    def look(self) -> None:
        """Have the facts read again."""
        self._look_wanted = True
        self._awake.set()

    async def run(self) -> None:
        """Drive until cancelled. Redis and store errors end it: the next reign starts from the facts."""
        looked_at = time.monotonic()
        while True:
            wake_at = await self._take_events()
            now = time.monotonic()
            if self._look_wanted or now - looked_at >= self._reread:
                self._look_wanted = False
                looked_at = now
                facts_ms, facts = await self._observe()
                wake_at = await self._advance(facts)
                self.looked_ms = facts_ms
            await self._board.show(self.state, time.monotonic())
            if self.state.instances or self._events:
                self.empty.clear()
            else:
                self.empty.set()
            await self._sleep_until(min(wake_at, looked_at + self._reread))

    async def _take_events(self) -> float:
        wake_at = await self._advance(Tick())
        while self._events:
            wake_at = await self._advance(self._events.popleft())
        return wake_at

    async def _advance(self, event: Event) -> float:
        """Step with the event and each outcome of the actions it led to; return when to wake."""
        pending: deque[Event] = deque((event,))
        wake_at = float("inf")
        while pending:
            taken = step(self.state, pending.popleft(), time.monotonic())
            self.state = taken.state
            wake_at = taken.wake_at if taken.wake_at is not None else float("inf")
            for action in taken.actions:
                pending.extend(await self._effects.perform(action))
        return wake_at

    async def _observe(self) -> tuple[int, Observed]:
        """Return the facts and Redis's time of them."""
        facts = await self._store.observe()
        self._clock.seen(facts.now_ms)
        demands = {
            model: Demand(
                self._clock.monotonic(entry.first_ms),
                len(entry.tickets),
                tuple(entry.expired),
                tuple(ticket.request_id for ticket in entry.tickets[:REQUESTS_NAMED]),
            )
            for model, entry in facts.queue.items()
        }
        claims = {
            instance: Claims(len(held.leases), self._used(held.last_used_ms))
            for instance, held in facts.claims.items()
        }
        return facts.now_ms, Observed(demands, claims)

    def _used(self, last_used_ms: int) -> float | None:
        return self._clock.monotonic(last_used_ms) if last_used_ms else None

    async def _sleep_until(self, wake_at: float) -> None:
        if not self._events and not self._look_wanted:
            try:
                async with asyncio.timeout(max(0.0, wake_at - time.monotonic())):
                    await self._awake.wait()
            except TimeoutError:
                pass
        self._awake.clear()
