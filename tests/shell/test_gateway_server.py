"""A gateway as a process: how it begins, how it leaves, and several of them on one port."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from gateway_kit import ScriptedLeader, until
from redis.asyncio import Redis

from llamastead.shared.ports import listen
from llamastead.shared.secret import read_or_make_herd_secret
from llamastead.shared.store.keys import Keys
from llamastead.up.processes import descendants_of

NONCE = "0" * 32


class TalkingInstance:
    """An instance that begins a stream and says no more until it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finish = asyncio.Event()
        self._talking: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["TalkingInstance"]:
        """Serve; at the end every connection is finished and closed."""
        server = await asyncio.start_unix_server(self._on_connection, self.path, backlog=1024)
        async with server:
            try:
                yield self
            finally:
                self.finish.set()
                await asyncio.gather(*self._talking, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._talking.add(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"b\r\ndata: one\n\n\r\n")
        await self.finish.wait()
        writer.write(b"b\r\ndata: two\n\n\r\n0\r\n\r\n")
        writer.close()
        await writer.wait_closed()


@dataclass
class GatewayProcess:
    """`llamastead gateway` on a port of its own."""

    process: asyncio.subprocess.Process
    port: int
    log: Path

    def client(self) -> httpx.AsyncClient:
        """Return a client that keeps no connection, so that each request meets the listening socket."""
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", limits=limits, timeout=20)

    async def ready(self) -> str:
        """Return the id of the gateway that answers, once one is ready."""
        async with self.client() as client:

            async def look() -> str:
                try:
                    answer = await client.get("/readyz")
                except httpx.TransportError:
                    return ""
                return str(answer.json()["gateway"]) if answer.status_code == 200 else ""

            return str(await until(look, "the gateway to be ready"))


@pytest.fixture
def env(redis_url: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings of the processes, through their environment; returns the run folder."""
    read_or_make_herd_secret(short_tmp / "secret")
    monkeypatch.setenv("LLAMASTEAD_RUN_DIR", str(short_tmp))
    monkeypatch.setenv("LLAMASTEAD_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMASTEAD_STOP_TIMEOUT", "10")
    return short_tmp


@pytest.fixture
async def leader(redis: Redis, keys: Keys) -> ScriptedLeader:
    leader = ScriptedLeader(redis, keys)
    await leader.open("a")
    return leader


@asynccontextmanager
async def gateway_process(
    folder: Path, *flags: str, files: int | None = None
) -> AsyncIterator[GatewayProcess]:
    """Run a gateway; `files`: how many it may have open."""
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    log = folder / "gateway.log"
    with log.open("ab") as out:
        words = [sys.executable, "-m", "llamastead", "gateway", "--port", str(port), *flags]
        if files is not None:
            words = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *words]
        process = await asyncio.create_subprocess_exec(*words, stdout=out, stderr=out)
    try:
        yield GatewayProcess(process, port, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def load(leader: ScriptedLeader, instance: TalkingInstance) -> None:
    fields = {"state": "loading", "address": f"unix:{instance.path}", "nonce": NONCE}
    await leader.store.put_instance("h-1-1", fields, "a", {})
    await leader.store.ready("h-1-1", "a", {})


async def refuses(port: int) -> bool:
    """Return whether nothing listens on the port."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def test_c133_leaving_ends_event_streams_finishes_answers_and_says_goodbye(
    env: Path, leader: ScriptedLeader
) -> None:
    """TERM with an answer and an event stream open: nobody new, the stream ends, the answer is whole."""
    instance = TalkingInstance(env / "e.sock")
    async with instance.listening(), gateway_process(env) as gateway, gateway.client() as client:
        await gateway.ready()
        await load(leader, instance)
        body = {"model": "a", "stream": True}
        async with (
            client.stream("POST", "/v1/completions", json=body) as answer,
            client.stream("GET", "/models/sse") as events,
        ):
            parts = answer.aiter_bytes()
            assert await anext(parts) == b"data: one\n\n"
            gateway.process.send_signal(signal.SIGTERM)
            assert [chunk async for chunk in events.aiter_bytes()] == []
            await until(lambda: refuses(gateway.port), "the port to be closed")
            assert await leader.leases("h-1-1") != {}
            instance.finish.set()
            assert [part async for part in parts] == [b"data: two\n\n"]
        assert await asyncio.wait_for(gateway.process.wait(), 10) == 0
        assert await leader.leases("h-1-1") == {}
        assert await leader.redis.zrange(leader.keys.gateways, 0, -1) == []


async def test_c133_what_does_not_end_is_cut_at_the_deadline(
    env: Path, leader: ScriptedLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TERM with an endless answer: an error event, a cut after the stop-timeout, and an exit status."""
    monkeypatch.setenv("LLAMASTEAD_STOP_TIMEOUT", "1")
    instance = TalkingInstance(env / "e.sock")
    async with instance.listening(), gateway_process(env) as gateway, gateway.client() as client:
        await gateway.ready()
        await load(leader, instance)
        async with client.stream("POST", "/v1/completions", json={"model": "a"}) as answer:
            parts = answer.aiter_bytes()
            await anext(parts)
            gateway.process.send_signal(signal.SIGTERM)
            last = [await anext(parts)]
            with pytest.raises(httpx.TransportError):
                await anext(parts)
            assert json.loads(last[-1].removeprefix(b"data: "))["error"]["code"] == 503
        assert await asyncio.wait_for(gateway.process.wait(), 10) == 1
        assert await leader.leases("h-1-1") == {}


async def test_c133_who_waits_at_the_deadline_is_told_to_come_again(
    env: Path, leader: ScriptedLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TERM with a request in the queue whose model never loads: 503 with Retry-After, not a bare 500."""
    monkeypatch.setenv("LLAMASTEAD_STOP_TIMEOUT", "1")
    async with gateway_process(env) as gateway, gateway.client() as client:
        await gateway.ready()
        waiting = asyncio.ensure_future(client.post("/v1/completions", json={"model": "a"}))
        await until(lambda: leader.redis.exists(leader.keys.tickets("a")), "the request to wait")
        gateway.process.send_signal(signal.SIGTERM)
        answer = await waiting
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "the gateway is shutting down"
        assert answer.headers["x-request-id"]
        assert await gateway.process.wait() == 1


async def test_a_second_signal_cuts_at_once(env: Path, leader: ScriptedLeader) -> None:
    """TERM twice with a long stop-timeout: the open answer is cut long before it."""
    instance = TalkingInstance(env / "e.sock")
    async with instance.listening(), gateway_process(env) as gateway, gateway.client() as client:
        await gateway.ready()
        await load(leader, instance)
        async with client.stream("POST", "/v1/completions", json={"model": "a"}) as answer:
            parts = answer.aiter_bytes()
            await anext(parts)
            gateway.process.send_signal(signal.SIGTERM)
            await until(lambda: refuses(gateway.port), "the port to be closed")
            gateway.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(gateway.process.wait(), 5) == 1


async def test_c163_more_clients_than_files_get_503_and_crash_nothing(
    env: Path, leader: ScriptedLeader
) -> None:
    """A gateway with 128 open files and 60 endless answers asked for: 503 for the excess, all well after."""
    instance = TalkingInstance(env / "e.sock")
    async with instance.listening(), gateway_process(env, files=128) as gateway, gateway.client() as client:
        await gateway.ready()
        await load(leader, instance)
        assert "few open files" in gateway.log.read_text()
        asked = [client.post("/v1/completions", json={"model": "a"}) for _ in range(60)]
        answers = [asyncio.ensure_future(one) for one in asked]

        async def excess() -> bool:
            return sum(answer.done() for answer in answers) >= 60 - (128 - 64) // 2

        await until(excess, "the excess to be refused")
        assert {answer.result().status_code for answer in answers if answer.done()} == {503}
        instance.finish.set()
        codes = [(await answer).status_code for answer in answers]
        assert set(codes) == {200, 503}
        assert await gateway.ready()


async def begin_stream(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream on a connection of its own and read its first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"model":"a","stream":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    assert b"data: one\n\n" in await reader.readuntil(b"data: one\n\n")
    return reader, writer


def resident_bytes(gateway: GatewayProcess) -> int:
    """Return the resident memory of all workers of a gateway."""
    workers = descendants_of(gateway.process.pid, set())
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in workers]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


async def test_c163_many_streams_starve_no_probe_and_cost_little_memory(
    env: Path, leader: ScriptedLeader
) -> None:
    """1 500 silent streams over two workers: health within a second, under 32 KiB each, and all end whole."""
    instance = TalkingInstance(env / "e.sock")
    async with (
        instance.listening(),
        gateway_process(env, "--workers", "2") as gateway,
        gateway.client() as client,
    ):
        await gateway.ready()
        await load(leader, instance)
        streams = [await begin_stream(gateway.port)]
        before = resident_bytes(gateway)
        while len(streams) < 1_500:
            streams += await asyncio.gather(*(begin_stream(gateway.port) for _ in range(50)))
        assert (resident_bytes(gateway) - before) / len(streams) < 32 * 1024
        for _ in range(10):
            async with asyncio.timeout(1):
                assert (await client.get("/healthz")).status_code == 200
        instance.finish.set()
        ends = await asyncio.gather(*(reader.read(-1) for reader, _ in streams))
        assert all(end.endswith(b"data: two\n\n\r\n0\r\n\r\n") for end in ends)
        for _, writer in streams:
            writer.close()


async def test_c111_a_hangup_ends_no_gateway(env: Path, leader: ScriptedLeader) -> None:
    """Send HUP ten times to a gateway with two workers and to each worker: all answer on."""
    async with gateway_process(env, "--workers", "2") as gateway:
        await gateway.ready()
        for _ in range(10):
            gateway.process.send_signal(signal.SIGHUP)
        assert await gateway.ready()
        assert gateway.process.returncode is None


async def test_workers_share_the_port_and_a_dead_one_comes_back(env: Path, leader: ScriptedLeader) -> None:
    """Run two workers, kill one, then stop: two gateways, two again with another id, none."""
    async with gateway_process(env, "--workers", "2") as gateway:

        async def two() -> set[str]:
            found = set(await leader.redis.zrange(leader.keys.gateways, 0, -1))
            return found if len(found) == 2 else set()

        before = await until(two, "two gateways")
        killed = min(before)
        host, _, pid = killed.rpartition("-")[0].rpartition("-")
        assert host
        signal_process(int(pid))

        async def another() -> bool:
            return bool(set(await leader.redis.zrange(leader.keys.gateways, 0, -1)) - before)

        await until(another, "a new worker")
        assert await gateway.ready()
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateway.process.wait(), 10) == 0
        assert await leader.redis.zrange(leader.keys.gateways, 0, -1) == [killed]


def signal_process(pid: int) -> None:
    """Kill one worker, hard."""

    os.kill(pid, signal.SIGKILL)


async def test_a_taken_port_is_one_clear_line(env: Path) -> None:
    """Begin on a port that this process holds: status 2 and one line that names the pid."""
    with listen("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "llamastead", "gateway", "--port", str(port)),
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
    lines = said.decode().splitlines()
    assert process.returncode == os.EX_CONFIG
    assert len(lines) == 1

    assert f"port {port} on 127.0.0.1 is taken by pid {os.getpid()}" in lines[0]


async def test_a_wanted_upgrade_is_left_out_without_a_word(env: Path, leader: ScriptedLeader) -> None:
    """Ask for WebSocket and for HTTP/2: answered as if nothing had been asked, and nothing is logged."""
    async with gateway_process(env) as gateway:
        await gateway.ready()
        for wanted in ("websocket", "h2c"):
            async with gateway.client() as client:
                headers = {"Connection": "Upgrade", "Upgrade": wanted}
                assert (await client.get("/healthz", headers=headers)).status_code == 200
        assert "pgrade" not in gateway.log.read_text()


async def test_a_gateway_on_a_unix_socket(env: Path, leader: ScriptedLeader) -> None:
    """Listen on a socket file that a dead process left behind: it is replaced and answers."""
    path = env / "gw.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with gateway_process(env, "--host", str(path)):
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def look() -> bool:
                try:
                    return (await client.get("/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(look, "the gateway to be ready")
