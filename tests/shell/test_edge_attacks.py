"""Clients that send what is no HTTP, too much of it, or never the end of it: raw sockets, a real uvicorn."""

import asyncio
import json
from pathlib import Path

import pytest
from byte_path_kit import SSE_HEAD, Received, Visit, chunk, instance, proxy_for
from gateway_kit import until
from served_kit import Gateway, gateway
from waiting import PATIENCE_S

from llamastead.gateway import edge

NOWHERE = "unix:/nonexistent/e.sock"
LINE = b"POST /completion HTTP/1.1\r\nHost: g\r\n"


def refusal(answer: Received, status: int) -> str:
    """Return the message of an answer that refuses in the shape of all errors, and closes."""
    assert answer.line.split()[1] == b"%d" % status
    assert answer.header(b"connection") == [b"close"]
    error = json.loads(answer.body)["error"]
    assert (error["code"], error["type"]) == (status, "invalid_request_error")
    return str(error["message"])


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client that got the wrong port
        b"GET / HTTP/9.9\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\n\r\n",
        LINE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        LINE + b"Content-Length: -1\r\n\r\n",
        LINE + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        LINE + b"Transfer-Encoding: chunked, identity\r\n\r\n",
        LINE + b"Transfer-Encoding : chunked\r\n\r\n",
        LINE + b"X-Folded: one\r\n two\r\n\r\n",
        LINE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(sent: bytes) -> None:
    """Send it: 400 in JSON, the connection closes, nothing was asked of any instance."""
    async with gateway(proxy_for(NOWHERE)) as served:
        client = await served.client()
        await client.send(sent)
        assert "HTTP" in refusal(await client.answer(), 400)
        assert await client.rest() == b""
        assert served.setting.admission.asked == []


@pytest.mark.parametrize("piece", [b"X-Long: %s\r\n" % (b"a" * 8000), b"a" * 8000])
async def test_a_head_without_end_is_refused(piece: bytes) -> None:
    """Send header after header, or one header for ever: 431 once they pass the limit."""
    async with gateway(proxy_for(NOWHERE)) as served:
        client = await served.client()
        await client.send(LINE + b"X-First: ")
        sent = 0
        while sent < edge.HEAD_MAX_BYTES:
            await client.send(piece)
            sent += len(piece)
        assert str(edge.HEAD_MAX_BYTES) in refusal(await client.answer(), 431)


async def test_a_head_just_within_the_limit_is_served() -> None:
    """Send 60 KiB of headers in pieces: the request is looked at as any other."""
    async with gateway(proxy_for(NOWHERE)) as served:
        client = await served.client()
        await client.send(LINE)
        for _ in range(15):
            await client.send(b"X-Long: %s\r\n" % (b"a" * 4000))
        await client.send(b"Content-Length: 2\r\n\r\n{}")
        assert (await client.answer()).line.split()[1] == b"400"  # it names no model
        assert served.setting.admission.asked == []


async def _a_head_that_stops(served: Gateway) -> float:
    await (await served.client()).send(LINE + b"X-Slow: ")
    await until(lambda: len(served.server.server_state.connections) == 1, "the connection")
    connection = served.connection()
    await until(lambda: connection._in_head, "the head to begin")
    return connection._since


async def test_a_client_that_never_ends_its_head_is_refused() -> None:
    """Send half a head: nothing happens within the patience, then 408 and the connection closes."""
    async with gateway(proxy_for(NOWHERE)) as served:
        since = await _a_head_that_stops(served)
        connection = served.connection()
        connection.look(since + edge.HEAD_PATIENCE_S - 1)
        assert not connection.transport.is_closing()
        got = connection._head_bytes
        await served.clients[0].send(b"a")  # a byte now and then buys no time
        await until(lambda: connection._head_bytes > got, "the byte to arrive")
        connection.look(since + edge.HEAD_PATIENCE_S + 1)
        assert "head" in refusal(await served.clients[0].answer(), 408)
        assert await served.clients[0].rest() == b""


async def test_clients_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often and without patience: a client that says nothing at all is refused."""
    monkeypatch.setattr(edge, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(edge, "HEAD_PATIENCE_S", 0.05)
    async with gateway(proxy_for(NOWHERE)) as served:
        looking = asyncio.create_task(edge.look_at_clients(served.server.server_state.connections))
        refusal(await (await served.client()).answer(), 408)
        looking.cancel()


async def test_a_body_that_stops_is_refused_and_nothing_is_counted() -> None:
    """Send half of a body: 408 after the patience, no claim was ever taken."""
    async with gateway(proxy_for(NOWHERE)) as served:
        client = await served.client()
        await client.send(LINE + b'Content-Length: 100\r\n\r\n{"model":')
        await until(lambda: len(served.server.server_state.tasks) == 1, "the request to begin")
        connection = served.connection()
        connection.look(connection._since + edge.BODY_PATIENCE_S - 1)
        assert not connection.transport.is_closing()
        connection.look(connection._since + edge.BODY_PATIENCE_S + 1)
        assert "body" in refusal(await client.answer(), 408)
        await until(lambda: not served.server.server_state.tasks, "the request to end")
        assert served.setting.admission.asked == []


async def test_a_long_answer_is_not_taken_for_a_slow_client(short_tmp: Path) -> None:
    """Look at a client that listens to a long stream, with half of its next request sent: it goes on."""
    finish = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await finish.wait()
        await visit.send(chunk(b"data: 2\n\n") + chunk(b""))

    async with instance(short_tmp / "e.sock", script) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        body = b'{"model":"m"}'
        await client.send(LINE + b"Content-Length: %d\r\n\r\n%s" % (len(body), body) + LINE)
        await made.arrived.wait()
        connection = served.connection()
        connection.look(connection._since + 10 * edge.BODY_PATIENCE_S)
        finish.set()
        assert (await client.answer()).body == b"data: 1\n\ndata: 2\n\n"


async def test_what_is_no_http_behind_two_requests_does_not_get_into_the_first_ones_answer(
    short_tmp: Path,
) -> None:
    """Pipeline two requests, then nonsense while the first is answered: its stream is cut, nothing added."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await visit.gone()

    body = b'{"model":"m"}'
    request = LINE + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    async with instance(short_tmp / "e.sock", script) as made, gateway(proxy_for(made.address)) as served:
        client = await served.client()
        await client.send(request + request)
        async with asyncio.timeout(PATIENCE_S):
            await client.reader.readuntil(b"data: 1\n\n")
        await client.send(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert (await client.rest()).strip() == b""
        await made.all_closed()
        await until(lambda: served.setting.admission.open_claims == 0, "the claims to be given back")


async def test_a_fault_of_our_own_is_told_in_the_shape_of_all_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Have the application raise: 500 in JSON, the trace in the log, and the next request is answered."""
    async with gateway(proxy_for(NOWHERE)) as served:
        client = await served.client()
        with monkeypatch.context() as patch:
            patch.setattr(type(served.setting.proxy), "__call__", _fails)
            await client.send(LINE + b"Content-Length: 2\r\n\r\n{}")
            answer = await client.answer()
        assert answer.line.split()[1] == b"500"
        assert json.loads(answer.body)["error"]["code"] == 500
        assert "a bug" in caplog.text
        again = await served.client()
        await again.send(LINE + b"Content-Length: 2\r\n\r\n{}")
        assert (await again.answer()).line.split()[1] == b"400"


async def _fails(*_: object) -> None:
    raise RuntimeError("a bug")
