"""Gateways killed at each point, paused beyond their sweep, and restarted one by one under load."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from fault_stage import Stage, stage, wake
from herd import KEYS, free_port, until
from inside import DONE, ask, is_alive, waits

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKING = ("acquire.before", "acquire.after", "release.before", "release.after")
LEAVING = ("give_back.before", "give_back.after")
ORDERING = ("submit.before", "submit.after")
CLIENTS = 6
DRAIN_WAIT_S = 6.0
FRESH_S = DRAIN_WAIT_S / 2
"""How long the balancer trusts a look; who was ready then accepts for longer than that."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def staged() -> AsyncIterator[Stage]:
    """A herd that lives through all the tests below."""
    async with stage() as made:
        yield made


async def alone(staged: Stage) -> None:
    """Wait until only the first gateway is registered."""

    async def look() -> bool:
        async with staged.made.redis() as redis:
            return int(await redis.zcard(KEYS.gateways)) == 1

    await until(look, "the sweep of all others")


@pytest.mark.parametrize("point", [*ASKING, *LEAVING, *ORDERING])
async def test_c165_a_gateway_killed_at_any_point_leaves_nothing(staged: Stage, point: str) -> None:
    """KILL a gateway around each of its scripts: what it claimed and asked for ends, the other one serves."""
    await staged.made.unload("a")
    doomed = await staged.made.gateway("doomed")
    staged.forget(point)
    staged.orders.order(point)
    async with staged.made.client(len(staged.made.ports) - 1) as client:
        if point in ORDERING:
            call = client.post("/models/load", json={"model": "a"})
        else:
            gate = staged.made.models / "load-gate"
            gate.unlink(missing_ok=True)
            (staged.made.models / "a.gguf.json").write_text(
                json.dumps({"load_gate": str(gate)} if point in LEAVING else {})
            )
            call = client.post("/v1/completions", json=ask("a"))
        asked = asyncio.create_task(call)
        if point in LEAVING:
            await until(lambda: waits(staged.made, "a"), "its ticket")
            asked.cancel()
        pid = await staged.orders.hit(point)
        await asyncio.wait([asked])
        if not asked.cancelled() and point not in ("release.before", "release.after"):
            assert isinstance(asked.exception(), httpx.HTTPError)
    assert pid == doomed.pid
    await until(lambda: not is_alive(pid), "its death")
    (staged.made.models / "a.gguf.json").write_text("{}")
    (staged.made.models / "load-gate").touch()
    await alone(staged)
    assert (await staged.asked("b")).status_code == 200
    await staged.right()


async def test_a_gateway_that_slept_through_its_sweep_ends_its_stream_whole(staged: Stage) -> None:
    """STOP a gateway with a stream until it is swept and its model is to go, then wake it: the stream is
    whole, the other model is served after it.
    """
    slept = await staged.made.gateway("slept")
    gate = staged.made.models / "stream-gate"
    gate.unlink(missing_ok=True)
    await staged.made.unload("a")
    (staged.made.models / "a.gguf.json").write_text(json.dumps({"token_gate": str(gate)}))
    body = ask("a", stream=True)
    async with (
        staged.made.client(len(staged.made.ports) - 1) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        pieces = answer.aiter_raw()
        whole = await anext(pieces)
        os.kill(slept.pid, signal.SIGSTOP)
        try:
            await alone(staged)
            other = asyncio.create_task(staged.asked("b"))

            async def stops() -> bool:
                return [each["state"] for each in (await staged.instances()).values()] == ["stopping"]

            await until(stops, "the model to stop")
        finally:
            wake(slept.pid)
        gate.touch()
        whole += b"".join([piece async for piece in pieces])
        assert whole.endswith(DONE)
        assert (await asyncio.wait_for(other, 30)).status_code == 200
    (staged.made.models / "a.gguf.json").write_text("{}")
    assert await slept.signal(signal.SIGTERM) == 0
    await alone(staged)
    await staged.right()


async def test_a_rolling_restart_under_load_fails_no_request(staged: Stage) -> None:
    """TERM three gateways one by one, each back before the next goes, behind a balancer that heeds /readyz,
    while clients ask: none is refused or cut.
    """
    ports = [free_port() for _ in range(3)]
    for number, port in enumerate(ports):
        await started(staged, number, port)
    balancer = Balancer(ports)
    watching = asyncio.create_task(balancer.watch())
    clients = [asyncio.create_task(balancer.keep_asking(number)) for number in range(CLIENTS)]
    for number, port in enumerate(ports):
        before = len(balancer.answers)
        await until(lambda before=before: len(balancer.answers) > before + 2 * CLIENTS, "load on all of them")
        assert await staged.made.roles[f"roll{number}"].signal(signal.SIGTERM) == 0
        await started(staged, number, port)
    balancer.stop.set()
    await asyncio.gather(*clients, watching)
    assert balancer.failures == []
    for number in range(len(ports)):
        assert await staged.made.roles[f"roll{number}"].signal(signal.SIGTERM) == 0
    await alone(staged)
    await staged.right()


async def started(staged: Stage, number: int, port: int) -> None:
    """Start one of the gateways that are restarted, and wait until it is ready."""
    words = ("gateway", "--port", str(port), "--drain-wait", str(DRAIN_WAIT_S))
    await staged.made.ready(await staged.made.role(f"roll{number}", *words), port)


class Balancer:
    """Sends requests to gateways that say they are ready, one after the other.

    `ready` is when the last look at a gateway began that found it so. An old one is worth nothing: on a busy
    machine the next may take longer than a gateway that leaves goes on accepting.
    """

    def __init__(self, ports: list[int]) -> None:
        self.ready, self.stop = dict.fromkeys(ports, 0.0), asyncio.Event()
        self.answers: list[int] = []
        self.failures: list[object] = []
        self._ports = ports

    async def watch(self) -> None:
        """Ask each gateway for its readiness a few times a second."""
        await asyncio.gather(*map(self._watch, self._ports))

    async def _watch(self, port: int) -> None:
        async with httpx.AsyncClient(timeout=FRESH_S) as client:
            while not self.stop.is_set():
                began = time.monotonic()
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200:
                        self.ready[port] = began
                await asyncio.sleep(0.1)

    def _is_ready(self, port: int) -> bool:
        return time.monotonic() - self.ready[port] < FRESH_S

    async def keep_asking(self, number: int) -> None:
        """Ask until told to stop, for streams and short answers in turn."""
        turn = number
        while not self.stop.is_set():
            turn += 1
            port = self._ports[turn % len(self._ports)]
            body = {**ask("a", tokens=3), "stream": turn % 2 == 0}
            if not self._is_ready(port):
                await asyncio.sleep(0.01)
                continue
            # No certificates: reading them for each client would be most of the load.
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=30.0, verify=False) as client:
                try:
                    answer = await client.post("/v1/completions", json=body)
                except httpx.HTTPError as failure:
                    self.failures.append(failure)
                    continue
            whole = answer.status_code == 200 and (turn % 2 or answer.content.endswith(DONE))
            (self.answers if whole else self.failures).append(answer.status_code)
