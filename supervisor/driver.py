"""The one task that changes the core's state: takes events from one queue, steps, carries out the actions."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection

from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.board import Board
from llamastead.supervisor.clock import RedisClock
from llamastead.supervisor.core.actions import Answer
from llamastead.supervisor.core.events import (
    Adopted,
    Event,
    Found,
    LoadOrdered,
    Observed,
    RecoveryDone,
    Tick,
)
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
    `know` is told the models that an event is about before the core decides on them: it returns what the core
    is to be told of them first, if anything.
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
        know: Callable[[Collection[str]], Awaitable[Event | None]],
    ) -> None:
        self.state = state
        self._know = know
        self._store = store
        self._effects = effects
        self._clock = clock
        self._reread = reread
        self._events: deque[Event] = deque()
        self._answers: deque[Answer] = deque()
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
            while self._answers:
                await self._effects.perform(self._answers.popleft())
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
        first = await self._know(models) if (models := _models_of(event)) else None
        pending: deque[Event] = deque((first, event) if first is not None else (event,))
        wake_at = float("inf")
        while pending:
            taken = step(self.state, pending.popleft(), time.monotonic())
            self.state = taken.state
            wake_at = taken.wake_at if taken.wake_at is not None else float("inf")
            for action in taken.actions:
                if isinstance(action, Answer):
                    # Not before what it promises is in Redis: the next leader knows of nothing else.
                    self._answers.append(action)
                else:
                    pending.extend(await self._effects.perform(action))
        return wake_at

    async def _observe(self) -> tuple[int, Observed]:
        """Return the facts and Redis's time of them."""
        facts = await self._store.observe()
        self._clock.seen(facts.now_ms)
        ends = self._clock.ends({t.id: t.deadline_ms for each in facts.queue.values() for t in each.tickets})
        now = time.monotonic()
        demands = {
            model: Demand(
                self._clock.monotonic(entry.first_ms),
                len(entry.tickets),
                tuple(ticket.id for ticket in entry.tickets if ends[ticket.id] <= now),
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


def _models_of(event: Event) -> Collection[str]:
    """Return the models whose figures may matter from this event on."""
    match event:
        case Observed():
            return event.demands
        case RecoveryDone():
            return event.ordered
        case LoadOrdered() | Found() | Adopted():
            return (event.model,)
        case _:
            return ()
