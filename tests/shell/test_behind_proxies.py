"""The byte path behind nginx and HAProxy with their default buffering, as operators put it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from byte_path_kit import FRAMINGS, SSE_HEAD, Visit, answering, chunk, instance, proxy_for
from front_proxies import PROXIES, behind
from served_kit import Client, gateway
from waiting import PATIENCE_S


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[Client]:
    """Connect a raw client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def post(*headers: bytes) -> bytes:
    """Build a request."""
    body = b'{"model":"m"}'
    lines = [b"POST /completion HTTP/1.1", b"Host: g", *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@pytest.mark.parametrize("proxy", PROXIES)
async def test_c123_each_event_passes_a_proxy_before_the_next_is_made(short_tmp: Path, proxy: str) -> None:
    """The instance makes an event only when the client has read the one before: nothing lies in a buffer."""
    read = asyncio.Queue[None]()

    async def script(visit: Visit) -> None:
        while True:
            await visit.request()
            await visit.send(SSE_HEAD)
            for number in range(5):
                await visit.send(chunk(b"data: %d\n\n" % number))
                await read.get()
            await visit.send(chunk(b""))

    async with (
        instance(short_tmp / "e.sock", script) as made,
        gateway(proxy_for(made.address)) as served,
        behind(proxy, short_tmp, served.port) as port,
        client_of(port) as client,
        asyncio.timeout(PATIENCE_S),
    ):
        await client.send(post(b"Accept-Encoding: gzip, br", b"Connection: close"))
        head = (await client.reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200 ")
        assert head.count(b"\r\ncache-control: no-cache\r\n") == 1
        assert b"content-encoding" not in head
        for number in range(5):
            await client.reader.readuntil(b"data: %d\n\n" % number)
            read.put_nowait(None)
        assert (await client.rest()).endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("proxy", PROXIES)
@pytest.mark.parametrize("name", FRAMINGS)
async def test_c153_a_proxy_gets_one_framing_that_fits(short_tmp: Path, proxy: str, name: str) -> None:
    """Answers in each framing, as raw bytes behind the proxy: one framing at most, and the next one fits."""
    raw, expected, framing = FRAMINGS[name]
    async with (
        instance(short_tmp / "e.sock", answering(raw)) as made,
        gateway(proxy_for(made.address)) as served,
        behind(proxy, short_tmp, served.port) as port,
        client_of(port) as client,
    ):
        if name == "head":
            await client.send(b"HEAD /slots?model=m HTTP/1.1\r\nHost: g\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                head = await client.reader.readuntil(b"\r\n\r\n")
            names = [line.partition(b":")[0] for line in head.lower().split(b"\r\n")]
            assert [key for key in names if key in (b"content-length", b"transfer-encoding")] == framing
        else:
            await client.send(post())
            answer = await client.answer()
            assert (answer.line.split()[1], answer.body) == (raw.split()[1], expected)
            names = [key for key, _ in answer.headers if key in (b"content-length", b"transfer-encoding")]
            assert names == framing
        await client.send(post(b"Connection: close"))
        assert (await client.answer()).line.split()[1] == raw.split()[1]
