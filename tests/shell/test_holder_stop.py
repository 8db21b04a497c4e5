"""The stop ladder, step by step to its end."""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from holder_kit import Watcher, alive, client, journal, spec_for, until

from llamastead.supervisor import holders
from llamastead.supervisor.holders import PROGRAM, HolderExit, HolderState, HolderStop
from llamastead.supervisor.launch import InstanceSpec

Watch = Callable[..., Watcher]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


def knobs(model: Path, **given: object) -> None:
    """Set what the stub does with a model."""
    Path(f"{model}.json").write_text(json.dumps(given))


def ready(event: HolderState) -> bool:
    """Whether a state line says ready."""
    return event.state == "ready"


@pytest.fixture
def patient(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders that wait longer after a TERM: a busy machine may stop an engine for more than their second."""
    ladder = shutil.copytree(PROGRAM, short_tmp / "holder") / "ladder.py"
    text, changed = re.subn(r"(?m)^AFTER_TERM_S = .*$", "AFTER_TERM_S = 20.0", ladder.read_text())
    assert changed == 1
    ladder.write_text(text)
    monkeypatch.setattr(holders, "PROGRAM", ladder.parent)


def step(word: str) -> Callable[[HolderStop], bool]:
    """Whether a stop came to this step."""
    return lambda event: event.step == word


def steps(watcher: Watcher) -> list[str]:
    """Return the steps of a stop, repetitions left out."""
    return list(dict.fromkeys(event.step for event in watcher.of(HolderStop)))


async def started(watcher: Watcher, spec: InstanceSpec) -> int:
    """Start an instance, wait until it is ready, and return its pid."""
    view = await watcher.holders.start(spec)
    await watcher.event(HolderState, ready)
    assert view.pid is not None
    return view.pid


async def texts(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the events of a streamed answer."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def test_a_running_answer_ends_before_its_instance(
    engine: Path, model: Path, run_dir: Path, watch: Watch
):
    """Stop during a stream: newcomers find no socket, the stream ends with [DONE], then the engine."""
    knobs(model, token_gate=f"{model}.go")
    # The real engine takes a while for these, so that the stream is not over before we look.
    long = {"max_tokens": 1500, "n_probs": 100}
    watcher = watch()
    spec = spec_for(run_dir, engine, model, options=("-c", "4096"))
    pid = await started(watcher, spec)
    async with (
        client(spec) as http,
        http.stream("POST", "/v1/chat/completions", json=CHAT | long) as answer,
    ):
        events = texts(answer)
        await anext(events)
        os.kill(pid, signal.SIGSTOP)  # so that nobody is too late
        watcher.holders.stop(spec.instance, deadline_s=30)
        await watcher.event(HolderStop, step("unlinked"))
        async with client(spec) as late:
            with pytest.raises(httpx.ConnectError):
                await late.get("/health")
        os.kill(pid, signal.SIGCONT)
        waiting = await watcher.event(HolderStop, step("waiting"))
        assert waiting.processing == 1
        assert watcher.of(HolderExit) == []
        Path(f"{model}.go").touch()
        received = [text async for text in events]
    assert received[-1] == "[DONE]"
    end = await watcher.event(HolderExit)
    assert (end.code, end.killed) == (0, False)
    assert steps(watcher) == ["unlinked", "waiting", "exit"]
    assert list(model.parent.glob("*.serving.*")) == []


async def test_the_exit_line_never_comes_right_after_ready(
    engine: Path, model: Path, run_dir: Path, watch: Watch
):
    """Stop in the instant of ready, when an exit line is lost for good: it ends in order all the same."""
    watcher = watch()
    spec = spec_for(run_dir, engine, model)
    await started(watcher, spec)
    watcher.holders.stop(spec.instance, deadline_s=5)
    end = await watcher.event(HolderExit)
    assert (end.code, end.killed) == (0, False)
    assert "exit_line_lost" not in [entry["event"] for entry in journal(model)]


@pytest.mark.usefixtures("patient")
async def test_c03_a_loading_instance_ends_by_term(engine: Path, model: Path, run_dir: Path, watch: Watch):
    """Stop while it loads: it can read no exit line yet, TERM ends it at once, and no KILL is needed."""
    knobs(model, load_seconds=20)
    never = run_dir / "never.gguf"
    os.mkfifo(never)  # the real engine waits for a projector that nobody writes
    watcher = watch()
    spec = spec_for(run_dir, engine, model, options=("--mmproj", str(never)))
    await watcher.holders.start(spec)
    await watcher.event(HolderState, lambda event: event.state == "loading")
    watcher.holders.stop(spec.instance, deadline_s=5)
    end = await watcher.event(HolderExit)
    assert (end.signal, end.phase, end.asked, end.killed) == (signal.SIGTERM, "loading", True, False)
    assert steps(watcher) == ["term"]


async def test_a_loading_instance_that_ignores_term_is_killed(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Ignore TERM while loading: KILL follows."""
    knobs(model, load_seconds=60, ignore_term=True)
    watcher = watch()
    spec = spec_for(run_dir, stub, model)
    await watcher.holders.start(spec)
    await watcher.event(HolderState)
    watcher.holders.stop(spec.instance, deadline_s=5)
    end = await watcher.event(HolderExit)
    assert (end.signal, end.killed) == (signal.SIGKILL, True)
    assert steps(watcher) == ["term", "kill"]


@pytest.mark.usefixtures("patient")
async def test_term_that_meets_ready_is_followed_by_the_exit_line(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Let it turn ready just after the TERM, deaf to it: the exit line ends it before the KILL."""
    knobs(model, load_gate=f"{model}.go", ignore_term=True)
    watcher = watch()
    spec = spec_for(run_dir, stub, model)
    await watcher.holders.start(spec)
    await watcher.event(HolderState)
    watcher.holders.stop(spec.instance, deadline_s=5)
    await watcher.event(HolderStop, step("term"))
    Path(f"{model}.go").touch()
    end = await watcher.event(HolderExit)
    assert (end.code, end.killed) == (0, False)


async def test_an_engine_deaf_to_the_exit_line_is_killed(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Ignore the exit line: KILL of the whole group after the stop-timeout, the helper included."""
    knobs(model, ignore_exit=True, fork_child=True)
    watcher = watch()
    spec = spec_for(run_dir, stub, model, stop_timeout_s=0.3)
    await started(watcher, spec)
    watcher.holders.stop(spec.instance, deadline_s=5)
    end = await watcher.event(HolderExit)
    assert (end.signal, end.killed) == (signal.SIGKILL, True)
    assert steps(watcher) == ["unlinked", "exit", "kill"]
    [helper] = [entry["helper"] for entry in journal(model) if entry["event"] == "helper"]
    await until(lambda: not alive(helper), "the helper to end")


@pytest.mark.parametrize("hurry", ["deadline", "shorter deadline", "force", "force later"])
async def test_waiting_for_zero_can_be_bounded(
    hurry: str, stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Hold a request for ever and stop: the deadline, a later shorter one, or force end the wait."""
    knobs(model, hang="serving")
    watcher = watch()
    spec = spec_for(run_dir, stub, model)
    await started(watcher, spec)
    async with client(spec) as http, asyncio.TaskGroup() as group:
        request = group.create_task(cut(http))
        await until(lambda: list(model.parent.glob("*.serving.*")), "the request to run")
        watcher.holders.stop(spec.instance, 0.2 if hurry == "deadline" else None, force=hurry == "force")
        if hurry in ("shorter deadline", "force later"):
            await watcher.event(HolderStop, step("waiting"))
            watcher.holders.stop(spec.instance, 600)
            watcher.holders.stop(spec.instance, 0.1, force=hurry == "force later")
        end = await watcher.event(HolderExit)
        assert await request
    assert (end.code, end.asked, end.killed) == (0, True, False)
    assert steps(watcher)[-1] == "exit"


async def test_an_engine_that_listens_no_more_is_not_waited_for(
    engine: Path, model: Path, run_dir: Path, watch: Watch
):
    """Stop without a deadline an engine whose socket is gone, as after a TERM: it is told to exit at once."""
    watcher = watch()
    spec = spec_for(run_dir, engine, model)
    await started(watcher, spec)
    (run_dir / "i" / spec.instance / "e.sock").unlink()
    watcher.holders.stop(spec.instance, None)
    end = await watcher.event(HolderExit)
    assert (end.code, end.killed) == (0, False)
    assert steps(watcher) == ["unlinked", "exit"]


async def cut(http: httpx.AsyncClient) -> bool:
    """Send a request and return whether it ended without an answer."""
    try:
        await http.post("/completion", json={"prompt": "hi"})
    except httpx.HTTPError:
        return True
    return False


async def test_a_sleeping_instance_is_stopped_without_waking(
    engine: Path, model: Path, run_dir: Path, watch: Watch
):
    """Let it fall asleep and stop it: exit line, code 0, and no word of loading in between."""
    watcher = watch()
    spec = spec_for(run_dir, engine, model, options=("--sleep-idle-seconds", "1"))
    await started(watcher, spec)
    await watcher.event(HolderState, lambda event: event.state == "sleeping")
    watcher.holders.stop(spec.instance, deadline_s=5)
    end = await watcher.event(HolderExit)
    assert (end.code, end.phase, end.killed) == (0, "sleeping", False)
    assert watcher.of(HolderState)[-1].state == "sleeping"
    assert steps(watcher) == ["unlinked", "exit"]


@pytest.mark.usefixtures("patient")
async def test_a_stop_right_after_a_start_is_not_lost(stub: Path, model: Path, run_dir: Path, watch: Watch):
    """Order a stop while the holder is still being started: the instance ends."""
    knobs(model, load_seconds=60)
    watcher = watch()
    spec = spec_for(run_dir, stub, model)
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(watcher.holders.start(spec))
        # One turn of the loop: the start has begun, and its holder isn't connected yet.
        await asyncio.sleep(0)
        assert not starting.done()
        watcher.holders.stop(spec.instance, deadline_s=5)
    end = await watcher.event(HolderExit)
    assert (end.signal, end.asked) == (signal.SIGTERM, True)
