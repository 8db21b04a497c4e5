"""Conversations on a herd with two gateways: left, found again, stopped, taken over, lost."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from herd import KEYS, QUICK, herd, until
from pair import CHAT, DONE, Pair, pair, sections

from llamastead.shared.streams import name_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = ("alone", "older", "slow", "other", "dies", "gone")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Pair]:
    """Two gateways of stub engines, two of which fit."""
    async with pair(sections(*MODELS), "--models-max", "2") as made:
        yield made


def asked(model: str, name: str, tokens: int = 4) -> dict[str, Any]:
    """Return the arguments of a POST that begins a conversation."""
    body = {"model": model, **CHAT, "max_tokens": tokens, "stream": True}
    return {"url": "/v1/chat/completions", "json": body, "headers": {"X-Conversation-Id": name.encode()}}


async def begun(both: Pair, model: str, name: str, gateway: int = 0) -> None:
    """Begin a conversation and leave it after its first piece."""
    async with both.gateways()[gateway].stream("POST", **asked(model, name)) as answer:
        assert answer.status_code == 200, await answer.aread()
        await anext(answer.aiter_raw())


async def left_waiting(both: Pair, model: str, name: str) -> None:
    """Begin a conversation with a model that still loads, and leave as soon as it waits."""
    asking = asyncio.create_task(both.one.post(**asked(model, name)))
    await both.tickets_are(model, 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def record(both: Pair, name: str) -> dict[str, str]:
    """Return a conversation as Redis has it."""
    async with both.made.redis() as redis:
        return dict(await redis.hgetall(KEYS.conversation(name)))


async def in_state(both: Pair, name: str, state: str) -> dict[str, str]:
    """Wait until a conversation is in a state."""

    async def look() -> dict[str, str]:
        found = await record(both, name)
        return found if found.get("state") == state else {}

    return dict(await until(look, f"{name} to be {state}"))


async def looked_up(both: Pair, *names: str, gateway: int = 1) -> list[dict[str, Any]]:
    """Ask which of these conversations are known."""
    body = {"conversation_ids": list(names)}
    return list((await both.gateways()[gateway].post("/v1/streams/lookup", json=body)).json())


def text_of(stream: bytes) -> str:
    """Return what a chat's stream says."""
    events = [
        line.removeprefix("data: ") for line in stream.decode().splitlines() if line.startswith("data: {")
    ]
    return "".join(json.loads(event)["choices"][0]["delta"]["content"] for event in events)


@pytest.mark.parametrize("paths", [False, True])
async def test_c135_a_left_conversation_goes_on_and_is_found_at_any_gateway(both: Pair, paths: bool) -> None:
    """Leave mid-answer, of engines with either form of address: it holds its model against another that wants
    the room, is replayed elsewhere from any byte, and gives the room back when it is done."""
    name = f"chat {paths}/ü::alone"
    gate = both.file("alone", f"gate-{paths}")
    both.knobs("alone", token_gate=str(gate), stream_paths=paths)
    await begun(both, "alone", name)
    await in_state(both, name_of("", name), "detached")
    done = both.file("older", f"done-{paths}")
    both.knobs("older", token_gate=str(done))
    async with both.stream("older") as stream:
        waiting = asyncio.create_task(both.chat("other"))
        await both.waiting("other", "busy")
        done.touch()
        await stream.rest()
    assert (await waiting).status_code == 200
    assert (await both.status("alone"))["state"] == "ready"
    assert [e["is_done"] for e in await looked_up(both, f"chat {paths}/ü", "nobody")] == [False]
    reading = asyncio.create_task(both.two.get("/v1/stream", params={"conv_id": name, "from": 0}))
    gate.touch()
    whole = (await reading).content
    assert text_of(whole) == "t0 t1 t2 t3 "
    assert whole.endswith(DONE)
    for start in (0, 1, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 9):
        got = await both.two.get("/v1/stream", params={"conv_id": name, "from": start})
        assert (got.status_code, got.content) == (200, whole[start:])
        assert got.headers["x-llamastead-instance"]
    assert (await both.two.get("/v1/stream", params={"conv_id": name, "from": "x"})).status_code == 400
    in_path = "/v1/stream/" + name.replace("/", "%2F").replace(" ", "%20")
    assert (await both.one.get(in_path)).content == whole
    await both.settled()
    for _ in range(2):
        assert (await both.two.delete("/v1/stream", params={"conv_id": name})).status_code == 204
    gone = await both.one.get("/v1/stream", params={"conv_id": name})
    assert (gone.status_code, gone.json()["error"]["reason"]) == (404, "stopped")
    await both.clear("alone", "older", "other")


async def test_c126_who_comes_back_goes_on_behind_all_bytes_it_got() -> None:
    """Be kept by comments through a load, read on and leave in a quiet stretch, as a tab that is away:
    back with the count of all bytes, at any gateway, nothing is missing and nothing comes twice.
    """
    env = {"LLAMASTEAD_PING_DELAY": "0.1", "LLAMASTEAD_PING_INTERVAL": "0.1"}
    async with pair(sections("m"), env=env) as made:
        load, tokens = made.file("m", "load"), made.file("m", "tokens")
        made.knobs("m", load_gate=str(load), token_gate=str(tokens))
        got = b""
        async with made.one.stream("POST", **asked("m", "tab")) as answer:
            pieces = answer.aiter_raw()
            while got.count(b": waiting") < 3:
                got += await anext(pieces)
            load.touch()
            while b"t0" not in got:
                got += await anext(pieces)
        await in_state(made, "tab", "detached")
        reading = asyncio.create_task(made.two.get("/v1/stream", params={"conv_id": "tab", "from": len(got)}))
        tokens.touch()
        rest = (await reading).content
        assert text_of(got + rest) == "t0 t1 t2 t3 "
        assert (got + rest).endswith(DONE)
        whole = (await made.one.get("/v1/stream", params={"conv_id": "tab"})).content
        assert text_of(whole) == "t0 t1 t2 t3 "
        assert whole[len(got) :] == rest
        for start in (1, 12, len(got) - 1, len(whole)):
            again = await made.two.get("/v1/stream", params={"conv_id": "tab", "from": start})
            assert (again.status_code, again.content) == (200, whole[start:])
        assert [entry["total_bytes"] for entry in await looked_up(made, "tab")] == [len(whole)]


async def test_c126_a_gateway_that_leaves_adds_nothing_to_an_answer_that_goes_on() -> None:
    """Tell the gateway to leave in the middle of an answer: its client gets no byte that is not the engine's,
    and goes on at the other one where it stopped.
    """
    async with pair(sections("m"), env={"LLAMASTEAD_STOP_TIMEOUT": "1"}) as made:
        tokens = made.file("m", "tokens")
        made.knobs("m", token_gate=str(tokens))
        got = b""
        async with made.one.stream("POST", **asked("m", "tab")) as answer:
            pieces = answer.aiter_raw()
            got += await anext(pieces)
            leaving = asyncio.create_task(made.made.roles["gateway-1"].signal(signal.SIGTERM))

            async def read_on() -> None:
                nonlocal got
                async for piece in pieces:
                    got += piece

            with pytest.raises(httpx.RemoteProtocolError):
                await read_on()
            await leaving
        tokens.touch()
        rest = await made.two.get("/v1/stream", params={"conv_id": "tab", "from": len(got)})
        assert text_of(got + rest.content) == "t0 t1 t2 t3 "
        whole = (await made.two.get("/v1/stream", params={"conv_id": "tab"})).content
        assert got + rest.content == whole


async def test_c135_what_an_engine_no_longer_keeps_is_told(both: Pair) -> None:
    """An engine keeps only the end of a long answer: that is replayed, from before it on it is a 400."""
    both.knobs("alone", kept_bytes=100)
    await both.one.post(**asked("alone", "long", tokens=20))
    (known,) = await looked_up(both, "long")
    total = known["total_bytes"]
    assert (known["is_done"], total > 1000) == (True, True)
    kept = await both.two.get("/v1/stream", params={"conv_id": "long", "from": total - 100})
    assert (kept.status_code, len(kept.content), kept.content.endswith(DONE)) == (200, 100, True)
    for start in (0, total - 101):
        lost = await both.two.get("/v1/stream", params={"conv_id": "long", "from": start})
        assert (lost.status_code, lost.json()["error"]["message"]) == (400, "Stream offset lost")
    await both.settled()
    await both.clear("alone")


async def test_who_reads_a_finished_conversation_keeps_its_model(both: Pair) -> None:
    """Read what was said long ago, from an engine that gives its bytes slowly and was used longest ago, while
    a third model wants room: the other one goes, and nothing is cut."""
    gate = both.file("alone", "replay")
    both.knobs("alone", replay_gate=str(gate))
    answer = await both.one.post(**asked("alone", "again"))
    await in_state(both, "again", "done")
    await both.chat("older")
    async with both.two.stream("GET", "/v1/stream", params={"conv_id": "again"}) as replay:
        pieces = replay.aiter_raw()
        got = await anext(pieces)
        await both.chat("other")
        assert (await both.status("alone"))["state"] == "ready"
        gate.touch()
        async for piece in pieces:
            got += piece
    assert got == answer.content
    await both.settled()
    await both.clear("alone", "other")


async def test_c135_one_that_waits_says_so_and_survives_its_socket(both: Pair) -> None:
    """Leave while the model loads: 503 with Retry-After, listed; the load goes on and the answer is there."""
    gate = both.file("slow", "load-gate")
    both.knobs("slow", load_gate=str(gate))
    await left_waiting(both, "slow", "early")
    waits = await both.two.get("/v1/stream", params={"conv_id": "early"})
    assert (waits.status_code, waits.headers["retry-after"]) == (503, "2")
    assert [e["is_done"] for e in await looked_up(both, "early")] == [False]
    gate.touch()
    await in_state(both, "early", "done")
    got = await both.two.get("/v1/stream", params={"conv_id": "early"})
    assert text_of(got.content) == "t0 t1 t2 t3 "
    await both.settled()
    await both.clear("slow")


async def test_c135_an_explicit_stop_ends_the_wait(both: Pair) -> None:
    """Stop it through the other gateway while the model loads: its client is told, its ticket is gone."""
    gate = both.file("slow", "stop-gate")
    both.knobs("slow", load_gate=str(gate))
    asking = asyncio.create_task(both.one.post(**asked("slow", "unwanted")))
    await both.tickets_are("slow", 1)
    for _ in range(2):
        assert (await both.two.delete("/v1/stream", params={"conv_id": "unwanted"})).status_code == 204
    answer = await asking
    assert (answer.status_code, "stopped" in answer.json()["error"]["message"]) == (409, True)
    await both.tickets_are("slow", 0)
    gate.touch()
    await both.settled()
    await both.clear("slow")


async def test_c135_the_same_name_again_ends_the_older_one(both: Pair) -> None:
    """Begin it at one model and leave, then at another through the other gateway: the first one is ended."""
    gate = both.file("older", "same-gate")
    both.knobs("older", token_gate=str(gate))
    await begun(both, "older", "again")
    await in_state(both, "again", "detached")
    answer = await both.two.post(**asked("other", "again"))
    assert text_of(answer.content) == "t0 t1 t2 t3 "
    assert "stream_stopped" in both.events("older")
    assert [e["is_done"] for e in await looked_up(both, "again")] == [True]
    await both.settled()
    await both.clear("older", "other")


async def test_c135_a_dead_instance_is_told(both: Pair) -> None:
    """The engine of a detached conversation is killed: a clear 404, no claim is left."""
    both.knobs("dies", token_gate=str(both.file("dies", "never")))
    await begun(both, "dies", "cut")
    await in_state(both, "cut", "detached")
    os.kill(int((await both.made.instance("dies"))["pid"]), signal.SIGKILL)
    await both.state("dies", "failed")
    got = await both.two.get("/v1/stream", params={"conv_id": "cut"})
    assert (got.status_code, got.json()["error"]["reason"]) == (404, "lost")
    assert "has ended" in got.json()["error"]["message"]
    await both.made.nothing_counted()
    for mark in both.cut():
        mark.unlink()


async def test_c135_a_conversation_outlives_the_gateway_of_its_client(both: Pair) -> None:
    """Kill the gateway mid-answer: after its sweep the model is still claimed, by the conversation, which is
    then read whole at another gateway and gives the model back."""
    gate = both.file("older", "gate-of-three")
    both.knobs("older", token_gate=str(gate))
    third = await both.made.gateway("gateway-killed")
    async with (
        both.made.client(len(both.made.ports) - 1) as client,
        client.stream("POST", **asked("older", "survivor")) as answer,
    ):
        await anext(answer.aiter_raw())
        os.kill(third.pid, signal.SIGKILL)
        await in_state(both, "survivor", "detached")
    async with both.made.redis() as redis:
        held = await redis.hkeys(KEYS.leases((await both.made.instance("older"))["id"]))
    assert held == ["conversation:survivor"]
    reading = asyncio.create_task(both.two.get("/v1/stream", params={"conv_id": "survivor"}))
    gate.touch()
    assert text_of((await reading).content) == "t0 t1 t2 t3 "
    await both.settled()
    await both.clear("older")


async def test_a_conversation_that_redis_forgot_claims_nothing(both: Pair) -> None:
    """Take the record of a detached conversation away: it is stopped at its engine, and its claim ends."""
    both.knobs("other", token_gate=str(both.file("other", "never")))
    await begun(both, "other", "forgotten")
    await in_state(both, "forgotten", "detached")
    async with both.made.redis() as redis:
        await redis.delete(KEYS.conversation("forgotten"))
    await both.settled()
    assert "stream_stopped" in both.events("other")
    await both.clear("other")


async def test_one_queued_in_a_gateway_that_dies_is_lost_and_says_so(both: Pair) -> None:
    """Kill the gateway in which a conversation waits: once it is swept the other one says that it is lost."""
    gate = both.file("gone", "gate")
    both.knobs("gone", load_gate=str(gate))
    await both.made.gateway("gateway-3")
    async with both.made.client(len(both.made.ports) - 1) as third:
        asking = asyncio.create_task(third.post(**asked("gone", "orphan")))
        await both.tickets_are("gone", 1)
        os.kill(both.made.roles["gateway-3"].pid, signal.SIGKILL)
        await asyncio.gather(asking, return_exceptions=True)

    async def lost() -> bool:
        got = await both.two.get("/v1/stream", params={"conv_id": "orphan"})
        return got.status_code == 404 and got.json()["error"]["reason"] == "lost"

    await until(lost, "the conversation to be lost")
    gate.touch()
    await both.settled()


async def test_a_finished_conversation_is_replayed_whole_though_its_engine_is_stopped() -> None:
    """Read a long finished conversation and pause: another model takes the only place meanwhile, and the rest
    comes all the same; who asks afterwards hears that it is lost.
    """
    async with pair(sections("talker", "other"), "--models-max", "1") as made:
        whole = (await made.one.post(**asked("talker", "long", tokens=20_000))).content
        assert len(whole) > 2_000_000
        await made.settled()
        async with made.two.stream("GET", "/v1/stream", params={"conv_id": "long"}) as replay:
            pieces = replay.aiter_raw()
            got = await anext(pieces)
            await made.chat("other")
            await made.state("talker", "stopped")  # gateways show it a moment after the other is served
            async for piece in pieces:
                got += piece
        assert got == whole
        gone = await made.two.get("/v1/stream", params={"conv_id": "long"})
        assert (gone.status_code, gone.json()["error"]["reason"]) == (404, "lost")


async def test_a_detached_conversation_has_a_deadline() -> None:
    """Leave an answer that never ends: at the limit it is stopped, its claim ends, and it says why."""
    async with pair(sections("endless"), env={"LLAMASTEAD_DETACH_LIMIT": "1"}) as both:
        both.knobs("endless", token_gate=str(both.file("endless", "never")))
        await begun(both, "endless", "long")
        await in_state(both, "long", "expired")
        got = await both.one.get("/v1/stream", params={"conv_id": "long"})
        assert (got.status_code, "detach-limit" in got.json()["error"]["message"]) == (404, True)
        assert "stream_stopped" in both.events("endless")
        await both.settled()


async def test_c136_a_conversation_is_its_keys_own() -> None:
    """A real engine and two keys: the second key can't read, list or stop what the first one began, and a
    conversation of its own with the same id is another one."""
    async with herd({**QUICK, "LLAMASTEAD_API_KEYS": "key-one,key-two"}) as made:
        made.add_models("chat")
        made.headers = {"Authorization": "Bearer key-one"}
        await made.up("--models-dir", str(made.models), "--threads", "1")
        body = {"model": "chat", "prompt": "once", "max_tokens": 300, "stream": True}
        theirs = {"Authorization": "Bearer key-two"}
        async with made.client() as one, made.client(headers=theirs) as two:
            async with one.stream(
                "POST", "/v1/completions", json=body, headers={"X-Conversation-Id": "mine/1"}
            ) as answer:
                assert answer.status_code == 200, await answer.aread()
                await anext(answer.aiter_raw())
            assert (await two.get("/v1/stream", params={"conv_id": "mine/1"})).status_code == 404
            assert (await two.post("/v1/streams/lookup", json={"conversation_ids": ["mine/1"]})).json() == []
            assert (await two.delete("/v1/stream", params={"conv_id": "mine/1"})).status_code == 204
            other = await two.post(
                "/v1/completions", json={**body, "max_tokens": 3}, headers={"X-Conversation-Id": "mine/1"}
            )
            assert other.content.endswith(DONE)
            whole = await one.get("/v1/stream", params={"conv_id": "mine/1"})
            assert whole.status_code == 200
            assert whole.content.endswith(DONE)
            assert len(whole.content) > len(other.content)
            listed = (await one.post("/v1/streams/lookup", json={"conversation_ids": ["mine/1"]})).json()
            assert [(e["conversation_id"], e["is_done"]) for e in listed] == [("mine/1", True)]
            assert listed[0]["total_bytes"] == len(whole.content)
            for start in (0, len(whole.content) // 2, len(whole.content)):
                got = await one.get("/v1/stream", params={"conv_id": "mine/1", "from": start})
                assert got.content == whole.content[start:]
            bad = await one.post("/v1/streams/lookup", json={"conversation_ids": "mine"})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "conversation_ids")
            for method in ("GET", "DELETE"):
                assert (await one.request(method, "/v1/stream")).status_code == 400
        async with made.redis() as redis:
            names = [name async for name in redis.scan_iter(match=KEYS.conversation("*"))]
            # What is kept of a conversation is small, has no byte of it, and goes by itself.
            for name in names:
                assert len(json.dumps(await redis.hgetall(name))) < 1000 < len(whole.content)
                assert await redis.pttl(name) > 0
        assert len(names) == 2
        assert not any("key-" in name for name in names)
        await made.nothing_counted()
