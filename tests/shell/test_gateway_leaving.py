"""How a gateway leaves: who is heard, who is cut, who is told to come again."""

import asyncio
import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from gateway_kit import ScriptedLeader, until
from gateway_processes import (
    TalkingInstance,
    gateway_process,
    load,
    load_and_be_told,
)
from ports import refuses
from waiting import PATIENCE_S

from llamastead.shared.words import EndClass


async def test_c133_leaving_ends_event_streams_finishes_answers_and_says_goodbye(
    env: Path, leader: ScriptedLeader
) -> None:
    """TERM with an answer and an event stream open: nobody new, the stream ends, the answer is whole."""
    instance = TalkingInstance(env / "e.sock")
    async with instance.listening(), gateway_process(env) as gateway, gateway.client() as client:
        await gateway.ready()
        await load_and_be_told(client, leader, instance)
        body = {"model": "a", "stream": True}
        async with (
            client.stream("POST", "/v1/completions", json=body) as answer,
            client.stream("GET", "/models/sse") as events,
        ):
            parts = answer.aiter_bytes()
            assert await anext(parts) == b"data: one\n\n"
            gateway.process.send_signal(signal.SIGTERM)
            assert [chunk async for chunk in events.aiter_bytes()] == []
            await until(lambda: refuses(gateway.port), "the port to be closed")
            assert await leader.leases("h-1-1") != {}
            instance.finish.set()
            assert [part async for part in parts] == [b"data: two\n\n"]
        assert await asyncio.wait_for(gateway.process.wait(), PATIENCE_S) == 0
        assert await leader.leases("h-1-1") == {}
        assert await leader.redis.zrange(leader.keys.gateways, 0, -1) == []


async def test_c133_ten_event_streams_and_two_chats_make_way_for_a_new_gateway(
    env: Path, leader: ScriptedLeader
) -> None:
    """TERM with ten event streams and two answers open: the streams end at once, another gateway takes the
    port and serves while the answers finish, and the first one leaves in order.
    """
    instance = TalkingInstance(env / "e.sock")
    chat = {"model": "a", "stream": True}
    async with (
        instance.listening(),
        gateway_process(env) as gateway,
        gateway.client() as client,
        AsyncExitStack() as open_ones,
    ):
        await gateway.ready()
        await load_and_be_told(client, leader, instance)
        chats = [
            await open_ones.enter_async_context(client.stream("POST", "/v1/completions", json=chat))
            for _ in range(2)
        ]
        parts = [answer.aiter_bytes() for answer in chats]
        assert [await anext(part) for part in parts] == [b"data: one\n\n"] * 2
        streams = [
            await open_ones.enter_async_context(client.stream("GET", "/models/sse")) for _ in range(10)
        ]
        gateway.process.send_signal(signal.SIGTERM)
        for events in streams:
            assert [chunk async for chunk in events.aiter_bytes()] == []
        await until(lambda: refuses(gateway.port), "the port to be closed")
        async with gateway_process(env, port=gateway.port) as other, other.client() as another:
            await other.ready()
            async with another.stream("GET", "/models/sse") as events:
                assert events.status_code == 200
                assert gateway.process.returncode is None
            instance.finish.set()
            for part in parts:
                assert [piece async for piece in part] == [b"data: two\n\n"]
            assert await asyncio.wait_for(gateway.process.wait(), PATIENCE_S) == 0
            answer = await another.post("/v1/completions", json=chat)
            assert (answer.status_code, answer.content) == (200, b"data: one\n\ndata: two\n\n")
            assert len(await leader.redis.zrange(leader.keys.gateways, 0, -1)) == 1


async def test_during_the_drain_wait_only_readiness_changes(env: Path, leader: ScriptedLeader) -> None:
    """TERM with a drain-wait of an hour: readiness says 503 over new connections, which are served, and an
    event stream stays open; a second signal ends it all.
    """
    instance = TalkingInstance(env / "e.sock")
    instance.finish.set()
    async with (
        instance.listening(),
        gateway_process(env, "--drain-wait", "3600") as gateway,
        gateway.client() as client,
    ):
        await gateway.ready()
        await load(leader, instance)
        async with client.stream("GET", "/models/sse") as events:
            gateway.process.send_signal(signal.SIGTERM)

            async def draining() -> bool:
                answer = await client.get("/readyz")
                return (answer.status_code, answer.json()["status"]) == (503, "draining")

            await until(draining, "readiness to say so")
            said = (await client.get("/health")).headers["date"]

            async def goes_on() -> bool:
                # The server writes the time every second; where it may leave it does so at once.
                async with gateway.client() as newcomer:
                    return (await newcomer.get("/health")).headers["date"] != said

            await until(goes_on, "the server to go on")
            answer = await client.post("/v1/completions", json={"model": "a"})
            assert answer.text == "data: one\n\ndata: two\n\n"
            await leader.store.ended("h-1-1", EndClass.STOPPED, 0, "")
            told = b""
            async for piece in events.aiter_bytes():
                told += piece
                if b"unloaded" in told:
                    break
            assert b"unloaded" in told
            gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateway.process.wait(), PATIENCE_S) in (0, 1)
        assert await leader.redis.zrange(leader.keys.gateways, 0, -1) == []


async def test_c133_what_does_not_end_is_cut_at_the_deadline(
    env: Path, leader: ScriptedLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TERM with an endless answer: an error event, a cut after the stop-timeout, and an exit status."""
    monkeypatch.setenv("LLAMASTEAD_STOP_TIMEOUT", "1")
    instance = TalkingInstance(env / "e.sock")
    async with instance.listening(), gateway_process(env) as gateway, gateway.client() as client:
        await gateway.ready()
        await load(leader, instance)
        async with client.stream("POST", "/v1/completions", json={"model": "a"}) as answer:
            parts = answer.aiter_bytes()
            await anext(parts)
            gateway.process.send_signal(signal.SIGTERM)
            last = [await anext(parts)]
            with pytest.raises(httpx.TransportError):
                await anext(parts)
            assert json.loads(last[-1].removeprefix(b"data: "))["error"]["code"] == 503
        assert await asyncio.wait_for(gateway.process.wait(), PATIENCE_S) == 1
        assert await leader.leases("h-1-1") == {}


async def test_c133_who_waits_at_the_deadline_is_told_to_come_again(
    env: Path, leader: ScriptedLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TERM with a request in the queue whose model never loads: 503 with Retry-After, not a bare 500."""
    monkeypatch.setenv("LLAMASTEAD_STOP_TIMEOUT", "1")
    async with gateway_process(env) as gateway, gateway.client() as client:
        await gateway.ready()
        waiting = asyncio.ensure_future(client.post("/v1/completions", json={"model": "a"}))
        await until(lambda: leader.redis.exists(leader.keys.tickets("a")), "the request to wait")
        gateway.process.send_signal(signal.SIGTERM)
        answer = await waiting
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "the gateway is shutting down"
        assert answer.headers["x-request-id"]
        assert await gateway.process.wait() == 1


async def test_a_second_signal_cuts_at_once(env: Path, leader: ScriptedLeader) -> None:
    """TERM twice with a long stop-timeout: the open answer is cut long before it."""
    instance = TalkingInstance(env / "e.sock")
    async with instance.listening(), gateway_process(env) as gateway, gateway.client() as client:
        await gateway.ready()
        await load(leader, instance)
        async with client.stream("POST", "/v1/completions", json={"model": "a"}) as answer:
            parts = answer.aiter_bytes()
            await anext(parts)
            gateway.process.send_signal(signal.SIGTERM)
            await until(lambda: refuses(gateway.port), "the port to be closed")
            gateway.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(gateway.process.wait(), PATIENCE_S) == 1
