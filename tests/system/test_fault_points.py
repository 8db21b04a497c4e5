"""The supervisor killed or paused at each point of its work: requests are answered, and all is right then."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import pytest_asyncio
from fault_stage import NO_END, Stage, stage, swap, wake
from herd import KEYS, until
from inside import is_alive, kill

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEPOSED = "another supervisor leads now"
Turn = Callable[[Stage], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def staged() -> AsyncIterator[Stage]:
    """A herd that lives through all the tests below."""
    async with stage() as made:
        (made.made.models / "a.gguf.json").write_text(
            json.dumps({"token_gate": str(made.made.models / "gate")})
        )
        (made.made.models / "gate").touch()
        await made.made.unload("a")  # it began without a gate
        yield made


@pytest.fixture(autouse=True)
def no_order_is_left(staged: Stage) -> Iterator[None]:
    """What one test ordered, and nobody came by, strikes nobody in the next."""
    yield
    staged.orders.clear()


async def order_unload(staged: Stage) -> None:
    """Load a model and order its end: the order is answered, done once."""
    assert (await staged.asked("b")).status_code == 200
    answer = await staged.client.post("/models/unload", json={"model": "b"})
    assert answer.status_code == 200, answer.text

    async def gone() -> bool:
        return not await staged.instances()

    await until(gone, "the end of b")


async def order_load(staged: Stage) -> None:
    """Order a load while nothing runs: the order is answered, and done once."""
    for model in ("a", "b"):
        await staged.made.unload(model)
    loads = (await staged.loads())["b"]
    answer = await staged.client.post("/models/load", json={"model": "b"})
    assert answer.status_code == 200, answer.text

    async def loaded() -> bool:
        return [each["state"] for each in (await staged.instances()).values()] == ["ready"]

    await until(loaded, "b to be ready")
    assert (await staged.loads())["b"] == loads + 1


async def fail_to_load(staged: Stage) -> None:
    """Ask for a model that can't load: one clear error."""
    answer = await staged.asked("broken")
    assert answer.status_code in (500, 503), answer.text
    assert "error" in answer.json()


async def reload(staged: Stage) -> None:
    """Change the presets and reload: the new option is there afterwards, the running model is not touched."""
    preset = staged.made.run_dir.parent / "models.ini"
    assert (await staged.asked("a")).status_code == 200
    (before,) = await staged.instances()
    tag = f"t{len(preset.read_text())}"
    draft = preset.with_suffix(".draft")  # in one step: a supervisor that starts may be reading it
    draft.write_text(preset.read_text() + f"\n[{tag}]\nmodel = {staged.made.models}/a.gguf\n")
    leads = int((await staged.led())["pid"])
    draft.replace(preset)
    with contextlib.suppress(ProcessLookupError):  # it may have seen the change by itself, and been struck
        os.kill(leads, signal.SIGHUP)

    async def listed() -> bool:
        models = (await staged.client.get("/models")).json()["data"]
        return tag in {entry["id"] for entry in models}

    await until(listed, "the new model")
    assert list(await staged.instances()) == [before]


async def wake_up(staged: Stage) -> None:
    """Let a model fall asleep and ask it again: it answers, without a second load."""
    assert (await staged.asked("sleeper")).status_code == 200

    async def asleep() -> bool:
        return [each["state"] for each in (await staged.instances()).values()] == ["sleeping"]

    await until(asleep, "the model to sleep")
    loads = (await staged.loads())["sleeper"]
    assert (await staged.asked("sleeper")).status_code == 200
    assert (await staged.loads())["sleeper"] == loads


async def take_over(staged: Stage) -> None:
    """KILL whoever leads, so that another takes over; a model that was loaded is kept."""
    assert (await staged.asked("a")).status_code == 200
    (before,) = await staged.instances()
    led = await staged.led()
    kill(int(led["pid"]))
    assert (await staged.asked("a")).status_code == 200
    await staged.led(int(led["number"]))
    assert list(await staged.instances()) == [before]


KILLED = {
    swap: (
        *("put_instance.before", "put_instance.after", "start.ordered", "ready.before", "ready.after"),
        *("drain.before", "drain.after", "stop.before", "stop.after", "ended.before", "ended.after"),
        *("take_commands.before", "take_commands.after", "done.before", "done.after", "observe.after"),
    ),
    order_load: (
        "take_commands.after",
        "put_instance.after",
        "answer.before",
        "answer.after",
        "start.ordered",
    ),
    order_unload: ("take_commands.after", "stop.before", "stop.after", "answer.before", "answer.after"),
    fail_to_load: ("fail.before", "fail.after"),
    reload: ("publish.before", "publish.after"),
    wake_up: ("sleep.after", "wake.before", "wake.after"),
}
PAUSED = {
    swap: (
        "start.ordered",
        "ready.before",
        "drain.after",
        "stop.before",
        "stop.after",
        "take_commands.after",
    ),
    reload: ("publish.before",),
    wake_up: ("wake.before",),
}
TAKING_OVER = ("lead.after", "epoch.written", "seat.taken", "open_herd.before", "open_herd.after")


def cases(table: dict[Turn, tuple[str, ...]]) -> list[object]:
    """Return one parameter set per point."""
    return [
        pytest.param(turn, point, id=f"{point}-{turn.__name__}")
        for turn, points in table.items()
        for point in points
    ]


@pytest.mark.parametrize(("turn", "point"), cases(KILLED))
async def test_c43_c178_killed(staged: Stage, turn: Turn, point: str) -> None:
    """KILL the leader at a point of its work: the standby goes on, requests are answered, all is right."""
    before = await staged.led()
    staged.forget(point)
    work = asyncio.create_task(turn(staged))
    staged.orders.order(point)
    pid = await staged.struck(point, before)
    await staged.supervisor()
    await asyncio.wait_for(work, 60)
    await until(lambda: not is_alive(pid), "its death")
    await staged.right()
    assert (await staged.asked("a")).status_code == 200
    await until(lambda: not staged.cut(), "no engine to be stopped while it served")


@pytest.mark.parametrize("point", TAKING_OVER)
async def test_c43_c174_killed_while_it_takes_over(staged: Stage, point: str) -> None:
    """KILL the leader, and the next one at a point of its taking over: the third keeps the model."""
    await staged.led()
    staged.forget(point)
    await staged.supervisor()
    staged.orders.order(point)
    work = asyncio.create_task(take_over(staged))
    pid = await staged.orders.hit(point)
    await staged.supervisor()
    await asyncio.wait_for(work, 60)
    await until(lambda: not is_alive(pid), "its death")
    await staged.right()


@pytest.mark.parametrize(("turn", "point"), cases(PAUSED))
async def test_r11_paused_beyond_its_lead_and_woken(staged: Stage, turn: Turn, point: str) -> None:
    """STOP the leader at a point until another leads and did its work, then wake it: it changes nothing."""
    before = await staged.led()
    staged.forget(point)
    work = asyncio.create_task(turn(staged))
    staged.orders.order(point, "pause")
    pid = await staged.struck(point, before)
    slept = staged.made.roles[staged.role_of(pid)]
    said = slept.output().count(DEPOSED)
    try:
        await asyncio.wait_for(work, 60)
        now = await staged.led()
        assert int(now["number"]) > int(before["number"])
        facts, loads = await staged.instances(), await staged.loads()
    finally:
        wake(pid)
    await until(lambda: slept.output().count(DEPOSED) > said, "it to see that")
    assert {key: each["pid"] for key, each in (await staged.instances()).items()} == {
        key: each["pid"] for key, each in facts.items()
    }
    assert await staged.loads() == loads
    assert (await staged.led())["number"] == now["number"]
    await staged.right()


@pytest.mark.parametrize("point", ["lead.after", "take_commands.after", "observe.before", "ready.after"])
async def test_c174_failing_inside_a_lead_leaves_no_lock_behind(staged: Stage, point: str) -> None:
    """Let the leader fail at a point of its lead: that ends by itself or in time, and work goes on."""
    before = await staged.led()
    staged.forget(point)
    staged.orders.order(point, "fail")
    if point == "lead.after":
        kill(int(before["pid"]))  # somebody takes the lead anew
        await staged.supervisor()
    await asyncio.wait_for(swap(staged), 60)
    await staged.orders.hit(point)
    await staged.led(int(before["number"]))
    async with staged.made.redis() as redis:
        left = await redis.pttl(KEYS.leader)
    assert left != NO_END
    assert left <= 2000
    await staged.right()
