"""Conversations of a gateway whose Redis goes away amid their beginning."""

import asyncio
from typing import Any

import pytest
from gateway_kit import ScriptedLeader, until
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from llamastead.gateway import conversations
from llamastead.gateway.body import Body
from llamastead.gateway.conversations import Carried, Conversations
from llamastead.gateway.replay import split_at
from llamastead.gateway.routes import Router
from llamastead.shared.errors import ApiError
from llamastead.shared.store.conversations import Before, ConversationStore
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.streams import CONVERSATION_HEADER
from llamastead.shared.words import ConversationState


class LostAnswers(ConversationStore):
    """Redis does what it is told; what it answers is lost `times` times."""

    times = 2

    def _lose(self) -> None:
        if self.times:
            self.times -= 1
            raise RedisConnectionError("gone")

    async def converse(self, *args: Any) -> Before:
        before = await super().converse(*args)
        self._lose()
        return before

    async def conclude(self, *args: Any, **more: Any) -> Before:
        self._lose()
        return await super().conclude(*args, **more)


class HungStore(ConversationStore):
    """A Redis that takes calls and answers `hangs` no more."""

    hangs: tuple[str, ...] = ()
    hung = 0

    async def converse(self, *args: Any) -> Before:
        await self._hang("converse")
        return await super().converse(*args)

    async def attach(self, *args: Any) -> bool:
        await self._hang("attach")
        return await super().attach(*args)

    async def _hang(self, verb: str) -> None:
        if verb in self.hangs:
            self.hung += 1
            await asyncio.Event().wait()


class Warm:
    """A claim on an instance."""

    instance = "h-1-1"


def scope_of(name: bytes) -> Any:
    """Return the scope of a chat that begins a conversation."""
    found_route = Router().find("POST", "/v1/chat/completions")
    assert found_route is not None
    return {
        "headers": [(CONVERSATION_HEADER, name)],
        "state": {"owner": lambda _: "", "request_id": "r", "route": found_route[0]},
    }


async def test_c180_a_warm_request_does_not_wait_for_a_hung_redis_to_begin_its_conversation(
    redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hang Redis at the beginning, then at the answer: it is answered, without a conversation or with one."""
    await ScriptedLeader(redis, keys).open("m")
    store = HungStore(redis, keys)
    made = Conversations(store, None, "g1", 60.0)  # type: ignore[arg-type]
    body = Body.of(b'{"model":"m","stream":true}')
    store.hangs = ("converse",)
    with monkeypatch.context() as impatient:
        impatient.setattr(conversations, "PATIENCE_S", 0.05)
        assert await made.begin(scope_of(b"c"), body, "m") is None
    store.hangs = ("attach",)
    carried = await made.begin(scope_of(b"d"), body, "m")  # which Redis may take its time for
    assert carried is not None
    monkeypatch.setattr(conversations, "PATIENCE_S", 0.05)
    answered = False
    async with carried, carried.answering(Warm(), 200, 0):  # type: ignore[arg-type]
        answered = True
    assert answered
    assert store.hung == 2
    found = await store.read("d")
    assert found is not None
    assert found.state is ConversationState.DONE


async def test_one_that_redis_took_down_unheard_does_not_wait_for_ever(
    redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lose the answer to the beginning, and the first try to mend it: its request can't be resumed, and
    nobody is told for a day that it waits. One of that name that begins later stays.
    """
    monkeypatch.setattr(conversations, "AGAIN_S", 0.01)
    await ScriptedLeader(redis, keys).open("m")
    store = LostAnswers(redis, keys)
    made = Conversations(store, None, "g1", 60.0)  # type: ignore[arg-type]
    scope = scope_of(b"c")
    body = Body.of(b'{"model":"m","stream":true}')
    assert await made.begin(scope, body, "m") is None
    found = await store.read("c")
    assert found is not None
    assert found.state is ConversationState.QUEUED
    async with asyncio.timeout(20):
        mending = asyncio.create_task(made.run())

        async def gone() -> bool:
            return await store.read("c") is None

        await until(gone, "the conversation to be forgotten")
        store.times = 1
        assert await made.begin(scope, body, "m") is None
        await until(gone, "the second one to be forgotten")
        assert await made.begin(scope, body, "m") is not None
        assert store.times == 0
        mending.cancel()
    assert await store.read("c") is not None


async def test_each_one_that_is_stopped_gets_an_error_of_its_own(redis: Redis, keys: Keys) -> None:
    """Stop two that wait: an error keeps who raised it, so one for all would keep all requests for ever."""
    store, told = ConversationStore(redis, keys), []

    async def stopped(carried: Carried) -> None:
        async with carried:
            carried.stop()
            await asyncio.Event().wait()

    for name in ("one", "two"):
        with pytest.raises(ApiError) as over:
            await stopped(Carried(name, f"t-{name}", store, 1000, {}))
        told.append(over.value)
    assert [error.status for error in told] == [409, 409]
    assert told[0] is not told[1]


async def test_one_that_older_data_of_redis_calls_waiting_is_forgotten(
    redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have one in Redis that waits here and is carried by nobody, and skip a heartbeat: it is forgotten, one
    that does wait is not, nor is one of another gateway.
    """
    monkeypatch.setattr(conversations, "STRAY_S", 0.05)
    await ScriptedLeader(redis, keys).open("m")
    store, gateway = ConversationStore(redis, keys), GatewayStore(redis, keys)
    made = Conversations(store, None, "g1", 60.0)  # type: ignore[arg-type]
    for name, owner in (("over", "g1"), ("waits", "g1"), ("theirs", "g2")):
        await store.converse(name, f"{owner}.{name}", owner, "m", "r")
    carried = Carried("waits", "g1.waits", store, 1000, made._waiting)
    async with asyncio.timeout(20), carried:
        mending = asyncio.create_task(made.run())
        for beat, skipped in ((1, False), (2, False), (4, True)):
            assert (await gateway.heartbeat("g1", beat, {}, {}, {}, ())).skipped is skipped
        made.look_for_strays()

        async def gone() -> bool:
            return await store.read("over") is None

        await until(gone, "the one that is over to be forgotten")
        assert await store.read("waits") is not None
        assert await store.read("theirs") is not None
        mending.cancel()


@pytest.mark.parametrize(
    ("start", "asked", "before"),
    [("", "0", 8), ("3", "0", 5), ("8", "0", 0), ("20", "12", 0), ("x", "x", 0), ("9" * 5000, "9" * 5000, 0)],
)
def test_from_which_byte_an_engine_is_asked(start: str, asked: str, before: int) -> None:
    """Come back after eight bytes of comments: within them, behind them, at what is no number."""
    told, lead = split_at(start, 8)
    assert (told, len(lead)) == (asked, before)
