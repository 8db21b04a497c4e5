"""Who leads: standbys take over in time, a leader that slept does no harm, one that leaves keeps models."""

import asyncio
import signal
import time

from herd import Herd, instance_pids, until
from inside import (
    QUICK,
    apart,
    is_alive,
    kill,
    leader,
    loads,
    next_leader,
    ready,
    served,
    started,
    streaming,
    stubbed,
)

LEADER_TTL_S = 10.0


async def roles_and_gateway(made: Herd, *names: str, arguments: list[str]) -> None:
    """Start supervisors under these names at once, then a gateway."""
    for name in names:
        await made.role(name, "supervisor", *arguments)
    await made.gateway("g1")


def name_of(made: Herd, pid: str) -> str:
    """Return the name of the supervisor that has a pid."""
    return next(name for name, role in made.roles.items() if role.pid == int(pid))


async def test_usr1_leaves_the_models_to_the_next_supervisor() -> None:
    """Give leads an hour and send USR1 mid-stream: the lead is given back, the engine streams on, the next
    supervisor adopts it.
    """
    async with apart(QUICK | {"LLAMASTEAD_LEADER_TTL": "3600"}) as made:
        arguments = stubbed(made, "a", token_gate=str(made.models / "gate"))
        await roles_and_gateway(made, "s1", arguments=arguments)
        async with streaming(made, "a") as stream:
            before, old = await ready(made, "a"), await leader(made)
            assert await made.roles["s1"].signal(signal.SIGUSR1) == 0
            assert await leader(made) == {}  # resigned: nobody waits for a time-out
            await made.role("s2", "supervisor", *arguments)
            await next_leader(made, old["number"])
            assert instance_pids(made.run_dir) == [int(before["pid"])]
            (made.models / "gate").touch()
            assert b"[DONE]" in await stream.rest()
        async with made.client() as client:
            await served(client, "a")
        assert started(made, "a") == [int(before["pid"])]
        assert await loads(made, "a") == 1


async def test_a_dead_leader_of_the_run_folder_is_followed_at_once() -> None:
    """Give leads an hour; KILL the leader: a new supervisor leads long before that and keeps the engine."""
    async with apart(QUICK | {"LLAMASTEAD_LEADER_TTL": "3600"}) as made:
        arguments = stubbed(made, "a")
        await roles_and_gateway(made, "s1", arguments=arguments)
        async with made.client() as client:
            await served(client, "a")
            before, old = await ready(made, "a"), await leader(made)
            kill(int(old["pid"]))
            await made.role("s2", "supervisor", *arguments)
            new = await next_leader(made, old["number"])
            assert int(new["number"]) == int(old["number"]) + 1
            await served(client, "a")
        assert started(made, "a") == [int(before["pid"])]


async def test_c175_standbys_take_over_within_the_lead_of_the_dead() -> None:
    """Start three at once: one leads. KILL the leader twice: another leads within the time-out, no reload."""
    async with apart(QUICK | {"LLAMASTEAD_LEADER_TTL": str(LEADER_TTL_S)}) as made:
        await roles_and_gateway(made, "s1", "s2", "s3", arguments=stubbed(made, "a"))
        async with made.client() as client:
            await served(client, "a")
            before = await ready(made, "a")

            def leads() -> int:
                return "".join(role.output() for role in made.roles.values()).count(" leading ")

            for turn, left in ((2, 2), (3, 1)):
                old = await leader(made)
                began = time.monotonic()
                kill(int(old["pid"]))
                new = await next_leader(made, old["number"])
                assert time.monotonic() - began < LEADER_TTL_S  # to adopt included
                assert int(new["number"]) == int(old["number"]) + 1
                running = [
                    role
                    for role in made.roles.values()
                    if role.args[0] == "supervisor" and is_alive(role.pid)
                ]
                assert len(running) == left
                assert int(new["pid"]) in {role.pid for role in running}
                await served(client, "a")
                await until(lambda turn=turn: leads() >= turn, "it to say that it leads")
        assert leads() == 3  # one at a time: nobody led in between
        assert started(made, "a") == [int(before["pid"])]


async def test_r11_a_leader_that_slept_through_its_time_does_nothing_any_more() -> None:
    """STOP a leader with a load in hand until another leads, then wake it: it changes and starts nothing."""
    async with apart() as made:
        gate = made.models / "gate"
        await roles_and_gateway(made, "s1", "s2", arguments=stubbed(made, "a", "b", load_gate=str(gate)))
        async with made.client() as client:
            first = asyncio.create_task(served(client, "a"))
            await until(lambda: (made.models / "a.gguf.journal").exists(), "the engine of a")
            old = await leader(made)
            slept = name_of(made, old["pid"])
            made.roles[slept].process.send_signal(signal.SIGSTOP)
            second = asyncio.create_task(served(client, "b"))
            new = await next_leader(made, old["number"])
            gate.touch()
            await asyncio.gather(first, second)
            said = len(made.roles[slept].output())
            made.roles[slept].process.send_signal(signal.SIGCONT)
            await until(lambda: "another supervisor leads now" in made.roles[slept].output(), "its waking")
            await served(client, "a")
            await served(client, "b")
            now = await leader(made)
            assert (now["number"], now["pid"]) == (new["number"], new["pid"])
            woken = made.roles[slept].output()[said:]
            assert [
                w for w in ("instance starting", "instance stopping", "leading number") if w in woken
            ] == []
        assert [len(started(made, model)) for model in ("a", "b")] == [1, 1]
        # It is a standby now, and a useful one.
        kill(int(new["pid"]))
        third = await next_leader(made, new["number"])
        assert name_of(made, third["pid"]) == slept
        assert [len(started(made, model)) for model in ("a", "b")] == [1, 1]


async def test_term_to_a_standby_ends_only_itself() -> None:
    """Send TERM to the standby: it ends, the leader and its model stay."""
    async with apart() as made:
        await roles_and_gateway(made, "s1", "s2", arguments=stubbed(made, "a"))
        async with made.client() as client:
            await served(client, "a")
            before, leads = await ready(made, "a"), await leader(made)
            (standby,) = {"s1", "s2"} - {name_of(made, leads["pid"])}
            assert await made.roles[standby].signal(signal.SIGTERM) == 0
            await served(client, "a")
            after = await ready(made, "a")
            # What it does and takes is noted whenever that is known, not its life.
            lasting = ("id", "pid", "nonce", "epoch", "state_revision", "started_ms", "ready_ms")
            assert [after[name] for name in lasting] == [before[name] for name in lasting]
            assert (await leader(made))["number"] == leads["number"]
