"""The machine's clock is set while models answer, requests wait or jobs run; all roles and Redis see it."""

import asyncio
from pathlib import Path

import pytest
from compiled import NEEDS_COMPILER
from herd import KEYS, until
from inside import DONE, QUICK, apart, ask, kill, leader, next_leader, ready, served, stubbed
from redis.asyncio import Redis
from test_worker_kills import Slow
from waiting import until_blocking
from wall_clock import WallClock
from worker_kit import Stand, stand

from llamastead.shared.words import JobState

HOUR = 3600
pytestmark = NEEDS_COMPILER


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WallClock:
    """The clock of all processes that are started from now on."""
    made = WallClock(tmp_path)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


async def jumped(redis: Redis, before: int) -> bool:
    """Return whether Redis's time is more than an hour away from what it was."""
    return abs((await redis.time())[0] - before) > HOUR


@pytest.mark.parametrize("hours", [2, -2])
async def test_a_clock_that_is_set_ends_no_answer_and_starves_nobody(hours: int, clock: WallClock) -> None:
    """Set the clock while A streams and B waits for its room: A is drained within max-wait and ends whole, B
    is served. Set it again and KILL the supervisor: the next one keeps B, and gives its room to A soon.
    """
    env = QUICK | {"LLAMASTEAD_MAX_WAIT": "2", "LLAMASTEAD_MIN_RESIDENCE": "1"}
    async with apart(env) as made, made.redis() as redis:
        gate = made.models / "gate"
        words = [*stubbed(made, "a", "b", token_gate=str(gate)), "--models-max", "1"]
        await made.role("s1", "supervisor", *words)
        await made.gateway("g1")
        async with made.client() as client:
            body = ask("a", stream=True)
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                pieces = answer.aiter_raw()
                whole = await anext(pieces)
                waiting = asyncio.create_task(client.post("/v1/completions", json=ask("b")))
                await until(lambda: redis.hlen(KEYS.tickets("b")), "the ticket for b")
                before = (await redis.time())[0]
                clock.jump(hours * HOUR)
                await until(lambda: jumped(redis, before), "Redis to see the clock set")
                if hours < 0:

                    async def drained() -> bool:
                        return (await made.instance("a")).get("state") == "draining"

                    await until(drained, "a to be drained for b")
                gate.touch()
                whole += b"".join([piece async for piece in pieces])
                assert whole.endswith(DONE)
            told = await waiting
            assert told.status_code == 200, told.text
            await served(client, "b")
            kept, old = await ready(made, "b"), await until(lambda: leader(made), "a leader")
            clock.jump(2 * hours * HOUR)
            kill(int(old["pid"]))
            await made.role("s2", "supervisor", *words)
            await next_leader(made, old["number"])
            assert (await ready(made, "b"))["pid"] == kept["pid"]
            await served(client, "a")
            await served(client, "b")
        await made.nothing_counted()
        assert "Traceback" not in made.roles["s1"].output() + made.roles["s2"].output()


async def test_a_clock_set_ahead_hands_no_running_job_to_another_worker(
    short_tmp: Path, clock: WallClock
) -> None:
    """Set the clock ahead while one worker measures and another waits, until Redis has forgotten all signs of
    the first: it keeps its job and ends it. Killed afterwards in the middle of another, it is found gone.
    """
    ahead = 0
    with stand(short_tmp) as bench:
        slow, first = Slow(bench), bench.worker().ready()
        await slow.ask()
        slow.processes(first)
        bench.worker().ready()
        name = bench.record(slow.job).worker
        assert await bench.jobs.sweep() == []

        def forgotten() -> bool:
            nonlocal ahead
            ahead += 2 * HOUR
            clock.jump(ahead)
            return not bench.client.exists(KEYS.worker(name))

        until_blocking(forgotten, "Redis to forget the worker")
        assert await bench.jobs.sweep() == []
        while not bench.client.exists(KEYS.worker(name)):
            assert await bench.jobs.sweep() == []
        record = bench.record(slow.job)
        assert (record.state, record.worker, record.attempt) == (JobState.RUNNING, name, 1)
        slow.open()
        record = bench.over(slow.job)
        assert (record.state, record.attempt, record.lost) == (JobState.DONE, 1, 0)
        assert slow.outcome()["state"] == "measured"
        slow.gate.unlink()
        await slow.ask()
        doomed = next(w for w in bench.workers if w.pid == taker(bench, slow))
        kill(doomed.pid)
        doomed.process.wait(10)
        bench.let_time_pass(slow.job)
        (line,) = await bench.swept("the dead worker")
        assert "is handed in again" in line
        slow.open()
        assert bench.over(slow.job).state is JobState.DONE


def taker(bench: Stand, slow: Slow) -> int:
    """Wait until a job runs and return the pid of its worker."""
    until_blocking(lambda: bench.record(slow.job).state is JobState.RUNNING, "the job to run")
    # Of one that Redis forgot when the clock was set the job's record may be the first sign again.
    name = KEYS.worker(bench.record(slow.job).worker)
    return int(until_blocking(lambda: bench.client.hget(name, "pid"), "its worker's sign"))
