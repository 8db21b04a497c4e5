"""A gateway as a process: how it begins, what many clients do to it, and several of them on one port."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
from gateway_kit import ScriptedLeader, until
from gateway_processes import (
    GatewayProcess,
    TalkingInstance,
    gateway_process,
    load,
    two_gateways,
)
from ports import free_port
from waiting import PATIENCE_S

from llamastead.gateway.server import reaches_others
from llamastead.shared.ports import listen
from llamastead.up.processes import descendants_of


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
        others = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range((128 - 64) // 2)]
        # Whoever watches it sees that it lives; a restart would cut those who are served.
        for path, status in (("/healthz", 200), ("/readyz", 200), ("/models", 503)):
            assert (await client.get(path)).status_code == status, path
        for _, writer in others:
            writer.close()
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
        await two_gateways(leader)
        await load(leader, instance)
        streams = [await begin_stream(gateway.port)]
        before = resident_bytes(gateway)
        while len(streams) < 1_500:
            streams += await asyncio.gather(*(begin_stream(gateway.port) for _ in range(50)))
        assert (resident_bytes(gateway) - before) / len(streams) < 32 * 1024
        quick = 0

        async def probed() -> bool:
            # Each within a second, ten in a row: a machine that stops all of us has us begin anew.
            nonlocal quick
            began = asyncio.get_running_loop().time()
            assert (await client.get("/healthz")).status_code == 200
            quick = quick + 1 if asyncio.get_running_loop().time() - began < 1 else 0
            return quick == 10

        await until(probed, "ten quick answers in a row")
        instance.finish.set()
        ends = await asyncio.gather(*(reader.read(-1) for reader, _ in streams))
        assert all(end.endswith(b"data: two\n\n\r\n0\r\n\r\n") for end in ends)
        for _, writer in streams:
            writer.close()


async def test_c111_a_hangup_ends_no_gateway(env: Path, leader: ScriptedLeader) -> None:
    """Send HUP ten times to a gateway with two workers and to each worker: all answer on."""
    async with gateway_process(env, "--workers", "2") as gateway:
        before = await two_gateways(leader)
        pids = {gateway.process.pid, *descendants_of(gateway.process.pid, set())}
        assert len(pids) == 3
        for _ in range(10):
            for pid in pids:
                os.kill(pid, signal.SIGHUP)
        async with gateway.client() as client:
            for _ in range(20):
                assert (await client.get("/healthz")).status_code == 200
        assert {gateway.process.pid, *descendants_of(gateway.process.pid, set())} == pids
        assert await two_gateways(leader) == before


async def test_workers_share_the_port_and_a_dead_one_comes_back(env: Path, leader: ScriptedLeader) -> None:
    """Run two workers, kill one, then stop: two gateways, two again with another id, none."""
    async with gateway_process(env, "--workers", "2") as gateway:
        before = await two_gateways(leader)
        killed = min(before)
        host, _, pid = killed.rpartition("-")[0].rpartition("-")
        assert host
        signal_process(int(pid))

        async def another() -> bool:
            # It is known to Redis a moment before it heeds signals, which it says right after.
            new = set(await leader.redis.zrange(leader.keys.gateways, 0, -1)) - before
            lines = gateway.log.read_text().splitlines()
            return bool(new) and any("gateway listens" in line and min(new) in line for line in lines)

        await until(another, "a new worker")
        assert await gateway.ready()
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateway.process.wait(), PATIENCE_S) == 0
        assert await leader.redis.zrange(leader.keys.gateways, 0, -1) == [killed]


@pytest.mark.parametrize("flags", [(), ("--workers", "2")])
async def test_a_redis_address_that_is_none_ends_it(
    env: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """Give an address that can't be one: one process and several end at once, with the status of a wrong
    setting and a line that names it.
    """
    monkeypatch.setenv("LLAMASTEAD_REDIS_URL", "nowhere://")
    async with gateway_process(env, *flags) as gateway:
        assert await asyncio.wait_for(gateway.process.wait(), PATIENCE_S) == os.EX_CONFIG
        assert "nowhere: is no Redis address" in gateway.log.read_text()


async def test_a_worker_that_fails_leaves_a_trace(env: Path) -> None:
    """Have a worker fail for a reason that nobody foresaw: the log has the trace, and it begins again."""
    code = (
        "import sys; from llamastead.gateway import main; from llamastead.shared.settings import Settings;"
        "main._serve = lambda *_: 1 // 0; sys.exit(main.run(Settings(port=0), 2))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    said = b""
    async with asyncio.timeout(PATIENCE_S):
        while b"ZeroDivisionError" not in said or b"is started again" not in said:
            said += await process.stderr.read(65536)
        process.terminate()
        await process.communicate()


def signal_process(pid: int) -> None:
    """Kill one worker, hard."""

    os.kill(pid, signal.SIGKILL)


def timer_of(local: int, remote: int) -> str:
    """Return which timer of a connection between these ports runs, as /proc/net/tcp has it."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, ours, theirs, _, _, timer, *_ = line.split()
        if [int(end.rpartition(":")[2], 16) for end in (ours, theirs)] == [local, remote]:
            return timer.partition(":")[0]
    return ""


async def test_a_client_that_says_nothing_is_asked_whether_it_is_there(
    env: Path, leader: ScriptedLeader
) -> None:
    """Connect and say nothing: TCP's own timer runs, by which one that is gone without a word is found."""
    async with gateway_process(env) as gateway:
        await gateway.ready()
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        own = writer.get_extra_info("sockname")[1]
        await until(lambda: timer_of(gateway.port, own) == "02", "the keep-alive timer")
        writer.close()


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


@pytest.mark.parametrize(
    ("name", "others"),
    [
        (("127.0.0.1", 80), False),
        (("::1", 80, 0, 0), False),
        ("/run/gw.sock", False),
        (("0.0.0.0", 80), True),
        (("::", 80, 0, 0), True),
        (("fe80::1%eth0", 80, 0, 2), True),
    ],
)
def test_which_addresses_want_a_key(name: object, others: bool) -> None:
    """Judge names of sockets: only TCP beyond loopback is for other machines."""
    assert reaches_others(name) is others


async def test_a_gateway_on_several_addresses(env: Path, leader: ScriptedLeader) -> None:
    """Name two addresses and a socket file by commas, with two processes: each of them is answered on."""
    path = env / "gw.sock"
    flags = ("--host", f"127.0.0.1, {path},127.0.0.2", "--workers", "2")
    async with gateway_process(env, *flags) as made:
        await made.ready()
        places = ((f"http://127.0.0.{last}:{made.port}", None) for last in (1, 2))
        for url, uds in (*places, ("http://gateway", str(path))):
            transport = httpx.AsyncHTTPTransport(uds=uds)
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                assert (await client.get("/healthz")).status_code == 200
        made.process.terminate()
        assert await made.process.wait() == 0


async def test_one_address_of_several_that_is_taken_is_named(env: Path, leader: ScriptedLeader) -> None:
    """Take the second address: one line names it and its holder, and the first one is free again."""
    port = free_port()  # which nobody gets by chance on the first address
    with socket.create_server(("127.0.0.2", port)):
        async with gateway_process(env, "--host", "127.0.0.1,127.0.0.2", port=port) as made:
            assert await made.process.wait() == 78
            assert f"port {port} on 127.0.0.2 is taken by" in made.log.read_text()
        listen("127.0.0.1", port).close()


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
