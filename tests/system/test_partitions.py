"""Links between hosts that are cut and mended: Redis on one, the models on another, gateways on two more.

Clients reach the gateways by unix sockets, which no cut touches.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from herd import PATIENCE_S, Herd, herd, until
from hosts import Hosts, hosts
from inside import DONE, QUICK, ask, is_gone, leader, leases, loads, next_leader, ready, stubbed, waits
from valkey_server import start_valkey

from llamastead.gateway.upstream.pool import CONNECT_S
from llamastead.shared.secret import read_or_make_herd_secret

pytestmark = pytest.mark.root
BROKEN_S = 60.0  # a cut-off connection is noticed after 20 s of silence


@dataclass
class Spread:
    """A herd spread over hosts `store`, `models`, `near` and `far`; the last two have a gateway each."""

    made: Herd
    net: Hosts
    gate: Path

    def client(self, gateway: str) -> httpx.AsyncClient:
        """Return a client of the gateway on host `near` or `far`."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.made.run_dir / gateway / "g.sock"))
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=BROKEN_S)

    async def gateway_ready(self, gateway: str) -> bool:
        """Return whether a gateway says that it is ready and knows of no trouble."""
        async with self.client(gateway) as client:
            answer = await client.get("/readyz")
            return answer.status_code == 200 and not answer.json().get("trouble")


@contextlib.asynccontextmanager
async def spread(**env: str) -> AsyncIterator[Spread]:
    """Yield a running herd whose models A and B, one place for both, give one token until `gate` exists."""
    with hosts("store", "models", "near", "far") as net:
        times = QUICK | {f"LLAMASTEAD_{name}": value for name, value in env.items()}
        async with herd(times) as made:
            folder, gate = made.run_dir.parent, made.models / "gate"
            options = (
                "--bind",
                net.address("store"),
                "--port",
                "6379",
                "--protected-mode",
                "no",
                "--save",
                "",
            )
            server = start_valkey(folder, *options, prefix=net.inside("store"))
            made.redis_url = f"unix://{folder}/valkey.sock"  # the tests' own way in
            made.env["LLAMASTEAD_REDIS_URL"] = f"redis://{net.address('store')}:6379/0"
            made.env["LLAMASTEAD_INSTANCE_LISTEN"] = f"tcp:{net.address('models')}"
            try:
                words = (
                    *stubbed(made, "a", "b", token_gate=str(gate)),
                    "--models-max",
                    "1",
                    "--max-wait",
                    "0",
                )
                read_or_make_herd_secret(made.run_dir / "secret")
                await made.role("supervisor", "supervisor", *words, prefix=net.inside("models"))
                here = Spread(made, net, gate)
                for name in ("near", "far"):
                    await _start_gateway(here, name)
                yield here
            finally:
                await made.stop()
                server.terminate()
                server.wait(10)


async def _start_gateway(here: Spread, name: str) -> None:
    run_dir = here.made.run_dir / name
    run_dir.mkdir()
    shutil.copy2(here.made.run_dir / "secret", run_dir / "secret")
    words = ("gateway", "--host", str(run_dir / "g.sock"))
    await here.made.role(name, *words, prefix=here.net.inside(name), run_dir=run_dir)
    await until(lambda: here.gateway_ready(name), f"the gateway on {name}")


class Answer:
    """A streamed answer that is being read in the background."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._began = asyncio.Event()
        self.data = b""
        self.problem: Exception | None = None
        self.task = asyncio.create_task(self._read(client, model))

    async def _read(self, client: httpx.AsyncClient, model: str) -> None:
        try:
            async with client.stream("POST", "/v1/completions", json=ask(model, stream=True)) as response:
                async for chunk in response.aiter_raw():
                    self.data += chunk
                    if b"data: {" in self.data:
                        self._began.set()
        except httpx.HTTPError as problem:
            self.problem = problem

    async def began(self) -> None:
        """Wait for the first event."""
        await asyncio.wait_for(self._began.wait(), PATIENCE_S)


async def test_what_was_sent_into_a_cut_link_is_given_up() -> None:
    """Cut the link under a connection that just served, then send a request over it: one error within the
    bound, which says what happened, and the model serves again once the link is mended.
    """
    async with spread() as here, here.client("far") as far:
        here.gate.touch()
        assert (await far.post("/v1/completions", json=ask("a"))).status_code == 200
        here.net.cut("far", "models")
        refused = await far.post("/v1/completions", json=ask("a"))
        assert refused.status_code == 502
        assert "the other host does not answer" in refused.json()["error"]["message"]
        here.net.mend("far", "models")
        assert (await far.post("/v1/completions", json=ask("a"))).status_code == 200


async def test_an_instance_behind_a_cut_link_is_not_called_dead() -> None:
    """Cut one gateway off from the models: its stream ends in an error event, who asks there gets one clear
    503 within the bound; the model stays loaded and serves the other gateway; mended, both serve.
    """
    async with spread() as here, here.client("far") as far, here.client("near") as near:
        stream = Answer(far, "a")
        await stream.began()
        before = await ready(here.made, "a")
        here.net.cut("far", "models")
        refused = await far.post("/v1/completions", json=ask("a"))
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        await asyncio.wait_for(stream.task, BROKEN_S)
        assert b"data: {" in stream.data
        assert b'"error"' in stream.data.rpartition(b"data: ")[2]
        here.gate.touch()
        assert (await near.post("/v1/completions", json=ask("a"))).status_code == 200
        here.net.mend("far", "models")
        assert (await far.post("/v1/completions", json=ask("a"))).status_code == 200
        assert (await ready(here.made, "a"))["pid"] == before["pid"]
        assert await loads(here.made, "a") == 1
        await here.made.nothing_counted()


async def test_a_gateway_cut_off_from_redis_finishes_what_it_has() -> None:
    """Cut one gateway off from Redis mid-stream: it is swept, and another model is wanted elsewhere. The
    stream is not cut: the instance itself says that it is busy. New requests there get 503 with Retry-After.
    """
    async with spread(ADMISSION_TIMEOUT="3") as here, here.client("far") as far, here.client("near") as near:
        stream = Answer(far, "a")
        await stream.began()
        before = await ready(here.made, "a")
        here.net.cut("far", "store")

        async def swept() -> bool:
            return not await leases(here.made, before["id"])

        await until(swept, "the silent gateway's lease to end", BROKEN_S)
        other = asyncio.create_task(near.post("/v1/completions", json=ask("b")))
        refused = await far.post("/v1/completions", json=ask("b"))
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers

        async def stopping() -> bool:
            return (await here.made.instance("a")).get("state") == "stopping"

        await until(stopping, "A to be stopped for B")
        assert not other.done()
        here.gate.touch()
        await asyncio.wait_for(stream.task, PATIENCE_S)
        assert stream.problem is None
        assert stream.data.endswith(DONE)
        assert (await other).status_code == 200
        here.net.mend("far", "store")
        await until(lambda: here.gateway_ready("far"), "the gateway to be back", BROKEN_S)
        assert (await far.post("/v1/completions", json=ask("a"))).status_code == 200
        assert await is_gone(here.made, before["id"])
        await here.made.nothing_counted()


async def test_a_supervisor_cut_off_from_redis_decides_nothing() -> None:
    """Cut the models' host off from Redis: streams and leased models go on, what needs a decision waits for
    the mended link and is served; nothing was stopped or loaded twice.
    """
    async with spread() as here, here.client("near") as near:
        stream = Answer(near, "a")
        await stream.began()
        before, old = await ready(here.made, "a"), await leader(here.made)
        here.net.cut("models", "store")

        async def leaderless() -> bool:
            return not await leader(here.made)

        await until(leaderless, "the lead to lapse", BROKEN_S)
        other = asyncio.create_task(near.post("/v1/completions", json=ask("b")))
        await until(lambda: waits(here.made, "b"), "B to wait")
        here.gate.touch()
        await asyncio.wait_for(stream.task, PATIENCE_S)
        assert stream.data.endswith(DONE)
        assert (await here.made.instance("a"))["pid"] == before["pid"]
        here.net.mend("models", "store")
        await next_leader(here.made, old["number"], BROKEN_S)
        assert (await other).status_code == 200
        assert (await loads(here.made, "a"), await loads(here.made, "b")) == (1, 1)
        await here.made.nothing_counted()


async def test_a_short_cut_is_not_noticed() -> None:
    """Cut every link of a gateway for less than its silence is judged: its stream ends whole afterwards."""
    async with spread(SUSPECT_AFTER="20") as here, here.client("far") as far:
        stream = Answer(far, "a")
        await stream.began()
        before = await ready(here.made, "a")
        for other in ("store", "models"):
            here.net.cut("far", other)
        here.gate.touch()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(stream.task), CONNECT_S / 5)
        assert not stream.data.endswith(DONE)
        for other in ("store", "models"):
            here.net.mend("far", other)
        await asyncio.wait_for(stream.task, BROKEN_S)
        assert stream.data.endswith(DONE)
        assert (await ready(here.made, "a"))["pid"] == before["pid"]
        await here.made.nothing_counted()
