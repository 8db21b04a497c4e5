"""Streams that wait and streams that are cut, on a herd: comment lines, the one error event, and the end."""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from herd import KEYS, QUICK, Herd, herd, until
from inside import long_answer, slow_reader
from pair import CHAT, DONE, Pair, pair, sections

pytestmark = pytest.mark.asyncio(loop_scope="module")

PING = b": waiting\n\n"
PINGS = {"LLAMASTEAD_PING_DELAY": "0.1", "LLAMASTEAD_PING_INTERVAL": "0.1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Pair]:
    """Two gateways of stub engines, one of which fits, with frequent pings."""
    async with pair(sections("slow", "busy", "broken"), "--models-max", "1", env=PINGS) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[Herd]:
    """A herd with one real engine."""
    async with herd({**QUICK, **PINGS}) as made:
        made.add_models("chat")
        await made.up("--models-dir", str(made.models), "--threads", "1")
        yield made


def errors_in(stream: bytes) -> list[str]:
    """Return the messages of the error events in a stream."""
    data = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: {")]
    return [found["error"]["message"] for found in map(json.loads, data) if "error" in found]


async def read_until(pieces: AsyncIterator[bytes], enough: Any) -> bytes:
    """Read a stream until what came is enough."""
    got = b""
    while not enough(got):
        got += await anext(pieces)
    return got


async def cut(pieces: AsyncIterator[bytes]) -> bytes:
    """Read a stream that has no clean end."""
    got = b""
    try:
        async for piece in pieces:
            got += piece
    except httpx.RemoteProtocolError:
        return got
    raise AssertionError(f"ended as if whole: {got[-200:]!r}")


async def test_c124_pings_while_queued_loading_and_in_prefill(both: Pair) -> None:
    """Ask for a cold model while another one is busy: comments in each phase, then the whole answer."""
    gates = {name: both.file("slow", name) for name in ("load", "token")}
    both.knobs("slow", load_gate=str(gates["load"]), prompt_seconds=3.0)
    both.knobs("busy", token_gate=str(both.file("busy", "token")))
    body = {"model": "slow", **CHAT, "max_tokens": 3, "stream": True}
    async with (
        both.stream("busy", gateway=1) as busy,
        both.one.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers.get_list("x-accel-buffering") == ["no"]
        assert answer.headers.get_list("cache-control") == ["no-cache"]
        pieces = answer.aiter_raw()
        queued = await read_until(pieces, lambda got: got.count(PING) >= 2)
        await both.waiting("slow", "busy")
        both.file("busy", "token").touch()
        await busy.rest()
        await both.state("slow", "loading")
        loading = await read_until(pieces, lambda got: got.count(PING) >= 3)
        gates["load"].touch()
        rest = b"".join([piece async for piece in pieces])
    assert set((queued + loading).split(b"\n\n")) == {PING.strip(), b""}
    prefill, fared, answered = rest.partition(b": x-llamastead-path=cold")
    assert prefill.count(PING) >= 3
    assert set(prefill.split(b"\n\n")) == {PING.strip(), b""}
    assert fared
    assert answered.replace(PING, b"").endswith(DONE)
    assert errors_in(rest) == []
    await both.settled()


async def test_c141_a_large_form_for_a_cold_model_waits_on_the_disk(both: Pair) -> None:
    """Upload 40 MiB with the model's name last while the model loads: the gateway's memory does not grow by
    it, and the engine gets every byte.
    """
    await both.clear("slow")
    gate = both.file("slow", "form")
    both.knobs("slow", load_gate=str(gate), count_body=True)
    gateway = both.made.roles["gateway-1"].pid
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    tail = b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nslow\r\n--b--\r\n'
    piece, sum_of = os.urandom(1 << 20), hashlib.sha256(head)

    async def upload() -> AsyncIterator[bytes]:
        yield head
        for _ in range(40):
            sum_of.update(piece)
            yield piece
        sum_of.update(tail)
        yield tail

    before = resident_bytes(gateway)
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    asking = asyncio.create_task(both.one.post("/v1/audio/transcriptions", content=upload(), headers=kind))
    await both.tickets_are("slow", 1)
    assert resident_bytes(gateway) - before < 16 << 20
    gate.touch()
    answer = await asking
    assert answer.headers["x-llamastead-path"] == "cold"
    assert answer.json() == {"bytes": len(head) + (40 << 20) + len(tail), "sha256": sum_of.hexdigest()}
    assert resident_bytes(gateway) - before < 16 << 20
    await both.settled()
    await both.clear("slow")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_c127_a_load_that_fails_after_a_ping_is_told_in_the_stream(both: Pair) -> None:
    """The engine dies while it loads, after comments went out: one error event with its last words."""
    gate = both.file("broken", "load")
    both.knobs("broken", load_gate=str(gate), crash="loading", crash_text="no such tensor")
    body = {"model": "broken", **CHAT, "stream": True}
    async with both.one.stream("POST", "/v1/chat/completions", json=body) as answer:
        pieces = answer.aiter_raw()
        await read_until(pieces, lambda got: PING in got)
        gate.touch()
        rest = b"".join([piece async for piece in pieces])
    assert len(errors_in(rest)) == 1
    assert "crash" in both.events("broken")
    await both.made.nothing_counted()


async def test_c127_a_bad_parameter_has_its_status_or_its_event(real: Herd) -> None:
    """A bad parameter with stream=true, hot: its status. Cold, with comments out by then: its message."""
    bad = {"model": "chat", "messages": [{"role": "user", "content": 1}], "stream": True}
    await real.unload("chat")
    async with real.client() as client:
        cold = await client.post("/v1/chat/completions", json=bad)
        hot = await client.post("/v1/chat/completions", json=bad)
    assert hot.status_code >= 400
    message = hot.json()["error"]["message"]
    if cold.status_code == 200:
        assert errors_in(cold.content) == [message]
    else:
        assert cold.json()["error"]["message"] == message
    await real.nothing_counted()


@pytest.mark.parametrize("headers", [{}, {"X-Conversation-Id": "cut"}])
async def test_c127_a_forced_unload_ends_a_stream_with_an_error(real: Herd, headers: dict[str, str]) -> None:
    """Unload by force mid-stream, with and without a conversation: an error event, no clean end, at once; the
    engine ends by itself."""
    async with (
        real.client(transport=slow_reader()) as client,
        real.client() as other,
        client.stream("POST", "/v1/completions", json=long_answer("chat"), headers=headers) as answer,
    ):
        pieces = answer.aiter_raw()
        await read_until(pieces, lambda got: b"data: " in got)
        await other.post("/models/unload", json={"model": "chat", "force": True})
        told = time.monotonic()
        rest = await cut(pieces)
        took = time.monotonic() - told
    assert len(errors_in(rest)) == 1
    assert "by force" in errors_in(rest)[0]
    assert took < 5, "an engine that is cut waits 5 s and more for its readers"
    await until(lambda: gone(real), "the engine to be gone")
    async with real.redis() as redis:
        assert await redis.hget(KEYS.model("chat"), "exit_code") == "0", "it had to be killed"
    await real.nothing_counted()


async def test_c127_a_forced_unload_ends_what_has_no_answer_yet_and_loads_nothing(both: Pair) -> None:
    """Unload by force while an answer that is no stream is worked on, over a connection that served before:
    an error that says so, and the model is not loaded again for it.
    """
    await both.clear("busy")
    gate = both.file("busy", "open")
    both.knobs("busy", token_gate=str(gate))
    gate.touch()
    await both.chat("busy")
    count, pid = await both.loads("busy"), (await both.made.instance("busy"))["pid"]
    gate.unlink()
    serving = both.file("busy", f"serving.{pid}")
    # Its mark outlives its last byte.
    await until(lambda: not serving.exists(), "the first answer to be over")
    asked = asyncio.create_task(both.ask("busy"))
    await until(serving.exists, "the engine to work on it")
    await both.two.post("/models/unload", json={"model": "busy", "force": True})
    answer = await asked
    assert answer.status_code == 502
    assert "by force" in answer.json()["error"]["message"]
    await both.state("busy", "", "stopped")
    await both.made.nothing_counted()
    assert await both.loads("busy") == count
    serving.unlink(missing_ok=True)  # it was stopped while it served, as ordered
    await both.settled()


async def gone(real: Herd) -> bool:
    """Return whether the model is unloaded."""
    return bool((await real.status("chat"))["value"] == "unloaded")
