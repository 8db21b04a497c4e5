"""Redis slow, silent, cut off, restarted, refusing and failed over, during streams, warm and new requests."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import httpx
import pytest
import pytest_asyncio
from herd import KEYS, Herd, free_port, herd, until
from inside import DONE, QUICK, ask, leader, loads, ready, started, stubbed, waits
from redis.asyncio import Redis
from tcp_proxy import TcpProxy, tcp_proxy
from valkey_server import start_valkey

from llamastead.shared.store.connect import connect

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADMISSION_S = 2.0
CONFIGURABLE = ("--enable-protected-configs", "yes")
BOUND_S = 5 * ADMISSION_S
CLOCKS = QUICK | {"LLAMASTEAD_ADMISSION_TIMEOUT": str(ADMISSION_S), "LLAMASTEAD_LINGER": "0.05"}


@dataclass
class Wired:
    """A supervisor and two gateways whose way to Redis is a proxy; `gate` lets streams and loads go on."""

    made: Herd
    proxy: TcpProxy
    one: httpx.AsyncClient
    two: httpx.AsyncClient
    folder: Path
    valkey: Popen[bytes]
    spare: Popen[bytes]
    ports: tuple[int, int]

    @property
    def gate(self) -> Path:
        """What streams of `a` and loads of `b` wait for."""
        return self.made.models / "gate"

    async def post(self, model: str, gateway: int = 0) -> tuple[httpx.Response, float]:
        """Ask for a short answer; return it and the seconds it took."""
        began = time.monotonic()
        answer = await (self.one, self.two)[gateway].post("/v1/completions", json=ask(model))
        return answer, time.monotonic() - began

    @contextlib.asynccontextmanager
    async def streams(self, count: int) -> AsyncIterator[list[AsyncIterator[bytes]]]:
        """Yield streams of `a` that have begun."""
        async with contextlib.AsyncExitStack() as stack:
            begun = []
            for number in range(count):
                client = (self.one, self.two)[number % 2]
                body = ask("a", stream=True)
                answer = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=body))
                assert answer.status_code == 200, await answer.aread()
                begun.append(answer.aiter_raw())
                await anext(begun[-1])
            yield begun

    async def finish(self, begun: list[AsyncIterator[bytes]]) -> None:
        """Open the gate and read streams to their end: all are whole."""
        self.gate.touch()
        for pieces in begun:
            assert b"".join([piece async for piece in pieces]).endswith(DONE)

    async def again(self) -> None:
        """Heal, and check that everybody is there again and nothing is counted or was loaded twice."""
        self.proxy.heal()
        self.gate.touch()
        for gateway in (0, 1):
            await until(lambda gateway=gateway: self._serves(gateway), "answers again")
        await self.made.nothing_counted()
        await until(self._is_led, "a leader that has opened the herd")
        async with self.made.redis() as redis:

            async def both() -> bool:
                return bool(await redis.zcard(KEYS.gateways) == 2)

            await until(both, "both gateways to be registered")
            names = await redis.zrange(KEYS.instances, 0, -1)
            running = {await redis.hget(KEYS.instance(name), "model") for name in names}
        assert len(running) == len(names)

    async def _is_led(self) -> bool:
        return (await leader(self.made)).get("ready") == "1"

    async def both_wait(self) -> list[asyncio.Task[tuple[httpx.Response, float]]]:
        """Ask for `b` at both gateways; return the requests once both have a ticket."""
        asked = [asyncio.create_task(self.post("b", gateway)) for gateway in (0, 1)]

        async def look() -> bool:
            async with self.made.redis() as redis:
                return bool(await redis.hlen(KEYS.tickets("b")) == 2)

        await until(look, "two tickets for b")
        return asked

    async def _serves(self, gateway: int) -> bool:
        answer, _ = await self.post("a", gateway)
        return answer.status_code == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def life() -> AsyncIterator[Wired]:
    """A herd that lives through all the tests below."""
    async with herd(CLOCKS) as made, contextlib.AsyncExitStack() as stack:
        folder = made.run_dir.parent
        ports = free_port(), free_port()
        servers = []
        for name, port in zip(("one", "two"), ports, strict=True):
            (folder / name).mkdir()
            servers.append(start_valkey(folder / name, "--save", "", "--port", str(port), *CONFIGURABLE))
        proxy = await stack.enter_async_context(tcp_proxy(folder / "one" / "valkey.sock"))
        made.redis_url = f"unix://{folder}/one/valkey.sock"
        made.env["LLAMASTEAD_REDIS_URL"] = proxy.url
        try:
            words = stubbed(made, "a", "b", token_gate=str(made.models / "gate"))
            (made.models / "b.gguf.json").write_text(f'{{"load_gate": "{made.models / "gate"}"}}')
            await made.role("s1", "supervisor", *words)
            await asyncio.gather(made.gateway("g1"), made.gateway("g2"))
            async with made.client(0) as one, made.client(1) as two:
                wired = Wired(made, proxy, one, two, folder, *servers, ports)
                yield wired
                servers = [wired.valkey, wired.spare]
        finally:
            await made.stop()
            for server in servers:
                server.kill()
                server.wait(10)


@pytest_asyncio.fixture(loop_scope="module")
async def wired(life: Wired) -> AsyncIterator[Wired]:
    """The herd with `a` loaded and `b` not, its gate closed."""
    life.gate.touch()
    await life.made.unload("b")
    assert (await life.post("a"))[0].status_code == 200
    await life.made.nothing_counted()
    life.gate.unlink()
    yield life
    await life.again()


@pytest.mark.parametrize("fault", ["slow", "silent", "refusing"])
async def test_c180_streams_and_warm_requests_need_no_redis(wired: Wired, fault: str) -> None:
    """Make Redis slow, silent or unreachable during five streams: they and warm requests go on, a new one
    gets an answer or a 503 with Retry-After within the bound.
    """
    before = await ready(wired.made, "a")
    count = await loads(wired.made, "a")
    async with wired.streams(5) as begun:
        match fault:
            case "slow":
                wired.proxy.delay_s = 2.0
            case "silent":
                wired.proxy.stall()
            case _:
                wired.proxy.refuse()
        new = asyncio.create_task(wired.post("b", 1))
        for gateway in (0, 1):
            began = time.monotonic()
            warm = await (wired.one, wired.two)[gateway].get("/props", params={"model": "a"})
            assert warm.status_code == 200, warm.text
            assert time.monotonic() - began < ADMISSION_S  # it waited for nobody
        if fault == "slow":
            wired.gate.touch()  # it may be admitted, slowly
        answer, took = await asyncio.wait_for(new, 30)
        if fault != "slow" or answer.status_code != 200:
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
            assert took < BOUND_S
        await wired.finish(begun)
    wired.proxy.heal()
    after = await ready(wired.made, "a")
    assert (after["id"], after["pid"], await loads(wired.made, "a")) == (before["id"], before["pid"], count)


async def test_c171_who_waits_is_served_soon_after_the_connections_were_lost(wired: Wired) -> None:
    """Cut all connections while two requests wait, and have the load end before anybody is connected again:
    they are served all the same.
    """
    journal = wired.made.models / "b.gguf.journal"
    earlier = started(wired.made, "b") if journal.exists() else []
    waiting = await wired.both_wait()

    def begun() -> list[int]:
        return started(wired.made, "b")[len(earlier) :]

    (loading,) = await until(begun, "the load to begin")
    wired.proxy.refuse()
    wired.gate.touch()
    await until(lambda: f'"ready", "pid": {loading},' in journal.read_text(), "the load to end")
    wired.proxy.heal()
    for answer, _ in await asyncio.wait_for(asyncio.gather(*waiting), 30):
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("how", ["emptied", "restarted"])
async def test_redis_without_its_data_is_rebuilt_from_what_lives(wired: Wired, how: str) -> None:
    """Lose all data with streams running and requests waiting: the same instance is claimed again, who waits
    is served, and the herd's incarnation is another.
    """
    before, count = await ready(wired.made, "a"), await loads(wired.made, "a")
    async with wired.made.redis() as redis:
        incarnation = await redis.hget(KEYS.herd, "incarnation")
    async with wired.streams(2) as begun:
        waiting = await wired.both_wait()
        if how == "emptied":
            async with wired.made.redis() as redis:
                await redis.flushall()
        else:
            wired.valkey.kill()
            wired.valkey.wait(10)
            wired.valkey = start_valkey(
                wired.folder / "one", "--save", "", "--port", str(wired.ports[0]), *CONFIGURABLE
            )

        async def claimed() -> bool:
            async with wired.made.redis() as redis:
                return int(await redis.hlen(KEYS.leases(before["id"]))) == 2

        await until(claimed, "both gateways' claims")
        wired.gate.touch()
        for answer, _ in await asyncio.wait_for(asyncio.gather(*waiting), 30):
            assert answer.status_code == 200, answer.text
        await wired.finish(begun)
    after = await ready(wired.made, "a")
    assert (after["id"], after["pid"]) == (before["id"], before["pid"])
    assert await loads(wired.made, "a") in (0, count)
    async with wired.made.redis() as redis:
        assert await redis.hget(KEYS.herd, "incarnation") not in (None, incarnation)


@contextlib.asynccontextmanager
async def no_writes(wired: Wired, word: str) -> AsyncIterator[None]:
    """Have Redis refuse writes for a while with OOM, READONLY or MISCONF."""
    async with wired.made.redis() as redis:
        match word:
            case "OOM":
                await redis.config_set("maxmemory", "1")
            case "READONLY":
                await redis.replicaof("127.0.0.1", 1)
            case _:
                gone = wired.folder / "gone"
                gone.mkdir()
                await redis.config_set("dir", str(gone))
                shutil.rmtree(gone)
                await redis.config_set("save", "1 1")
                await redis.bgsave()

                async def failed() -> bool:
                    return (await redis.info("persistence"))["rdb_last_bgsave_status"] == "err"

                await until(failed, "a save to fail")
        try:
            yield
        finally:
            await redis.config_set("maxmemory", "0")
            await redis.replicaof("NO", "ONE")
            await redis.config_set("save", "")
            await redis.config_set("dir", str(wired.folder / "one"))


@pytest.mark.parametrize("word", ["OOM", "READONLY", "MISCONF"])
async def test_c177_writes_refused_are_told_with_the_reason_within_a_bound(wired: Wired, word: str) -> None:
    """Refuse writes during a stream, with one request waiting and one that comes: both get one 503 that names
    the reason; the stream goes on.
    """
    async with wired.streams(1) as begun:
        waiting = asyncio.create_task(wired.post("b"))
        await until(lambda: waits(wired.made, "b"), "a ticket for b")
        async with no_writes(wired, word):
            began = time.monotonic()
            for answer in (await wired.post("b", 1), await waiting):
                assert answer[0].status_code == 503, answer[0].text
                assert word in answer[0].json()["error"]["message"]
                assert "retry-after" in answer[0].headers
            assert time.monotonic() - began < BOUND_S
        await wired.finish(begun)


async def test_c172_a_failover_ends_nothing_but_the_wait(wired: Wired) -> None:
    """Make the replica the master with twenty requests waiting and streams running, the old one read-only:
    each request ends served or with one 503, one supervisor leads, everybody is on the new master.
    """
    one, two = (f"unix://{wired.folder}/{name}/valkey.sock" for name in ("one", "two"))
    async with second(two) as new, second(one) as old:
        await new.replicaof("127.0.0.1", wired.ports[0])

        async def in_step() -> bool:
            return (await new.info("replication")).get("master_link_status") == "up"

        await until(in_step, "the replica")
        async with wired.streams(5) as begun:
            waiting = [asyncio.create_task(wired.post("b", number % 2)) for number in range(20)]
            await until(lambda: waits(wired.made, "b"), "tickets for b")
            await new.replicaof("NO", "ONE")
            await old.replicaof("127.0.0.1", wired.ports[1])
            wired.proxy.lead_to(wired.folder / "two" / "valkey.sock")  # old connections stay where they are
            wired.gate.touch()
            answers = [answer for answer, _ in await asyncio.wait_for(asyncio.gather(*waiting), 60)]
            assert {answer.status_code for answer in answers} <= {200, 503}
            assert 200 in {answer.status_code for answer in answers}
            await wired.finish(begun)
        wired.made.redis_url = two
        try:
            await until(lambda: leader(wired.made), "a leader at the new master")
            await wired.again()
        finally:
            await old.replicaof("NO", "ONE")
            await old.flushall()
            await new.flushall()
            wired.made.redis_url = one
            wired.proxy.lead_to(wired.folder / "one" / "valkey.sock")
            wired.proxy.cut()


@contextlib.asynccontextmanager
async def second(url: str) -> AsyncIterator[Redis]:
    """Yield a client of any of the two servers."""
    client = connect(url)
    try:
        yield client
    finally:
        await client.aclose()
