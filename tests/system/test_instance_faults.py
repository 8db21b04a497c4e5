"""Engines killed and hung in every phase of their life: who waits is served or told, nothing is left over."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fault_stage import Stage, stage, wake
from herd import until
from inside import ask, is_alive
from looks import whole_lines

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 40.0
WORDS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def staged() -> AsyncIterator[Stage]:
    """A herd that lives through all the tests below; loads and tokens of `a` wait for a gate."""
    async with stage({"LLAMASTEAD_STALL_TIMEOUT": "5", "LLAMASTEAD_STOP_TIMEOUT": "2"}) as made:
        yield made


@pytest.fixture(params=list(WORDS))
def strike(request: pytest.FixtureRequest) -> signal.Signals:
    """The signal that ends an engine, or has it stand still for good."""
    return WORDS[request.param]


def knobs(staged: Stage, model: str, **values: object) -> None:
    """Set what a model's stub does from its next start on."""
    (staged.made.models / f"{model}.gguf.json").write_text(json.dumps(values))


async def engine(staged: Stage, model: str, state: str) -> int:
    """Wait until a model's instance is in a state, and return the engine's pid."""

    async def look() -> int:
        for each in (await staged.instances()).values():
            if each["model"] == model and each["state"] == state:
                return int(each.get("pid") or 0)
        return 0

    return int(await until(look, f"{model} to be {state}"))


async def settled(staged: Stage, pid: int) -> None:
    """Check that the struck engine is gone and all is right, and that its model serves again."""
    for model in ("a", "sleeper"):
        knobs(staged, model)
    await until(lambda: not is_alive(pid), "the end of the struck engine", BOUND_S)
    for model in ("a", "b"):
        answer = await asyncio.wait_for(staged.asked(model), BOUND_S)
        assert answer.status_code == 200, answer.text
    await staged.right()
    for mark in staged.cut():
        mark.unlink()  # an engine that was struck while it served


async def test_struck_while_it_loads(staged: Stage, strike: signal.Signals) -> None:
    """Strike an engine in its load: the request is served by another start, or told why not."""
    await staged.made.unload("a")
    gate = staged.made.models / "never"
    knobs(staged, "a", load_gate=str(gate))
    waiting = asyncio.create_task(staged.asked("a"))
    pid = await engine(staged, "a", "loading")
    knobs(staged, "a")
    os.kill(pid, strike)
    answer = await asyncio.wait_for(waiting, BOUND_S)
    if strike is signal.SIGKILL:
        assert answer.status_code == 200, answer.text
    else:
        assert answer.status_code in (500, 503, 504), answer.text
        assert "stall" in answer.text or "progress" in answer.text
    await settled(staged, pid)


async def test_c34_struck_while_it_rests(staged: Stage, strike: signal.Signals) -> None:
    """Strike an idle engine: the next request is served anew, or told; the one after that is served."""
    assert (await staged.asked("a")).status_code == 200
    pid = await engine(staged, "a", "ready")
    os.kill(pid, strike)
    if strike is signal.SIGKILL:
        # Its last moment, in which it takes a connection and resets it, is not what is tried here. A zombie's
        # threads may still be dying, and its sockets with them: only what is reaped is gone.
        await until(lambda: not Path(f"/proc/{pid}").exists(), "the engine to be gone")
    answer = await asyncio.wait_for(staged.asked("a"), BOUND_S)
    assert answer.status_code == 200 or (strike is signal.SIGSTOP and answer.status_code == 502), answer.text
    await settled(staged, pid)


async def test_c36_struck_while_it_streams(staged: Stage, strike: signal.Signals) -> None:
    """Strike an engine in a stream: the stream ends with an error event."""
    await broken_stream(staged, strike, None)


async def test_struck_while_it_drains(staged: Stage, strike: signal.Signals) -> None:
    """Strike an engine that drains for another model: its stream ends with an error, the other is served."""
    await broken_stream(staged, strike, "b")


async def read_on(pieces: AsyncIterator[bytes], got: bytearray) -> None:
    """Add the pieces of an answer to `got` until it ends or breaks."""
    async for piece in pieces:
        got += piece


async def broken_stream(staged: Stage, strike: signal.Signals, other: str | None) -> None:
    """Strike an engine while it streams, and drains if another model is asked for."""
    await staged.made.unload("a")
    knobs(staged, "a", token_gate=str(staged.made.models / "never"))
    body = ask("a", stream=True)
    async with staged.client.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.aiter_raw()
        got = await anext(pieces)
        waiting = asyncio.create_task(staged.asked(other)) if other else None
        pid = await engine(staged, "a", "draining" if other else "ready")
        knobs(staged, "a")
        os.kill(pid, strike)
        rest = bytearray(got)
        with pytest.raises(httpx.RemoteProtocolError):
            await asyncio.wait_for(read_on(pieces, rest), BOUND_S)
        got = bytes(rest)
    assert json.loads(got.rstrip().rpartition(b"data: ")[2])["error"]["code"] == 502
    if waiting is not None:
        assert (await asyncio.wait_for(waiting, BOUND_S)).status_code == 200
    await settled(staged, pid)


async def test_c58_struck_while_it_stops(staged: Stage, strike: signal.Signals) -> None:
    """Strike an engine between the decision to stop it and its end: the other model gets its room."""
    assert (await staged.asked("a")).status_code == 200
    pid = await engine(staged, "a", "ready")
    staged.forget("holder.unlinked")
    staged.orders.order("holder.unlinked", "pause")
    waiting = asyncio.create_task(staged.asked("b"))
    holder = await staged.orders.hit("holder.unlinked")
    os.kill(pid, strike)
    wake(holder)
    assert (await asyncio.wait_for(waiting, BOUND_S)).status_code == 200
    await settled(staged, pid)


async def test_c58_an_engine_that_closes_all_connections_while_it_stops_is_ended(staged: Stage) -> None:
    """TERM an engine that then answers nobody, with its stop decided: the other model gets its room."""
    assert (await staged.asked("a")).status_code == 200
    pid = await engine(staged, "a", "ready")
    staged.forget("holder.unlinked")
    staged.orders.order("holder.unlinked", "pause")
    waiting = asyncio.create_task(staged.asked("b"))
    holder = await staged.orders.hit("holder.unlinked")
    os.kill(pid, signal.SIGTERM)
    wake(holder)
    assert (await asyncio.wait_for(waiting, BOUND_S)).status_code == 200
    await settled(staged, pid)


async def test_struck_while_it_sleeps(staged: Stage, strike: signal.Signals) -> None:
    """Strike an engine that sleeps: another model gets its room, and it is loaded anew afterwards."""
    assert (await staged.asked("sleeper")).status_code == 200
    pid = await engine(staged, "sleeper", "sleeping")
    os.kill(pid, strike)
    assert (await asyncio.wait_for(staged.asked("b"), BOUND_S)).status_code == 200
    assert (await asyncio.wait_for(staged.asked("sleeper"), BOUND_S)).status_code == 200
    await settled(staged, pid)


async def test_struck_while_it_wakes(staged: Stage, strike: signal.Signals) -> None:
    """Strike an engine that is being woken: the request is told or served, the next one is served."""
    await staged.made.unload("sleeper")
    gate = staged.made.models / "wake-gate"
    gate.touch()
    knobs(staged, "sleeper", load_gate=str(gate))
    assert (await staged.asked("sleeper")).status_code == 200
    pid = await engine(staged, "sleeper", "sleeping")
    gate.unlink()
    waiting = asyncio.create_task(staged.asked("sleeper"))
    await engine(staged, "sleeper", "waking")
    os.kill(pid, strike)
    gate.touch()
    answer = await asyncio.wait_for(waiting, BOUND_S)
    assert answer.status_code in (200, 502, 503), answer.text
    await settled(staged, pid)


async def test_r7_helpers_of_an_engine_end_with_it(staged: Stage, strike: signal.Signals) -> None:
    """Strike an engine that forked a helper which ignores signals: the helper ends with it."""
    await staged.made.unload("a")
    journal = staged.made.models / "a.gguf.journal"
    journal.unlink()
    knobs(staged, "a", fork_child=True)
    assert (await staged.asked("a")).status_code == 200
    pid = await engine(staged, "a", "ready")
    entries = [json.loads(line) for line in whole_lines(journal)]
    (helper,) = (entry["helper"] for entry in entries if entry["event"] == "helper")
    os.kill(pid, strike)
    assert (await asyncio.wait_for(staged.asked("b"), BOUND_S)).status_code == 200
    await until(lambda: not is_alive(helper), "the end of the helper", BOUND_S)
    await settled(staged, pid)
