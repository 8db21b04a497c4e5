"""The byte path under a real uvicorn, spoken to over raw sockets."""

import asyncio
import logging
from pathlib import Path

import pytest
from byte_path_kit import FRAMINGS, OK, SSE_HEAD, Visit, answering, chunk, instance, proxy_for
from served_kit import gateway
from waiting import PATIENCE_S

BODY = b'{"model":"m"}'


def post(body: bytes = BODY, *headers: bytes) -> bytes:
    """Build a request."""
    lines = [b"POST /completion HTTP/1.1", b"Host: g", *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def test_a_connection_serves_request_after_request(path: Path) -> None:
    """Keep-alive, then pipelined requests, then Connection: close: all answered in order, then closed."""

    async def script(visit: Visit) -> None:
        while True:
            body = (await visit.request()).body
            await visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    bodies = [b'{"model":"m","n":%d}' % number for number in range(6)]
    async with instance(path, script) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        for body in bodies[:2]:
            await client.send(post(body))
            assert (await client.answer()).body == body
        await client.send(
            b"".join(post(body) for body in bodies[2:5]) + post(bodies[5], b"Connection: close")
        )
        assert [(await client.answer()).body for _ in range(4)] == bodies[2:]
        assert await client.rest() == b""
        assert served.setting.admission.open_claims == 0


async def test_an_answer_has_one_date(path: Path) -> None:
    """Get an answer that its instance dated: the date is there once."""
    dated = b"HTTP/1.1 200 OK\r\nDate: Mon, 01 Jan 2024 00:00:00 GMT\r\nContent-Length: 2\r\n\r\nok"
    async with instance(path, answering(dated)) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        await client.send(post())
        assert len((await client.answer()).header(b"date")) == 1


async def test_c142_expectation_and_chunks(path: Path) -> None:
    """A chunked body behind Expect: 100-continue: told to go on, then forwarded with a length."""
    async with instance(path, answering()) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        await client.send(
            b"POST /completion HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        assert (await client.answer()).line == b"HTTP/1.1 100 Continue"
        await client.send(chunk(BODY[:5]) + chunk(BODY[5:]) + chunk(b""))
        assert (await client.answer()).body == b"ok"
        assert made.received[0].body == BODY
        assert made.received[0].header(b"content-length") == [b"%d" % len(BODY)]


async def test_c142_a_client_of_http_1_0_gets_no_chunks(path: Path) -> None:
    """Ask for a stream in HTTP/1.0: its bytes as they are, without framing, and the connection closes."""
    events = [b"data: %d\n\n" % number for number in range(3)]
    raw = SSE_HEAD + b"".join(map(chunk, events)) + chunk(b"")
    async with instance(path, answering(raw)) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        await client.send(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert head.lower().count(b"\r\nconnection: close") == 1
        assert body == b"".join(events)


async def test_c142_both_framings_are_400(path: Path) -> None:
    """Content-Length and Transfer-Encoding in one request: 400, nothing claimed."""
    async with gateway(proxy_for(f"unix:{path}")) as served:
        client = await served.client()
        await client.send(post(BODY, b"Transfer-Encoding: chunked"))
        assert (await client.answer()).line == b"HTTP/1.1 400 Bad Request"
        assert served.setting.admission.asked == []


async def test_c144_too_large_a_body_is_refused_before_it_is_sent(path: Path) -> None:
    """An announced size above the limit behind Expect: 413 in place of 100."""
    async with gateway(proxy_for(f"unix:{path}", max_body=1000)) as served:
        client = await served.client()
        await client.send(
            b"POST /completion HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\nContent-Length: 1001\r\n\r\n"
        )
        refused = await client.answer()
        assert b"413" in refused.line
        # The client may send the body or leave it out: what came next could be the one or the other.
        assert refused.header(b"connection") == [b"close"]
        assert await client.rest() == b""


@pytest.mark.parametrize("name", FRAMINGS)
async def test_c153_one_framing_header_at_most(path: Path, name: str) -> None:
    """Answers in each framing, as raw bytes: one framing header that fits the body, none on 204 and 304."""
    raw, expected, framing = FRAMINGS[name]
    async with instance(path, answering(raw)) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        if name == "head":
            await client.send(b"HEAD /slots?model=m HTTP/1.1\r\nHost: g\r\n\r\n")
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"content-length: 2\r\n" in head.lower()
        else:
            await client.send(post())
            answer = await client.answer()
            assert answer.body == expected
            names = [key for key, _ in answer.headers if key in (b"content-length", b"transfer-encoding")]
            assert names == framing
        await client.send(post(BODY, b"Connection: close"))
        assert (await client.answer()).line.startswith(b"HTTP/1.1 ")
        await client.rest()


@pytest.mark.parametrize("how", ["closes", "half-closes", "resets"])
@pytest.mark.parametrize("phase", ["waiting", "silent", "streaming"])
async def test_c28_c30_a_client_that_goes_is_noticed_in_every_phase(path: Path, how: str, phase: str) -> None:
    """Close, half close and reset, in each phase: the instance's connection closes and the claim is back."""

    async def script(visit: Visit) -> None:
        await visit.request()
        if phase == "streaming":
            await visit.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await visit.gone()

    setting = proxy_for(f"unix:{path}")
    if phase == "waiting":
        setting.admission.held = asyncio.Event()
    async with instance(path, script) as made, gateway(setting) as served:
        client = await served.client()
        await client.send(post())
        if phase == "waiting":
            await setting.admission.waiting.wait()
        elif phase == "silent":
            await made.arrived.wait()
        else:
            await client.reader.readuntil(b"data: 1")
        match how:
            case "closes":
                client.writer.close()
            case "half-closes":
                client.writer.write_eof()
            case "resets":
                client.reset()
        async with asyncio.timeout(5):  # a moment, with slack for a machine that stops us
            if phase == "waiting":
                await setting.admission.given_back.wait()
            else:
                await made.all_closed()
        assert setting.admission.open_claims == 0


async def test_a_client_with_a_request_in_its_pipeline_is_noticed_too(path: Path) -> None:
    """Two pipelined requests, the first unanswered; then the client goes: the first one ends."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.gone()

    async with instance(path, script) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        await client.send(post() + post())
        await made.arrived.wait()
        client.writer.close()
        async with asyncio.timeout(5):  # a moment, with slack for a machine that stops us
            await made.all_closed()
        assert len(made.received) == 1


async def test_c31_resets_right_after_the_head_leak_nothing(path: Path) -> None:
    """Two hundred resets between head and body, then twenty normal requests: served, nothing left over."""
    endless = True

    async def script(visit: Visit) -> None:
        while True:
            await visit.request()
            if not endless:
                await visit.send(OK)
                continue
            await visit.send(SSE_HEAD)
            await visit.gone()

    async with instance(path, script) as made, gateway(proxy_for(made.address)) as served:
        for _ in range(10):
            clients = [await served.client() for _ in range(20)]
            for client in clients:
                await client.send(post())
            for client in clients:
                await client.reader.readuntil(b"\r\n\r\n")
                client.reset()
        await made.all_closed()
        assert served.setting.admission.open_claims == 0
        endless = False
        for _ in range(20):
            client = await served.client()
            await client.send(post())
            assert (await client.answer()).body == b"ok"


@pytest.mark.parametrize("kind", ["events", "json"])
async def test_c127_c130_a_broken_answer_ends_without_a_clean_end_or_a_trace(
    path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The instance dies mid-answer: an error event and no last chunk, or too few bytes; one warning."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b"data: 1\n\n") if kind == "events" else OK[:-1])

    async with instance(path, script) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        await client.send(post())
        raw = await client.rest()
        if kind == "events":
            assert b'data: {"error": {"code": 502' in raw
            assert b"0\r\n\r\n" not in raw
        else:
            assert raw.endswith(b"\r\n\r\no")
        problems = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [(record.name, record.exc_info) for record in problems] == [("llamastead.gateway.proxy", None)]
        assert served.setting.admission.open_claims == 0


async def test_a_slow_client_holds_back_the_instance(path: Path) -> None:
    """An endless answer to a client that doesn't read: the instance is held back after bounded bytes."""
    sent = 0
    stalled = asyncio.Event()

    async def script(visit: Visit) -> None:
        nonlocal sent
        await visit.request()
        await visit.send(SSE_HEAD)
        piece = chunk(b"x" * 65536)
        while True:
            visit.writer.write(piece)
            try:
                async with asyncio.timeout(1):
                    await visit.writer.drain()
            except TimeoutError:
                stalled.set()
                await visit.gone()
                return
            sent += len(piece)

    async with instance(path, script) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        await client.send(post())
        async with asyncio.timeout(PATIENCE_S):
            await stalled.wait()
        assert sent < 32 << 20
        client.reset()
        await made.all_closed()


async def test_a_large_upload_passes_whole(path: Path) -> None:
    """Twenty MiB with the model at the end: spooled, forwarded, answered."""
    body = b'{"image":"' + b"A" * (20 << 20) + b'","model":"m"}'
    async with instance(path, answering()) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        await client.send(post(body))
        assert (await client.answer()).body == b"ok"
        assert made.received[0].body == body
