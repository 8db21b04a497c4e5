"""Comment lines that keep the client of a slow stream, and what they leave of status and framing."""

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_path_kit import OK, SSE_HEAD, Call, Setting, Visit, answering, chunk, instance, proxy_for
from openai import APIError, AsyncOpenAI
from served_kit import gateway
from waiting import PATIENCE_S

from llamastead.gateway.body import Body
from llamastead.gateway.pings import asks_for_stream
from llamastead.gateway.seams import AnswerCut
from llamastead.shared.errors import ApiError

BODY = b'{"model":"m","messages":[],"stream":true}'
QUICK = {"ping_delay": 0.05, "ping_interval": 0.02}
PING = b": waiting\n\n"
REFUSED = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
TOO_LONG = b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}'


def waiting(path: Path, **settings: Any) -> Setting:
    """Build a proxy whose requests wait until `admission.held` is set."""
    setting = proxy_for(f"unix:{path}", settings={**QUICK, **settings})
    setting.admission.held = asyncio.Event()
    return setting


async def pinged(call: Call, times: int = 1) -> None:
    """Wait until so many pings went out."""
    await sent(call, lambda body: body.count(PING) >= times)


async def sent(call: Call, enough: Callable[[bytes], bool]) -> None:
    """Wait until what the client has got is enough."""
    async with asyncio.timeout(PATIENCE_S):
        while not (call.sent and enough(call.body)):
            call.something_sent.clear()
            await call.something_sent.wait()


def text_of(body: bytes) -> str:
    """Return the data of a stream of events, read line by line as a client would."""
    lines = body.decode().split("\n")
    return "".join(line.removeprefix("data: ") for line in lines if line.startswith("data: "))


def delta(text: str) -> bytes:
    """Build one event of a chat."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    shared = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return b"data: " + json.dumps({**shared, "choices": [choice]}).encode() + b"\n\n"


async def test_c124_c126_a_waiting_stream_is_kept_alive_and_then_whole(path: Path) -> None:
    """Pings while it queues and in prefill, at the set interval; headers once; then the engine's events."""
    prefilled = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD)
        await prefilled.wait()
        await visit.send(chunk(b"data: one\n\n") + chunk(b"data: [DONE]\n\n") + chunk(b""))

    setting = waiting(path)
    async with instance(path, script) as made:
        call = Call(setting.proxy, body=BODY).start()
        await pinged(call, 2)
        assert call.status == 200
        assert call.header(b"content-type") == [b"text/event-stream"]
        assert call.header(b"cache-control") == [b"no-cache"]
        assert call.header(b"x-accel-buffering") == [b"no"]
        assert call.header(b"x-request-id") == [b"req-1"]
        setting.admission.held.set()
        await made.arrived.wait()
        await pinged(call, call.body.count(PING) + 3)
        prefilled.set()
        await call.done()
        assert [m["type"] for m in call.sent].count("http.response.start") == 1
        assert b": x-llamastead-path=hot x-llamastead-wait-ms=0" in call.body
        assert call.body.replace(PING, b"").endswith(b"data: one\n\ndata: [DONE]\n\n")
        assert call.complete
        assert setting.admission.open_claims == 0
        await setting.pools.close()


async def test_c126_pings_of_both_sides_never_break_an_event(path: Path) -> None:
    """An event that comes in two pieces with a long pause inside it, child pings around: parsed as sent."""
    half_sent, go_on = asyncio.Event(), asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b": child\n\n") + chunk(b'data: {"a":'))
        half_sent.set()
        await go_on.wait()
        await visit.send(chunk(b"1}\n") + chunk(b"\n"))
        await visit.gone()

    setting = proxy_for(f"unix:{path}", settings=QUICK)
    async with instance(path, script):
        call = Call(setting.proxy, body=BODY).start()
        await half_sent.wait()
        await sent(call, lambda body: body.endswith(b'{"a":'))
        await asyncio.sleep(10 * QUICK["ping_interval"])
        assert call.body.endswith(b'data: {"a":')
        go_on.set()
        await pinged(call, call.body.count(PING) + 2)
        assert b'data: {"a":1}\n\n' + PING in call.body
        call.left.set()
        await call.done()
        await setting.pools.close()


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        (BODY.replace(b"true", b"false"), {}),
        (BODY.replace(b"true", b'"true"'), {}),
        (b'{"model":"m","options":{"stream":true}}', {}),
        (BODY, {"ping_interval": 0}),
        (BODY, {"ping_interval": -1}),
        (BODY, {"ping_delay": 600}),
    ],
)
async def test_what_was_not_pinged_keeps_its_status(path: Path, body: bytes, settings: Any) -> None:
    """No stream, no pings wanted, or refused before the first one: the refusal has its own status."""
    setting = waiting(path, **settings)
    call = Call(setting.proxy, body=body).start()
    await setting.admission.waiting.wait()
    await asyncio.sleep(4 * QUICK["ping_delay"])
    assert call.sent == []
    setting.admission.refusal = ApiError(503, "no room")
    setting.admission.held.set()
    with pytest.raises(ApiError, match="no room"):
        await call.done()


@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/messages"])
async def test_c127_a_refusal_a_ping_is_the_last_event(path: Path, target: str) -> None:
    """The queue gives up after pings went out: one error event, named where clients want it."""
    setting = waiting(path)
    call = Call(setting.proxy, target=target, body=BODY).start()
    await pinged(call)
    setting.admission.refusal = ApiError(503, "no room", retry_after=5)
    setting.admission.held.set()
    await call.done()
    event = call.body.replace(PING, b"")
    assert json.loads(text_of(event))["error"]["message"] == "no room"
    assert event.startswith(b"event: error\ndata: " if target == "/v1/messages" else b"data: ")
    assert call.complete


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (REFUSED % (len(TOO_LONG), TOO_LONG), "too long"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 5\r\n\r\nsorry", "sorry"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 50\r\n\r\nsorry", "sorry"),
        (OK, "ok"),
    ],
)
async def test_c127_an_engines_refusal_a_ping_is_the_last_event(
    path: Path, answer: bytes, message: str
) -> None:
    """The engine answers something else than a stream, whole or cut: what it said is the one event."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(answer)

    setting = waiting(path)
    async with instance(path, script):
        call = Call(setting.proxy, body=BODY).start()
        await pinged(call)
        setting.admission.held.set()
        cut = b"50\r\n\r\nsorry" in answer
        with pytest.raises(AnswerCut) if cut else nullcontext():
            await call.done()
        assert json.loads(text_of(call.body))["error"]["message"] == message
        assert call.complete
        await setting.pools.close()


async def test_c132_progress_is_shown_to_who_asks_for_it(path: Path) -> None:
    """X-Llamastead-Progress: pings are named events that tell state and progress, and no part of the text."""
    setting = waiting(path)
    setting.catalog.models["m"].state = "loading"
    setting.catalog.models["m"].progress = {"value": 0.5}
    headers = [(b"content-type", b"application/json"), (b"x-llamastead-progress", b"true")]
    call = Call(setting.proxy, body=BODY, headers=headers).start()
    await sent(call, lambda body: b"\n\n" in body)
    name, data = call.body.split(b"\n\n")[0].split(b"\n")
    assert name == b"event: llamastead.progress"
    told = json.loads(data.removeprefix(b"data: "))
    assert (told["model"], told["state"], told["progress"]) == ("m", "loading", {"value": 0.5})
    call.left.set()
    await call.done()


async def test_a_client_that_leaves_while_pinged_gives_its_ticket_back(path: Path) -> None:
    """Go after two pings: the wait is cancelled and nothing more is sent."""
    setting = waiting(path)
    call = Call(setting.proxy, body=BODY).start()
    await pinged(call, 2)
    call.left.set()
    await call.done()
    assert setting.admission.given_back.is_set()


async def test_a_slow_reader_is_not_pinged_into_a_queue(path: Path) -> None:
    """While a piece of the answer waits for the client, no ping goes between."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await visit.gone()

    # So long that the answer begins before the first ping would, also on a busy machine.
    setting = proxy_for(f"unix:{path}", settings={**QUICK, "ping_delay": 3.0})
    async with instance(path, script):
        call = Call(setting.proxy, body=BODY)
        call.take = asyncio.Event()
        call.start()
        await call.something_sent.wait()
        await asyncio.sleep(3.0 + 10 * QUICK["ping_interval"])
        assert call.body == b""
        call.take.set()
        await pinged(call)
        assert call.body.startswith(b"data: 1\n\n")
        call.left.set()
        await call.done()
        await setting.pools.close()


@pytest.mark.parametrize("size", [0, 2 << 20])
async def test_a_stream_is_recognised_in_any_body(size: int) -> None:
    """In memory and in a file, repeated, escaped and nested: the last top-level `stream` counts."""
    filler = b'"x":"' + b"a" * size + b'",'
    for written, expected in (
        (b'{%b"stream":true}', True),
        (b'{"stream":true,%b"stream":false}', False),
        (b'{"str\\u0065am":true,%b"y":{"stream":false}}', True),
        (b'{%b"stream":1}', False),
        (b'[%b"stream"]'.replace(b"%b", b"%.0b"), False),
    ):
        body = Body()
        await body._add(written % filler)
        await body._end()
        assert await asks_for_stream(body) is expected, written
        body.close()


async def test_c129_the_openai_client_takes_pings_errors_and_a_normal_end(path: Path) -> None:
    """Pings then text, pings then a refusal, and an instance that dies mid-answer: text or the real error."""
    dies = False

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b": child\n\n") + chunk(delta("one ")))
        if dies:
            visit.writer.close()
            return
        await visit.send(chunk(delta("two")) + chunk(b"data: [DONE]\n\n") + chunk(b""))
        await visit.gone()

    setting = waiting(path)
    async with instance(path, script), gateway(setting) as served:

        async def chat() -> str:
            assert setting.admission.held is not None
            asyncio.get_running_loop().call_later(0.2, setting.admission.held.set)
            async with AsyncOpenAI(
                base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0
            ) as client:
                stream = await client.chat.completions.create(model="m", messages=[], stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

        assert await chat() == "one two"
        setting.admission.held.clear()
        setting.admission.refusal = ApiError(503, "the model has no room")
        with pytest.raises(APIError, match="the model has no room"):
            await chat()
        setting.admission.refusal = None
        setting.admission.held.clear()
        dies = True
        with pytest.raises(APIError, match="broke off"):
            await chat()


async def test_c124_the_wire_shows_one_head_and_whole_chunks(path: Path) -> None:
    """Over a real connection: one status line, pings as chunks of their own, the events, the end."""
    setting = waiting(path)
    answer = SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b"")
    async with instance(path, answering(answer)), gateway(setting) as served:
        assert setting.admission.held is not None
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as client,
            client.stream("POST", "/completion", content=BODY) as got,
        ):
            text = ""
            async for piece in got.aiter_text():
                text += piece
                if text.count(PING.decode()) >= 2:
                    setting.admission.held.set()
        assert got.status_code == 200
        assert text.startswith(PING.decode() * 2)
        assert text.endswith("data: 1\n\n")
        assert got.headers.get_list("x-accel-buffering") == ["no"]
