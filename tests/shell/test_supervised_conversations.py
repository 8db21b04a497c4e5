"""The supervisor's eye on conversations: which it stops at their engine, and which it leaves alone."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from gateway_kit import SECRET, ScriptedLeader, until
from redis.asyncio import Redis

from llamastead.shared.store.conversations import ConversationStore
from llamastead.shared.store.errors import StaleLeader
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.store.records import Facts
from llamastead.shared.words import ConversationState
from llamastead.supervisor import conversations
from llamastead.supervisor.conversations import Conversations
from llamastead.supervisor.running import Running

INSTANCE, NAME = "h-1-1", "talk"


class LosingStore(LeaderStore):
    """Redis loses its data right after it was looked at, once."""

    looks = 0

    async def observe(self, *args: Any) -> Facts:
        facts = await super().observe(*args)
        self.looks += 1
        if self.looks == 1:
            assert facts.claims[INSTANCE].leases
            await self._redis.flushdb()
        return facts


@dataclass
class Engine:
    """It still answers the conversation; `stopped` is what it is told to stop, `asked` how often it was asked
    what it answers, `meanwhile` is done before it says so.
    """

    stopped: list[str] = field(default_factory=list)
    asked: int = 0
    meanwhile: Callable[[], Awaitable[object]] | None = None

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            self.stopped.append(request.url.path)
            return httpx.Response(204)
        self.asked += 1
        if self.meanwhile is not None:
            await self.meanwhile()
        names = json.loads(request.content)["conversation_ids"]
        return httpx.Response(200, json=[{"conversation_id": name, "is_done": False} for name in names])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Be the engine."""
    made = Engine()

    def client(*_: object) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(made.answer), base_url="http://instance")

    monkeypatch.setattr(conversations, "engine_client", client)
    return made


async def watched(redis: Redis, keys: Keys, store: LeaderStore) -> Conversations:
    """Return the watch over one instance that answers one conversation."""
    leader = ScriptedLeader(redis, keys)
    await leader.open("m")
    await leader.load(INSTANCE, "m")
    talks, reads = ConversationStore(redis, keys), GatewayStore(redis, keys)
    await reads.heartbeat("g1", 1, {}, {}, {}, ())
    await talks.converse(NAME, "g1.c1", "g1", "m", "r")
    assert await talks.attach(NAME, "g1.c1", INSTANCE)
    running = {INSTANCE: Running("m", "unix:/nowhere", "n")}
    return Conversations(store, reads, talks, lambda: SECRET, running, 60_000)


async def test_one_that_redis_lost_with_all_else_is_not_stopped(
    redis: Redis, keys: Keys, engine: Engine
) -> None:
    """Empty Redis between the look at claims and the look at the conversation: its engine goes on."""
    store = LosingStore(redis, keys, "token")
    made = await watched(redis, keys, store)
    with pytest.raises(StaleLeader):  # at the second look
        await asyncio.wait_for(made.run(0.01), 30)
    assert (store.looks, engine.stopped) == (1, [])


async def test_one_that_ends_while_its_engine_is_asked_keeps_its_answer(
    redis: Redis, keys: Keys, engine: Engine
) -> None:
    """Be done between the engine's word that it goes on and the look at its state: it is done, and stays."""
    made = await watched(redis, keys, LeaderStore(redis, keys, "token"))
    engine.meanwhile = lambda: made.conversations.conclude(NAME, ConversationState.DONE, "g1.c1")
    facts = await made.store.observe()
    await made._settle(INSTANCE, {NAME: "g1.c1"}, facts.now_ms)
    found = await made.conversations.read(NAME)
    assert found is not None
    assert (engine.asked, engine.stopped, found.state) == (1, [], ConversationState.DONE)


async def test_one_that_nobody_can_ask_for_is_stopped(redis: Redis, keys: Keys, engine: Engine) -> None:
    """Delete a conversation whose claim stands: its engine is told, and the claim goes."""
    made = await watched(redis, keys, LeaderStore(redis, keys, "token"))
    await redis.delete(keys.conversation(NAME))
    watching = asyncio.create_task(made.run(0.01))
    await until(lambda: engine.stopped, "the engine to be told")

    async def free() -> bool:
        return not await made.reads.read_leases(INSTANCE)

    await until(free, "the claim to go")
    watching.cancel()
    assert len(set(engine.stopped)) == 1
