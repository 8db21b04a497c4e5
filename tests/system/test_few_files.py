"""Processes that may open no more files: one clear error, what runs goes on, all works with more."""

import asyncio

import httpx
from few_files import no_more_files
from inside import DONE, QUICK, apart, ask, served, started, streaming, stubbed


async def test_a_gateway_without_files_serves_what_it_has_and_newcomers_later() -> None:
    """Let a gateway open no more files during a stream: the stream ends whole, newcomers get an answer or an
    error within their bound, who is connected is told why, and all are served when there are files again.
    """
    async with apart(QUICK) as made:
        await made.role("s1", "supervisor", *stubbed(made, "a"))
        role = await made.gateway("g1")
        async with made.client() as kept, streaming(made, "a") as stream:
            assert (await kept.get("/readyz")).status_code == 200
            with no_more_files(role.pid):
                answer = await kept.post("/v1/completions", json=ask("a"))
                assert answer.status_code == 503, answer.text
                assert "Too many open files" in answer.json()["error"]["message"]

                async def newcomer() -> int:
                    async with made.client(timeout=2.0) as other:
                        try:
                            return (await other.post("/v1/completions", json=ask("a"))).status_code
                        except httpx.HTTPError:
                            return 0

                told = await asyncio.gather(*(newcomer() for _ in range(8)))
                assert {200} != set(told) <= {0, 200, 502, 503}, told
                assert role.process is not None
                assert role.process.returncode is None
            assert (await stream.rest()).endswith(DONE)
        async with made.client() as client:
            await served(client, "a")
        assert len(started(made, "a")) == 1
        await made.nothing_counted()
