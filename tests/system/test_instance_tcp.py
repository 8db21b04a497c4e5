"""Instances that listen on TCP ports, as gateways on other hosts need them: the same promises hold."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
from herd import Herd, herd, until
from inside import (
    DONE,
    QUICK,
    apart,
    ask,
    is_gone,
    kill,
    leader,
    leases,
    loads,
    next_leader,
    ready,
    real,
    served,
    started,
    streaming,
    stubbed,
    waits,
)
from ports import CHANCE
from ports import LOWEST as FREE_PORTS
from tcp_proxy import tcp_proxy

from llamastead.supervisor.engine import find_engine

LOOPBACK = "127.0.0.1"


def by_tcp(ports: range) -> list[str]:
    """Return the arguments that have instances listen on these ports of loopback."""
    return ["--instance-listen", "tcp", "--instance-ports", f"{ports[0]}-{ports[-1]}"]


def free_range(count: int) -> range:
    """Return so many consecutive ports that nobody listens on right now; none of those that `free_port` gives
    out, one of which a gateway takes afterwards.
    """
    while True:
        first = CHANCE.randrange(5_000, FREE_PORTS - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as kept:
            for port in range(first, first + count):
                probe = kept.enter_context(socket.socket())
                probe.bind((LOOPBACK, port))
            return range(first, first + count)


@contextlib.contextmanager
def stranger(port: int) -> Iterator[None]:
    """Listen on a port as another program does."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, port))
        held.listen()
        yield


def robbed_engine(folder: Path) -> Path:
    """Write an engine that is robbed of its port at its first start: somebody listens there just before it.

    The file `robbed` beside it says on which port that was.
    """
    real_engine = find_engine(None, os.environ).path
    path = folder / "robbed-llama-server"
    path.write_text(
        f"""#!{getattr(sys, "_base_executable", sys.executable)} -ES
import os, socket, sys
if "--port" in sys.argv and not os.path.exists({str(folder / "robbed")!r}):
    port = sys.argv[sys.argv.index("--port") + 1]
    thief = socket.socket()
    thief.bind(("{LOOPBACK}", int(port)))
    thief.listen()
    thief.set_inheritable(True)
    with open({str(folder / "robbed")!r}, "w") as mark:
        mark.write(port)
os.execv({str(real_engine)!r}, [{str(real_engine)!r}, *sys.argv[1:]])
"""
    )
    path.chmod(0o755)
    return path


async def port_of(made: Herd, model: str) -> int:
    """Return the port of a ready instance."""
    return int((await ready(made, model))["address"].rpartition(":")[2])


async def test_c60_ports_that_others_hold_are_skipped() -> None:
    """C60: strangers listen inside the range; five models load on the other ports and answer."""
    ports, names = free_range(7), ["a", "b", "c", "d", "e"]
    async with herd(QUICK) as made:
        with stranger(ports[0]), stranger(ports[3]):
            await made.up(*real(made, *names), "--models-max", "5", *by_tcp(ports))
            async with made.client() as client:
                await asyncio.gather(*(served(client, name) for name in names))
            used = sorted([await port_of(made, name) for name in names])
            assert used == [ports[1], ports[2], ports[4], ports[5], ports[6]]
        assert not list(made.run_dir.glob("i/*/e.sock"))


async def test_c61_ports_come_back_however_an_instance_ends() -> None:
    """C61: with three ports an instance crashes and loads nine times, with a new supervisor in between."""
    async with herd(QUICK) as made:
        await made.up(*stubbed(made, "a"), *by_tcp(free_range(3)))
        used = set()
        async with made.client() as client:
            for turn in range(9):
                await served(client, "a")
                found = await ready(made, "a")
                used.add(found["address"])
                if turn == 4:
                    old = await until(lambda: leader(made), "a leader")
                    kill(int(old["pid"]))
                    await next_leader(made, old["number"])
                kill(int(found["pid"]))
                await until(partial(is_gone, made, found["id"]), "the crash to be noticed")
        assert len(started(made, "a")) == 9
        assert len(used) == 3


async def test_no_port_left_is_an_error_that_says_what_to_do() -> None:
    """Ask for a model when strangers hold the whole range: one clear error at once, nothing is counted."""
    ports = free_range(2)
    async with herd(QUICK) as made:
        await made.up(*real(made, "a"), *by_tcp(ports))
        with stranger(ports[0]), stranger(ports[1]):
            async with made.client() as client:
                answer = await client.post("/v1/completions", json=ask("a"))
        assert answer.status_code == 500
        assert "--instance-ports" in answer.json()["error"]["message"]
        await made.nothing_counted()


async def test_r16_a_port_taken_before_the_instance_binds_it_is_left_for_another() -> None:
    """R16: somebody listens on the chosen port when the engine wants to bind it: the start is tried again on
    the next port, and nothing is called ready before.
    """
    ports = free_range(2)
    async with herd(QUICK) as made:
        engine = robbed_engine(made.run_dir.parent)
        await made.up(*real(made, "a"), "--engine", str(engine), *by_tcp(ports))
        async with made.client() as client:
            await served(client, "a")
        assert int((made.run_dir.parent / "robbed").read_text()) == ports[0]
        assert await port_of(made, "a") == ports[1]
        assert "couldn't bind" in (made.run_dir / "logs" / "a.log").read_text()
        assert await loads(made, "a") == 1


async def test_a_stream_over_tcp_is_not_cut_by_a_swap() -> None:
    """Ask for B while A streams, one place: A ends whole, then B is served; the stop asked A over TCP."""
    async with herd(QUICK) as made:
        await made.up(*real(made, "a", "b"), "--models-max", "1", "--max-wait", "0", *by_tcp(free_range(4)))
        async with made.client() as client:
            async with streaming(made, "a") as stream:
                first = await ready(made, "a")
                waiting = asyncio.create_task(served(client, "b"))
                await until(lambda: waits(made, "b"), "B to wait")
                assert not waiting.done()
                assert (await stream.rest()).endswith(DONE)
            await waiting
        assert await is_gone(made, first["id"])
        await made.nothing_counted()


async def test_an_instance_on_tcp_wants_its_own_key() -> None:
    """Talk to the instance past the gateway: 401 without a key and with that of the instance beside it, an
    answer with its own.
    """
    async with herd(QUICK) as made:
        await made.up(*real(made, "a", "b"), "--models-max", "2", *by_tcp(free_range(3)))
        async with made.client() as client:
            for model in ("a", "b"):
                await served(client, model)
        port = await port_of(made, "a")
        async with await made.direct("a") as direct, await made.direct("b") as other:
            for headers in ({}, {"Authorization": other.headers["authorization"]}):
                async with httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{port}", headers=headers) as stray:
                    assert (await stray.post("/v1/completions", json=ask("a"))).status_code == 401
            assert (await direct.post("/v1/completions", json=ask("a"))).status_code == 200


async def test_a_killed_supervisor_is_not_noticed_over_tcp() -> None:
    """KILL the supervisor mid-stream: it ends whole, the next one adopts the instance with its port."""
    async with herd(QUICK) as made:
        await made.up(*real(made, "a"), *by_tcp(free_range(2)))
        async with streaming(made, "a") as stream:
            before, old = await ready(made, "a"), await leader(made)
            kill(int(old["pid"]))
            await next_leader(made, old["number"])
            assert await leases(made, before["id"])
            assert (await stream.rest()).endswith(DONE)
        after = await ready(made, "a")
        assert (after["pid"], after["address"]) == (before["pid"], before["address"])
        assert await loads(made, "a") == 1


async def test_a_hung_instance_on_tcp_is_found() -> None:
    """Stop the engine's process: its probes go unanswered, and who asks is served by a new one."""
    async with herd(QUICK) as made:
        await made.up(*real(made, "a"), "--stop-timeout", "1", *by_tcp(free_range(3)))
        async with made.client() as client:
            await served(client, "a")
            before = await ready(made, "a")
            os.kill(int(before["pid"]), signal.SIGSTOP)
            await until(lambda: is_gone(made, before["id"]), "the hung one to go")
            await served(client, "a")
        assert (await ready(made, "a"))["id"] != before["id"]


async def test_r16_who_finds_another_instance_at_a_port_asks_anew() -> None:
    """Stall one gateway's way to Redis, so that it keeps its lease on A; KILL A, and let B get the only port.
    Who asks A there is refused by B, and is served by A, loaded anew, as soon as Redis is back.
    """
    async with apart(QUICK | {"LLAMASTEAD_LINGER": "600", "LLAMASTEAD_ADMISSION_TIMEOUT": "60"}) as made:
        words = (*stubbed(made, "a", "b"), "--models-max", "1", *by_tcp(free_range(1)))
        await made.role("s1", "supervisor", *words)
        await made.gateway("near")
        async with tcp_proxy(made.run_dir.parent / "valkey.sock") as way:
            made.env["LLAMASTEAD_REDIS_URL"] = way.url
            await made.gateway("far")
            async with made.client(0) as near, made.client(1) as far:
                await served(far, "a")
                first = await ready(made, "a")
                way.stall()
                kill(int(first["pid"]))
                await until(partial(is_gone, made, first["id"]), "the crash to be noticed")
                await served(near, "b")
                assert (await ready(made, "b"))["address"] == first["address"]
                asked = asyncio.create_task(served(far, "a"))

                async def waiting() -> bool:
                    return bool((await far.get("/readyz")).json()["waiting"] == 1)

                await until(waiting, "the request to wait for another instance")
                way.heal()
                assert (await asked).headers["x-llamastead-instance"] != first["id"]
        assert len(started(made, "a")) == 2
