"""Holders killed at each step of a start and of a stop, and holders that hang: nothing is left over."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fault_stage import Stage, stage
from herd import KEYS, until
from inside import is_alive, kill, leader

from llamastead.supervisor.holder_record import Record, read_record

pytestmark = pytest.mark.asyncio(loop_scope="module")

STARTING = (
    "holder.moved",
    "holder.intent",
    "holder.forked",
    "holder.recorded",
    "holder.spawned",
    "holder.ready",
)
STOPPING = ("holder.unlinked", "holder.exit-said", "holder.reaped", "holder.exited")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def staged() -> AsyncIterator[Stage]:
    """A herd that lives through all the tests below."""
    async with stage() as made:
        yield made


def record_of(staged: Stage, instance: str) -> Record:
    """Return what an instance's holder wrote down."""
    record = read_record(staged.made.run_dir / "i" / instance)
    assert record is not None
    return record


async def only(staged: Stage) -> tuple[str, Record]:
    """Return the one instance and its record."""
    (instance,) = await staged.instances()
    return instance, record_of(staged, instance)


@pytest.mark.parametrize("point", STARTING)
@pytest.mark.parametrize("word", ["kill", "fail"])
async def test_a_holder_struck_while_it_starts_an_engine(staged: Stage, point: str, word: str) -> None:
    """Strike a holder at a step of its start: another start answers the request, nothing is left over."""
    if word == "fail" and point in ("holder.spawned", "holder.ready"):
        word = "kill"
    await staged.made.unload("a")
    await staged.right()
    await until(lambda: spare_pid(staged), "a spare")  # only a spare moves
    staged.forget(point)
    staged.orders.order(point, word)
    answer = await staged.asked("a")
    await staged.orders.hit(point)
    assert answer.status_code == 200, answer.text
    await staged.right()


@pytest.mark.parametrize("point", STOPPING)
async def test_r7_a_holder_killed_while_it_stops_an_engine(staged: Stage, point: str) -> None:
    """KILL a holder at a step of a stop: the next model gets its room all the same, nothing is left over."""
    assert (await staged.asked("a")).status_code == 200
    _, record = await only(staged)
    staged.forget(point)
    staged.orders.order(point)
    assert (await staged.asked("b")).status_code == 200
    assert await staged.orders.hit(point) == record.holder_pid
    await until(lambda: not is_alive(record.engine_pid), "the end of the engine")
    await staged.right()


async def test_c58_a_hung_holder_costs_its_own_model_and_nobody_else(staged: Stage) -> None:
    """STOP the holder of a loaded model: its engine serves on, and another model gets its room in time."""
    assert (await staged.asked("a")).status_code == 200
    _, record = await only(staged)
    os.kill(record.holder_pid, signal.SIGSTOP)
    assert (await staged.asked("a")).status_code == 200  # no holder is on the way
    assert (await staged.asked("b")).status_code == 200
    assert "its holder process hung" in await reason_of(staged, "a")
    for pid in (record.holder_pid, record.engine_pid):
        await until(lambda pid=pid: not is_alive(pid), "the end of holder and engine")
    await staged.right()


async def reason_of(staged: Stage, model: str) -> str:
    """Return why a model's instance ended."""
    async with staged.made.redis() as redis:
        return str(await redis.hget(KEYS.model(model), "reason"))


async def test_c175_a_hung_holder_does_not_keep_standbys_from_standing(staged: Stage) -> None:
    """STOP a holder and start another supervisor, then KILL the leader: the next leads at once."""
    assert (await staged.asked("a")).status_code == 200
    _, record = await only(staged)
    os.kill(record.holder_pid, signal.SIGSTOP)
    await staged.supervisor()
    before = await staged.led()
    kill(int(before["pid"]))

    async def follows() -> bool:
        return int((await leader(staged.made)).get("number", 0)) > int(before["number"])

    # A look at each election would cost a standby ten seconds a time.
    await until(follows, "the next leader", 8)
    assert (await staged.asked("b")).status_code == 200
    for pid in (record.holder_pid, record.engine_pid):
        await until(lambda pid=pid: not is_alive(pid), "the end of holder and engine")
    await staged.right()


async def test_a_hung_spare_costs_a_start_its_patience_and_no_request(staged: Stage) -> None:
    """STOP the spare that the next start counts on: the request is served by another holder."""
    assert (await staged.asked("a")).status_code == 200
    await staged.right()
    spare = await until(lambda: spare_pid(staged), "a spare")
    os.kill(spare, signal.SIGSTOP)
    assert (await staged.asked("b")).status_code == 200
    await until(lambda: not is_alive(spare), "the end of the spare")
    await staged.right()


def spare_pid(staged: Stage) -> int:
    """Return the process of the waiting spare, 0 for none. A holder's command line keeps its first folder."""
    folders = {os.fsencode(str(path)) for path in (staged.made.run_dir / "i").glob("spare-*")}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if folders & set((entry / "cmdline").read_bytes().split(b"\0")):
                    return int(entry.name)
    return 0
