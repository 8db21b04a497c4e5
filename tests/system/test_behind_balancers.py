"""A herd behind nginx and HAProxy: what is told is not held back, and long waits are not cut."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from front_proxies import PROXIES, behind
from herd import PATIENCE_S, QUICK, Herd, herd
from inside import DONE, stubbed

pytestmark = pytest.mark.asyncio(loop_scope="module")

PINGS = {"LLAMASTEAD_PING_DELAY": "0.3", "LLAMASTEAD_PING_INTERVAL": "0.3"}
SILENCE_S, LOAD_S = 4, 7.0  # a gateway on a busy machine may be late with a ping by two seconds
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd with a model that says a word with each request, and one that loads slowly."""
    async with herd({**QUICK, **PINGS}) as made:
        words = stubbed(made, "talks", chatter="srv  a word")
        stubbed(made, "slow", load_seconds=LOAD_S)
        await made.up(*words)
        yield made


async def before(enough: str, lines: AsyncIterator[str]) -> str:
    """Read lines until one has `enough` in it, and return that."""
    async for line in lines:
        if enough in line:
            return line
    raise AssertionError(f"ended without {enough}")


@pytest.mark.parametrize("proxy", PROXIES)
async def test_c123_events_and_logs_come_as_they_happen(stead: Herd, tmp_path: Path, proxy: str) -> None:
    """Follow the events and a log through a proxy, asking for compression: each line is read before the next
    is made. The gateway itself says once each that nothing is to be held or kept.
    """
    asks = {"Accept-Encoding": "gzip, br"}
    async with (
        behind(proxy, tmp_path, stead.ports[0]) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, headers=asks) as front,
        stead.client() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        await stead.unload("talks")
        async with front.stream("GET", "/models/sse") as events:
            assert "content-encoding" not in events.headers
            lines = events.aiter_lines()
            for step, status in (("load", "loaded"), ("unload", "unloaded")):
                assert (await client.post(f"/models/{step}", json={"model": "talks"})).status_code == 200
                told = json.loads((await before(f'"{status}"', lines)).removeprefix("data:"))
                assert told["model"] == "talks"
        await client.post("/v1/chat/completions", json={"model": "talks", **BODY})
        async with front.stream("GET", "/logs/talks?follow=1&lines=1") as log:
            assert "content-encoding" not in log.headers
            lines = log.aiter_lines()
            for _ in range(3):
                await before("a word", lines)
                assert (
                    await client.post("/v1/chat/completions", json={"model": "talks", **BODY})
                ).status_code == 200
        for path in ("/models/sse", "/logs/talks?follow=1"):
            async with client.stream("GET", path, headers=asks) as answer:
                assert answer.headers.get_list("x-accel-buffering") == ["no"]
                assert answer.headers.get_list("cache-control") == ["no-cache"]


@pytest.mark.parametrize("proxy", ["nginx", "haproxy"])
async def test_c124_a_cold_stream_outlives_the_read_limit_of_a_proxy(
    stead: Herd, tmp_path: Path, proxy: str
) -> None:
    """Load for much longer than the proxy bears silence: it cuts a plain answer; a stream comes whole."""
    await stead.unload("slow")
    async with (
        behind(proxy, tmp_path, stead.ports[0], SILENCE_S) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as front,
    ):
        cut = await front.post("/v1/chat/completions", json={"model": "slow", **BODY})
        assert cut.status_code == 504
        await stead.unload("slow")
        answer = await front.post("/v1/chat/completions", json={"model": "slow", **BODY, "stream": True})
    assert answer.status_code == 200
    assert answer.content.endswith(DONE)
    assert answer.text.count(": waiting") >= LOAD_S / SILENCE_S
    await stead.nothing_counted()
