"""Who may be in memory: the limit, the least recently used, busy ones, deaths, and what never waits."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from herd import KEYS, QUICK, Herd, herd, until
from inside import long_answer, slow_reader
from looks import whole_lines
from tiny import stub_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PRESET = """\
[one]
model = {models}/one.gguf
[two]
model = {models}/two.gguf
[three]
model = {models}/three.gguf
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def single() -> AsyncIterator[Herd]:
    """A herd of real engines with room for one."""
    async with herd(QUICK) as made:
        made.add_models("a", "b")
        words = ("-c", "2048", "-t", "1", "--no-warmup")
        await made.up("--models-dir", str(made.models), "--models-max", "1", *words)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted() -> AsyncIterator[Herd]:
    """A herd of stub engines with room for two."""
    async with herd(QUICK) as made:
        made.add_models("one", "two", "three")
        preset = made.models.parent / "models.ini"
        preset.write_text(PRESET.format(models=made.models))
        engine = str(stub_engine(made.models.parent))
        await made.up("--models-preset", str(preset), "--models-max", "2", "--engine", engine)
        yield made


def knobs(made: Herd, model: str, **values: Any) -> None:
    """Set what a model's stub does from its next start on."""
    (made.models / f"{model}.gguf.json").write_text(json.dumps(values))


async def chat(client: httpx.AsyncClient, model: str, **extra: Any) -> httpx.Response:
    """Send a short chat to a model; it must be answered."""
    answer = await client.post("/v1/chat/completions", json={"model": model, **CHAT, **extra})
    assert answer.status_code == 200, answer.text
    return answer


async def resident(made: Herd) -> set[str]:
    """Return the models that are loaded according to Redis, the source of all listings."""
    async with made.redis() as redis:
        names = await redis.zrange(KEYS.models, 0, -1)
        return {name for name in names if await redis.hget(KEYS.model(name), "status") == "loaded"}


async def is_unloaded(made: Herd, model: str) -> bool:
    """Return whether the gateway lists a model as unloaded."""
    return bool((await made.status(model))["value"] == "unloaded")


async def read_on(pieces: AsyncIterator[bytes], got: bytearray) -> None:
    """Add the pieces of an answer to `got` until it ends or breaks."""
    async for piece in pieces:
        got += piece


async def waits(made: Herd, model: str) -> bool:
    """Return whether a request for the model stands in the queue."""
    async with made.redis() as redis:
        return await redis.zscore(KEYS.queue, model) is not None


async def test_the_least_recently_used_idle_model_makes_room(scripted: Herd) -> None:
    """With room for two use one, two and one again: three takes the place of two, then two that of one."""
    async with scripted.client() as client:
        for model in ("one", "two", "one"):
            await chat(client, model)
            await scripted.nothing_counted()
        await chat(client, "three")
        assert await resident(scripted) == {"one", "three"}
        await scripted.nothing_counted()
        await chat(client, "two")
        assert await resident(scripted) == {"two", "three"}
        await until(lambda: is_unloaded(scripted, "one"), "one to be listed as unloaded")
        assert "failed" not in await scripted.status("one")


async def test_requests_that_cannot_be_placed_wait_for_a_busy_model_to_end(scripted: Herd) -> None:
    """Keep both places busy with open streams: a third model waits, and takes the place that ends first."""
    gate = scripted.models / "gate"
    for model in ("one", "two"):
        await scripted.unload(model)
        knobs(scripted, model, token_gate=str(gate) + model)
    await scripted.unload("three")
    async with contextlib.AsyncExitStack() as streams, scripted.client() as client:
        pieces = {}
        for model in ("one", "two"):
            body = {"model": model, **CHAT, "stream": True}
            answer = await streams.enter_async_context(
                client.stream("POST", "/v1/chat/completions", json=body)
            )
            pieces[model] = answer.aiter_raw()
            assert b"t0" in await anext(pieces[model])
        third = asyncio.create_task(chat(client, "three"))
        await until(lambda: waits(scripted, "three"), "three in the queue")
        entry = (await client.get("/queue")).json()["queue"][0]
        assert (entry["model"], len(entry["requests"])) == ("three", 1)
        assert await resident(scripted) == {"one", "two"}
        (scripted.models / "gatetwo").touch()
        rest = b"".join([piece async for piece in pieces["two"]])
        assert rest.endswith(b"data: [DONE]\n\n")
        await third
        assert await resident(scripted) == {"one", "three"}
        (scripted.models / "gateone").touch()
        assert b"".join([piece async for piece in pieces["one"]]).endswith(b"data: [DONE]\n\n")
    # A stub takes its mark away after its last byte; one that was stopped while it served leaves it for good.
    await until(lambda: not list(scripted.models.glob("*.serving.*")), "no stub to be cut while it served")
    await scripted.nothing_counted()


async def test_c24_reads_and_warm_requests_do_not_wait_behind_a_load(scripted: Herd) -> None:
    """While one model loads without end, a loaded one answers chats and reads, and the lists are answered."""
    gate = scripted.models / "load-gate"
    await scripted.unload("two")
    await scripted.unload("one")
    knobs(scripted, "one")
    knobs(scripted, "two", load_gate=str(gate))
    async with scripted.client() as client:
        await chat(client, "one")
        slow = asyncio.create_task(chat(client, "two"))

        async def loading() -> bool:
            return (await scripted.status("two"))["value"] == "loading"

        await until(loading, "two loading")
        answer = await chat(client, "one")
        assert answer.headers["x-llamastead-path"] == "hot"
        for path in ("/props", "/slots"):
            assert (await client.get(path, params={"model": "one"})).status_code == 200
        for path in ("/models", "/v1/models", "/props", "/queue", "/health", "/v1/models/two"):
            assert (await client.get(path)).status_code == 200
        assert [entry["model"] for entry in (await client.get("/queue")).json()["queue"]] == ["two"]
        assert not slow.done()
        gate.touch()
        assert (await slow).headers["x-llamastead-path"] == "cold"
    await scripted.nothing_counted()


async def test_c07_requests_around_the_instant_of_ready_are_all_answered(scripted: Herd) -> None:
    """Order a load and keep sending requests until well after it is ready: each is answered, one load."""
    await scripted.unload("three")
    gate = scripted.models / "three-load"
    knobs(scripted, "three", load_gate=str(gate))
    async with scripted.redis() as redis, scripted.client() as client:
        before = int(await redis.hget(KEYS.model("three"), "loads") or 0)
        assert (await client.post("/models/load", json={"model": "three"})).json() == {"success": True}
        sent = []

        async def ready() -> bool:
            sent.append(asyncio.create_task(chat(client, "three")))
            if await waits(scripted, "three"):
                gate.touch()  # not before, or on a busy machine it may be ready for the first of them
            return (await scripted.status("three"))["value"] == "loaded"

        await until(ready, "three loaded")
        sent += [asyncio.create_task(chat(client, "three")) for _ in range(5)]
        paths = [(await request).headers["x-llamastead-path"] for request in sent]
        assert {"cold", "hot"} <= set(paths)
        assert int(await redis.hget(KEYS.model("three"), "loads")) == before + 1
    await scripted.nothing_counted()


async def test_c03_r2_a_loading_model_is_not_stopped_for_another(scripted: Herd) -> None:
    """Fill both places with slow loads and ask for a third: nobody is stopped before it has served."""
    gate = scripted.models / "both-load"
    for model in ("one", "two", "three"):
        await scripted.unload(model)
        knobs(scripted, model, load_gate=str(gate))
        (scripted.models / f"{model}.gguf.journal").unlink(missing_ok=True)
    async with scripted.client() as client:
        first = [asyncio.create_task(chat(client, model)) for model in ("one", "two")]

        async def both() -> bool:
            async with client.stream("GET", "/models") as answer:
                models = json.loads(await answer.aread())["data"]
            return sum(m["status"]["value"] == "loading" for m in models) == 2

        await until(both, "two models loading")
        third = asyncio.create_task(chat(client, "three"))
        await until(lambda: waits(scripted, "three"), "three in the queue")
        gate.touch()
        await asyncio.gather(*first, third)
    for model in ("one", "two"):
        lines = whole_lines(scripted.models / f"{model}.gguf.journal")
        events = [json.loads(line)["event"] for line in lines]
        assert events[:3] == ["start", "ready", "request"], events
        assert set(events[3:]) <= {"exit_line"}, events


async def test_c13_r1_a_streaming_model_is_not_stopped(single: Herd) -> None:
    """With room for one let A stream and ask for B: A's stream is whole, then B takes A's place."""
    async with single.client() as client:
        body = {"model": "a", "prompt": "once", "max_tokens": 600, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_raw()
            whole = await anext(pieces)
            second = asyncio.create_task(chat(client, "b"))

            async def waited() -> bool:
                # A machine that is busy with us for long may have answered both by now.
                return second.done() or await waits(single, "b")

            await until(waited, "b in the queue")
            whole += b"".join([piece async for piece in pieces])
        assert whole.count(b"data: ") >= 600
        assert whole.endswith(b"data: [DONE]\n\n")
        assert (await second).headers["x-llamastead-path"] == "cold"
    assert await resident(single) == {"b"}
    await single.nothing_counted()


async def test_c22_two_models_asked_for_in_turn_never_reset_a_connection(single: Herd) -> None:
    """With room for one let two clients without retries ask for A and B six times each: all are answered."""

    async def keep_asking(model: str) -> list[str]:
        transport = httpx.AsyncHTTPTransport(retries=0)
        async with single.client(transport=transport) as client:
            return [(await chat(client, model)).headers["x-llamastead-path"] for _ in range(6)]

    paths = await asyncio.gather(keep_asking("a"), keep_asking("b"))
    assert "cold" in paths[0] + paths[1]
    await single.nothing_counted()


async def test_c36_after_a_crash_all_requests_wait_for_one_reload(single: Herd) -> None:
    """Kill the engine in a stream: it ends in an error event; twenty requests then share a single reload."""
    async with (
        single.client(transport=slow_reader()) as slow,
        single.client() as client,
        single.redis() as redis,
    ):
        got = bytearray()
        async with slow.stream("POST", "/v1/completions", json=long_answer("a")) as answer:
            pieces = answer.aiter_raw()
            got += await anext(pieces)
            fields = await single.instance("a")
            before = int(await redis.hget(KEYS.model("a"), "loads"))
            os.kill(int(fields["pid"]), signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):  # the chunked body has no end
                await read_on(pieces, got)
        last = json.loads(got.rstrip().rpartition(b"data: ")[2])
        assert last["error"]["code"] == 502
        assert b"[DONE]" not in got
        answers = await asyncio.gather(*(chat(client, "a") for _ in range(20)))
        assert len({a.headers["x-llamastead-instance"] for a in answers}) == 1
        assert answers[0].headers["x-llamastead-instance"] != fields["id"]
        assert int(await redis.hget(KEYS.model("a"), "loads")) == before + 1
    await single.nothing_counted()
