"""What happens to answers when a process of the herd dies: real processes, mostly the real engine."""

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from herd import KEYS, Herd, herd, instance_pids, processes_naming, until
from inside import (
    DONE,
    QUICK,
    Stream,
    apart,
    ask,
    is_alive,
    is_gone,
    kill,
    leader,
    leases,
    loads,
    next_leader,
    programs_of,
    ready,
    real,
    served,
    sockets_below,
    stale_socket,
    started,
    streaming,
    stubbed,
    waits,
)

from llamastead.shared.addresses import UnixAddress
from llamastead.supervisor.health import refuses
from llamastead.supervisor.holder_record import Record, read_record


async def test_r17_supervisor_killed_during_a_stream_is_not_noticed() -> None:
    """KILL the supervisor mid-stream: the stream ends whole, the next adopts the same pid without a load."""
    async with herd(QUICK) as made:
        await made.up(*real(made, "a"))
        async with streaming(made, "a") as stream:
            before, old = await ready(made, "a"), await leader(made)
            kill(int(old["pid"]))
            new = await next_leader(made, old["number"])
            assert new["pid"] != old["pid"]
            assert await leases(made, before["id"])  # the stream is still running
            assert (await stream.rest()).endswith(DONE)
        after = await ready(made, "a")
        assert (after["id"], after["pid"], await loads(made, "a")) == (before["id"], before["pid"], 1)
        assert instance_pids(made.run_dir) == [int(before["pid"])]
        async with made.client() as client:
            assert (await served(client, "a")).headers["x-llamastead-instance"] == before["id"]
        # The holder read the pipes all the time: what the engine said meanwhile comes into its log.
        log = made.run_dir / "logs" / "a.log"
        await until(lambda: "stop processing" in log.read_text(), "what the engine said")
        await made.nothing_counted()


async def test_c43_three_models_and_two_streams_outlive_their_supervisor() -> None:
    """KILL the supervisor with three models loaded, two of them streaming: gateways answer, both streams end
    whole, the next one finds the same three processes, and holds each of them once.
    """
    async with herd(QUICK) as made:
        await made.up(*real(made, "a", "b", "c"))
        async with made.client() as client, streaming(made, "a") as one, streaming(made, "b") as two:
            await served(client, "c")
            before, old = {name: await ready(made, name) for name in "abc"}, await leader(made)
            kill(int(old["pid"]))
            assert (await client.get("/models")).status_code == 200
            await served(client, "c")
            await next_leader(made, old["number"])
            for stream in (one, two):
                assert (await stream.rest()).endswith(DONE)
            after = {name: await ready(made, name) for name in "abc"}
            assert {n: f["pid"] for n, f in after.items()} == {n: f["pid"] for n, f in before.items()}
            assert sorted(instance_pids(made.run_dir)) == sorted(int(f["pid"]) for f in before.values())

            async def held() -> bool:
                props = (await client.get("/props")).json()["llamastead"]
                return sorted(props["devices"]["host"]["held"]) == ["a", "b", "c"]

            await until(held, "the device's account to name all three")
        assert [await loads(made, name) for name in "abc"] == [1, 1, 1]
        await made.nothing_counted()


async def test_supervisor_killed_during_a_load_leaves_it_going() -> None:
    """KILL the supervisor while a request waits for a load: the same load serves it under the next one."""
    async with herd(QUICK) as made:
        gate = made.models / "gate"
        await made.up(*stubbed(made, "a", load_gate=str(gate)))
        async with made.client() as client:
            waiting = asyncio.create_task(client.post("/v1/completions", json=ask("a")))

            async def loading() -> bool:
                return (await made.instance("a")).get("state") == "loading"

            await until(loading, "the load to begin")
            before, old = await made.instance("a"), await leader(made)
            kill(int(old["pid"]))
            await next_leader(made, old["number"])
            assert not waiting.done()
            gate.touch()
            assert (await waiting).status_code == 200
        after = await ready(made, "a")
        assert (after["id"], await loads(made, "a")) == (before["id"], 1)
        assert started(made, "a") == [int(after["pid"])]
        await made.nothing_counted()


async def test_decisions_without_a_word_are_carried_out() -> None:
    """A leader dies between script and word: the next one stops what was to stop, starts what was to start.

    The two records are written as `stop` and `put_instance` leave them, since nothing can be killed between a
    reply of Redis and the next instruction.
    """
    async with apart() as made:
        arguments = stubbed(made, "a", "b")
        supervisor = await made.role("s1", "supervisor", *arguments)
        await made.gateway("g1")
        async with made.client() as client, made.redis() as redis:
            await served(client, "a")
            before = await ready(made, "a")
            await made.nothing_counted()
            await supervisor.signal(signal.SIGKILL)
            stopping = {"state": "stopping", "end_class": "evicted"}
            await redis.hset(KEYS.instance(before["id"]), mapping=stopping)
            half = {"model": "b", "state": "starting", "nonce": "0" * 32, "address": "unix:/nowhere"}
            half |= {name: before[name] for name in ("host", "started_ms", "revision")}
            await redis.hset(KEYS.instance("half"), mapping=half)
            await redis.zadd(KEYS.instances, {"half": 1})
            await redis.hset(KEYS.model("b"), mapping={"instance": "half", "state": "starting"})
            waiting = asyncio.create_task(client.post("/v1/completions", json=ask("b")))
            await until(lambda: waits(made, "b"), "the ticket for b")
            await made.role("s2", "supervisor", *arguments)
            assert (await waiting).status_code == 200
            await until(lambda: is_gone(made, before["id"]), "the end of a's record")
            assert not is_alive(int(before["pid"]))
            assert await redis.hget(KEYS.model("a"), "end_class") == "evicted"
            assert await redis.zrange(KEYS.instances, 0, -1) == [(await ready(made, "b"))["id"]]
            await served(client, "a")


async def test_c52_kill_of_all_but_the_holders_leaves_no_engine() -> None:
    """KILL `up` and all roles at once, a stream running: after the orphan grace nothing of it is left."""
    async with herd(QUICK | {"LLAMASTEAD_ORPHAN_GRACE": "1"}) as made:
        up = await made.up(*real(made, "a", "b"))
        async with made.client() as client:
            await served(client, "b")
        async with streaming(made, "a") as stream:
            await ready(made, "a")
            assert len(instance_pids(made.run_dir)) == 2
            roles = [pid for pid, line in programs_of(up.pid).items() if " -m llamastead " in line]
            kill(up.pid)
            for pid in roles:
                with contextlib.suppress(ProcessLookupError):  # a job's, which was over
                    kill(pid)
            with pytest.raises(httpx.HTTPError):
                await stream.rest()
        await until(lambda: not processes_naming(made.run_dir), "all processes to end")
        assert list((made.run_dir / "i").iterdir()) == []


async def test_c165_gateway_killed_with_running_and_waiting_requests() -> None:
    """KILL one of two gateways with ten requests running and twenty waiting: what it held and waited for ends
    in two passes, its model makes room; the other gateway's stream goes on.
    """
    async with apart() as made, contextlib.AsyncExitStack() as stack:
        gate = made.models / "gate"
        words = stubbed(made, "a", "b", "c", token_gate=str(gate))
        (made.models / "c.gguf.json").write_text("{}")
        await made.role("s1", "supervisor", *words, "--parallel", "10", "--models-max", "2")
        await made.gateway("g1")
        doomed = await made.gateway("g2")
        one, two = [await stack.enter_async_context(made.client(number)) for number in (0, 1)]
        redis = await stack.enter_async_context(made.redis())
        stays = await begun(stack, one, "a")
        dying = [await begun(stack, two, "b") for _ in range(10)]
        a, b = await ready(made, "a"), await ready(made, "b")
        (doomed_id,) = await leases(made, b["id"])
        lost = [asyncio.create_task(two.post("/v1/completions", json=ask("c"))) for _ in range(20)]

        async def enrolled() -> bool:
            return int(await redis.hlen(KEYS.tickets("c"))) == 20

        await until(enrolled, "twenty tickets for c")
        about = (await two.get("/readyz")).json()
        assert (about["in_flight"], about["waiting"]) == (10, 20)
        await doomed.signal(signal.SIGKILL)
        for cut in (*lost, *(stream.rest() for stream in dying)):
            with pytest.raises(httpx.HTTPError):
                await cut

        async def swept() -> bool:
            return await redis.zscore(KEYS.gateways, doomed_id) is None

        await until(swept, "the sweep")
        assert not await leases(made, b["id"])
        assert not await waits(made, "c")
        assert "gateway is silent" in made.roles["s1"].output()
        assert list(await leases(made, a["id"])) != [doomed_id]
        await served(one, "c")  # in b's room, while the stream of a runs
        gate.touch()
        assert (await stays.rest()).endswith(DONE)
        assert (await ready(made, "a"))["id"] == a["id"]
        await made.nothing_counted()


async def begun(stack: contextlib.AsyncExitStack, client: httpx.AsyncClient, model: str) -> Stream:
    """Return a stream that has begun, and is closed with the stack."""
    body = ask(model, stream=True)
    answer = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=body))
    assert answer.status_code == 200, await answer.aread()
    stream = Stream(answer)
    await stream.first()
    return stream


async def test_holder_killed_takes_its_engine_along() -> None:
    """KILL a holder: its engine ends, the record goes, and the next request loads the model again."""
    async with herd(QUICK) as made:
        await made.up(*real(made, "a"))
        async with made.client() as client:
            await served(client, "a")
            before = await ready(made, "a")
            folder = made.run_dir / "i" / before["id"]
            record = read_record(folder)
            assert record is not None
            kill(record.holder_pid)
            await until(lambda: is_gone(made, before["id"]), "the end of its record")
            assert not is_alive(record.engine_pid)
            assert not folder.exists()
            await served(client, "a")
            assert (await ready(made, "a"))["pid"] != before["pid"]
            assert await loads(made, "a") == 2


async def test_holder_told_to_stop_from_outside_finishes_while_others_wait() -> None:
    """TERM the holder of a busy engine: the stream ends whole, who comes meanwhile gets a fresh load."""
    async with herd(QUICK) as made:
        await made.up(*real(made, "a"))
        async with made.client() as client:
            async with streaming(made, "a") as stream:
                before = await ready(made, "a")
                os.kill(recorded(made, before["id"]).holder_pid, signal.SIGTERM)
                await until(lambda: turned_away(made, before["id"]), "it to turn away")
                waiting = asyncio.ensure_future(served(client, "a"))
                await until(lambda: waits(made, "a"), "a request to wait")
                assert (await stream.rest()).endswith(DONE)
            await waiting
        assert (await ready(made, "a"))["id"] != before["id"]
        assert await loads(made, "a") == 2
        await made.nothing_counted()


async def test_engine_told_to_stop_from_outside_turns_nobody_away() -> None:
    """TERM a busy engine, which then refuses connections for as long as it ends: who comes waits for the
    next.
    """
    async with herd(QUICK) as made:
        await made.up(*real(made, "a"), "--stop-timeout", "1")
        async with streaming(made, "a"), made.client() as client:
            before = await ready(made, "a")
            os.kill(recorded(made, before["id"]).engine_pid, signal.SIGTERM)
            await until(lambda: turned_away(made, before["id"]), "it to turn away")
            await served(client, "a")
        assert (await ready(made, "a"))["id"] != before["id"]
        await made.nothing_counted()


async def turned_away(made: Herd, instance: str) -> bool:
    """Return whether nobody listens at an instance's socket any more."""
    return await refuses(UnixAddress(str(made.run_dir / "i" / instance / "e.sock")))


def recorded(made: Herd, instance: str) -> Record:
    """Return what an instance's holder wrote down about its processes."""
    record = read_record(made.run_dir / "i" / instance)
    assert record is not None
    return record


async def test_valkey_killed_leaves_streams_alone() -> None:
    """KILL the embedded Valkey mid-stream: the stream ends whole, it is restarted, requests are served."""
    async with herd(QUICK) as made:
        up = await made.up(*real(made, "a", "b"))
        async with streaming(made, "a") as stream, made.client() as client:
            before, old = await ready(made, "a"), await leader(made)
            (valkey,) = (pid for pid, line in programs_of(up.pid).items() if "valkey-server" in line)
            kill(valkey)
            await served(client, "a")  # this gateway holds a lease: no Redis is asked
            await next_leader(made, old["number"])
            await served(client, "b")
            await until(lambda: leases(made, before["id"]), "the lease to be asserted again by the gateway")
            assert (await stream.rest()).endswith(DONE)
        after = await ready(made, "a")
        assert (after["pid"], await loads(made, "a")) == (before["pid"], 1)
        await made.nothing_counted()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_c52_signal_to_up_ends_everything_in_time(number: signal.Signals) -> None:
    """TERM or INT with a stream that never ends: all is over within the stop time-out, nothing stays."""
    stop_timeout = 5.0
    async with herd(QUICK | {"LLAMASTEAD_STOP_TIMEOUT": str(stop_timeout)}) as made:
        up = await made.up(*stubbed(made, "a", token_gate="never"))
        body = ask("a", stream=True)
        async with made.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            chunks = response.aiter_raw()
            await anext(chunks)
            began = time.monotonic()
            ended = asyncio.create_task(up.signal(number))
            with pytest.raises(httpx.HTTPError):
                async for _ in chunks:
                    pass
            assert await ended == 0, up.output()[-2000:]
            assert time.monotonic() - began < 3 * stop_timeout  # a guard: the machine may be busy
        # A holder that is told to leave is nobody's child: it goes at once, and nobody waits for that.
        await until(lambda: not processes_naming(made.run_dir), "the last holder to leave")
        assert sockets_below(made.run_dir) == []
        assert list((made.run_dir / "i").iterdir()) == []


async def test_r13_what_the_dead_left_is_cleaned_and_strangers_live() -> None:
    """Leave an intent without a child, stale sockets and a record with a reused pid: only strangers stay."""
    async with herd(QUICK) as made:
        stranger = await asyncio.create_subprocess_exec("sleep", "100")
        leave_behind(made, stranger.pid)
        try:
            await made.up(*real(made, "a"))
            async with made.client() as client:
                await served(client, "a")
            instance = (await ready(made, "a"))["id"]
            left = {path.name for path in (made.run_dir / "i").iterdir()}
            assert {name for name in left if not name.startswith("spare-")} == {instance}
            assert stranger.returncode is None
            assert is_alive(stranger.pid)
        finally:
            stranger.kill()
            await stranger.wait()


def leave_behind(made: Herd, pid: int) -> None:
    """Make what a crash left: an intent without a child, and a record whose pid is somebody else's now."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    identity = {"v": 1, "model": "a", "nonce": "0" * 32, "revision": "r", "spec_hash": "s", "boot_id": boot}
    identity |= {"address": "unix:/nowhere", "holder_pid": pid, "holder_start": 1}
    for name in ("old-1-1", "old-1-2"):
        folder = made.run_dir / "i" / name
        folder.mkdir(parents=True, mode=0o700)
        stale_socket(folder / "h.sock")
        stale_socket(folder / "e.sock")
        (folder / "intent.json").write_text(json.dumps(identity | {"instance": name}))
    whole = identity | {"instance": "old-1-2", "engine_pid": pid, "engine_start": 1}
    (made.run_dir / "i" / "old-1-2" / "record.json").write_text(json.dumps(whole))
    (made.run_dir / "redis").mkdir()
    stale_socket(made.run_dir / "redis" / "valkey.sock")
