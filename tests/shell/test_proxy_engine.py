"""The byte path in front of a real llama-server on a unix socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from byte_path_kit import Call, Setting, proxy_for
from tiny import tiny_model

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
    "grammar": "root ::= [a-z ]*",
}


@pytest.fixture
async def setting(real_engine: Path, short_tmp: Path) -> AsyncIterator[Setting]:
    """A proxy whose claims lead to a llama-server with a tiny model and a key."""
    path = short_tmp / "e.sock"
    process = await asyncio.create_subprocess_exec(
        real_engine,
        *(
            "-m",
            tiny_model(short_tmp / "m.gguf", 1),
            "--host",
            path,
            "--metrics",
            "-c",
            "2048",
            "--context-shift",
        ),
        env={"LLAMA_API_KEY": "instance-key"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while b"listening on" not in await process.stderr.readline():
                pass
        drain = asyncio.create_task(process.stderr.read())
        made = proxy_for(f"unix:{path}")
        yield made
        await made.pools.close()
    finally:
        process.kill()
        await process.wait()
    await drain


async def processing(setting: Setting) -> int:
    """Ask the instance how many requests it works on."""
    text = (await Call(setting.proxy, "GET", "/metrics?model=m", b"").done()).body.decode()
    return int(float(text.split("\nllamacpp:requests_processing ")[1].split()[0]))


async def test_a_streamed_chat_and_a_plain_one(setting: Setting) -> None:
    """A real chat, streamed and whole, through one kept connection: events, text, [DONE], usage."""
    body = json.dumps({**CHAT, "max_tokens": 200}).encode()
    streamed = await Call(setting.proxy, body=body).done()
    events = [event.removeprefix(b"data: ") for event in streamed.body.split(b"\n\n") if event]
    assert (streamed.status, streamed.complete, events[-1]) == (200, True, b"[DONE]")
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert len("".join(delta.get("content") or "" for delta in deltas)) >= 200
    assert len(streamed.sent) > 2
    whole = await Call(
        setting.proxy, body=json.dumps({**CHAT, "stream": False, "max_tokens": 20}).encode()
    ).done()
    assert json.loads(whole.body)["usage"]["completion_tokens"] == 20
    assert setting.pools.counts().popitem()[1] == (0, 1)
    assert setting.admission.open_claims == 0


async def test_c28_a_client_that_leaves_stops_the_generation(setting: Setting) -> None:
    """An endless stream whose client leaves: the engine stops working on it.

    Of a request that doesn't stream, the engine looks after the client only after a second in which it
    had no result for anybody, so asking it would keep it going; test_proxy_disconnect covers that one.
    """
    call = Call(setting.proxy, body=json.dumps({**CHAT, "max_tokens": -1}).encode()).start()
    await call.something_sent.wait()
    assert await processing(setting) == 1
    call.left.set()
    await call.done()
    async with asyncio.timeout(10):
        while await processing(setting):
            pass  # each question waits for the engine
    assert not call.complete


async def test_errors_of_the_engine_pass_as_they_are(setting: Setting) -> None:
    """A request the engine refuses: its status and its words reach the client."""
    call = await Call(setting.proxy, target="/v1/embeddings", body=b'{"model":"m","input":"x"}').done()
    assert call.status in (400, 501)
    assert json.loads(call.body)["error"]["code"] == call.status
