"""Holders and the supervisors that come and go: leadership, adoption, orphans, and deaths."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fault_orders import FaultOrders
from few_files import no_more_files
from holder_kit import PATIENCE_S, Watcher, alive, caught_up, client, journal, spec_for, until

from llamastead.supervisor import holders
from llamastead.supervisor.epoch import read_epoch, write_epoch
from llamastead.supervisor.holders import (
    ANSWER_S,
    HolderError,
    HolderExit,
    HolderLines,
    HolderLost,
    HolderRefused,
    HolderState,
    instance_folders,
    kill_recorded,
    read_record,
)

Watch = Callable[..., Watcher]


def knobs(model: Path, **given: object) -> None:
    """Set what the stub does with a model."""
    Path(f"{model}.json").write_text(json.dumps(given))


def ready(event: HolderState) -> bool:
    """Whether a state line says ready."""
    return event.state == "ready"


async def test_a_holder_is_not_called_gone_while_no_file_can_be_opened(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Adopt where no file may be opened: it fails, since "gone" would end a living engine; later it works."""
    first, second = watch(), watch(epoch=None, leader=False)
    started = await first.holders.start(spec_for(run_dir, stub, model))
    [folder] = instance_folders(run_dir)
    with no_more_files(os.getpid()), pytest.raises(OSError, match="Too many open files"):
        await second.holders.adopt(folder)
    view = await second.holders.adopt(folder)
    assert view is not None
    assert view.pid == started.pid


async def test_another_supervisor_sees_what_the_first_one_sees(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Adopt a ready instance from a second supervisor: the view is whole, later events reach both."""
    first, second = watch(), watch(epoch=None, leader=False)
    spec = spec_for(run_dir, stub, model)
    started = await first.holders.start(spec)
    told = await first.event(HolderState, ready)
    [folder] = instance_folders(run_dir)
    view = await second.holders.adopt(folder)
    assert view is not None
    assert (view.phase, view.instance, view.nonce, view.model) == ("ready", spec.instance, spec.nonce, "tiny")
    assert (view.pid, view.address, view.state) == (started.pid, spec.address, "ready")
    assert view.payload == view.ready_payload == told.payload
    first.holders.stop(spec.instance, deadline_s=5)
    assert await first.event(HolderExit) == await second.event(HolderExit)
    assert second.of(HolderState) == []


async def test_an_end_is_kept_for_whoever_comes_later(stub: Path, model: Path, run_dir: Path, watch: Watch):
    """Let the engine crash while nobody is connected: the supervisor that adopts it learns how it ended."""
    knobs(model, crash="loading", crash_code=-6, crash_text="boom", load_gate=f"{model}.go")
    first, second = watch(), watch()
    spec = spec_for(run_dir, stub, model)
    view = await first.holders.start(spec)
    await first.event(HolderState)
    first.holders.close()
    Path(f"{model}.go").touch()
    await until(lambda: not Path(f"/proc/{view.pid}").exists(), "the holder to reap the engine")
    adopted = await second.holders.adopt(spec.folder)
    assert adopted is not None
    assert adopted.exit is not None
    assert (adopted.phase, adopted.exit.signal, adopted.exit.tail[-1]) == ("exited", 6, "boom")
    second.holders.forget(spec.instance)
    await until(lambda: not spec.folder.exists(), "the folder to go")
    assert second.events == []


async def test_r13_a_holder_of_another_instance_is_not_adopted(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Give a living instance's folder the name of another one, or know another nonce: not adopted."""
    first, second = watch(epoch=1), watch(epoch=2)
    spec = spec_for(run_dir, stub, model)
    await first.holders.start(spec)
    other = spec.folder.rename(spec.folder.with_name("host-1-2"))
    assert await second.holders.adopt(other) is None
    back = other.rename(spec.folder)
    assert await second.holders.adopt(back, nonce="0" * 32) is None
    assert await second.holders.adopt(back, nonce=spec.nonce) is not None


async def test_a_holder_that_is_known_to_hang_is_not_waited_for_anew(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """STOP a holder. A standby that hears nothing of it, and one who gave up the lead amid that wait, know
    so when they lead: it has the least time then. Once it goes on it is adopted.
    """
    first, second = watch(epoch=1), watch(epoch=2)
    spec = spec_for(run_dir, stub, model)
    view = await first.holders.start(spec)
    record = read_record(spec.folder)
    assert record is not None
    os.kill(record.holder_pid, signal.SIGSTOP)
    try:
        await second.holders.watch(spec.folder)
        second.holders.close()
        waiting = asyncio.create_task(second.holders.adopt(spec.folder))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        second.holders._owe_since[spec.instance] -= ANSWER_S  # as if that had been a while ago
        async with asyncio.timeout(ANSWER_S - 1):
            assert await second.holders.adopt(spec.folder) is None
    finally:
        os.kill(record.holder_pid, signal.SIGCONT)
    adopted = await second.holders.adopt(spec.folder)
    assert adopted is not None
    assert adopted.pid == view.pid
    assert second.holders._owe_since == {}


async def test_a_folder_without_a_holder_is_not_adopted(run_dir: Path, watch: Watch):
    """Adopt a folder that is empty, and one whose socket nobody serves any more."""
    watcher = watch()
    for name in ("empty", "dead"):
        (run_dir / "i" / name).mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "i" / "dead" / "h.sock"))
    assert [await watcher.holders.adopt(folder) for folder in instance_folders(run_dir)] == [None, None]
    assert [read_record(folder) for folder in instance_folders(run_dir)] == [None, None]


async def test_the_orders_of_an_old_leader_are_refused(stub: Path, model: Path, run_dir: Path, watch: Watch):
    """Let number 2 say hello; then number 1 can neither stop nor forget, and a standby can't either."""
    old, new, standby = watch(epoch=1), watch(epoch=2), watch(epoch=None, leader=False)
    spec = spec_for(run_dir, stub, model)
    view = await old.holders.start(spec)
    await old.event(HolderState, ready)
    adopted = await new.holders.adopt(spec.folder)
    assert adopted is not None
    assert adopted.epoch == 2
    await standby.holders.adopt(spec.folder)
    for watcher in (old, standby):
        watcher.holders.stop(spec.instance, deadline_s=0, force=True)
        refusal = await watcher.event(HolderRefused)
        assert refusal == HolderRefused("stop", "epoch", 2)
    assert alive(view.pid or 0)
    new.holders.stop(spec.instance, deadline_s=5)
    end = await old.event(HolderExit)
    assert end.code == 0
    record = read_record(spec.folder)
    assert record is not None
    connections = sockets_of(record.holder_pid)
    old.holders.forget(spec.instance)
    await until(lambda: sockets_of(record.holder_pid) == connections - 1, "the old leader to hang up")
    assert spec.folder.exists()
    new.holders.forget(spec.instance)
    await until(lambda: not spec.folder.exists(), "the folder to go")


def sockets_of(pid: int) -> int:
    """Return how many sockets a process has open."""
    return sum(str(handle.readlink()).startswith("socket:") for handle in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.parametrize("spare", [True, False])
async def test_no_engine_starts_without_its_leaders_number_on_disk(
    spare: bool, stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Write number 2 to the run folder and let number 1 start: refused, and no engine ran."""
    watcher = watch(epoch=1)
    if spare:
        await watcher.holders.start_spare()
    assert write_epoch(run_dir / "epoch", 2)
    with pytest.raises(HolderError, match="epoch"):
        await watcher.holders.start(spec_for(run_dir, stub, model))
    await until(lambda: list((run_dir / "i").iterdir()) == [], "the holder to leave")
    assert journal(model) == []


async def test_nobody_becomes_the_leader_between_the_look_at_the_number_and_the_start(
    stub: Path, model: Path, run_dir: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
):
    """Pause a holder in the middle of a start: a new number can't be written until the engine runs."""
    orders = FaultOrders(run_dir.parent / "orders")
    for name, value in orders.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(holders, "PASSED_ON", (*holders.PASSED_ON, *orders.env))
    orders.order("holder.forked", "pause")
    starting = asyncio.create_task(watch().holders.start(spec_for(run_dir, stub, model)))
    holder = await orders.hit("holder.forked")
    writing = asyncio.create_task(asyncio.to_thread(write_epoch, run_dir / "epoch", 2))
    try:
        with (run_dir / "epoch").open() as number, pytest.raises(BlockingIOError):
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert read_epoch(run_dir / "epoch") == 1
    finally:
        os.kill(holder, signal.SIGCONT)
    assert (await starting).pid
    assert await writing


async def test_c52_orphans_end_within_the_grace(engine: Path, model: Path, run_dir: Path, watch: Watch):
    """Of two supervisors one hangs up and nothing happens; then the other, and the instance ends."""
    leader, standby = watch(), watch(epoch=None, leader=False)
    # A KILL would come later than we wait.
    spec = spec_for(run_dir, engine, model, orphan_grace_s=0.3, stop_timeout_s=2 * PATIENCE_S)
    view = await leader.holders.start(spec)
    await leader.event(HolderState, ready)
    await standby.holders.adopt(spec.folder)
    leader.holders.close()
    async with client(spec) as http:
        for _ in range(50):
            assert (await http.get("/health")).status_code == 200
            await asyncio.sleep(0.02)
    standby.holders.close()
    await until(lambda: not spec.folder.exists(), "the folder to go")
    assert not alive(view.pid or 0)
    if events := journal(model):
        assert events[-1]["event"] == "exit_line"


async def test_a_supervisor_in_time_keeps_the_orphan(stub: Path, model: Path, run_dir: Path, watch: Watch):
    """Hang up and adopt again within the grace, several times for more than the grace in all: it lives."""
    grace = 6.0  # far more than a busy machine takes to connect again
    spec = spec_for(run_dir, stub, model, orphan_grace_s=grace)
    watcher = watch()
    view = await watcher.holders.start(spec)
    await watcher.event(HolderState, ready)
    for _ in range(8):
        watcher.holders.close()
        await asyncio.sleep(grace / 7)
        watcher = watch()
        adopted = await watcher.holders.adopt(spec.folder)
        assert adopted is not None
        assert (adopted.pid, adopted.phase) == (view.pid, "ready")


@pytest.mark.parametrize("phase", ["loading", "ready"])
async def test_c52_the_death_of_a_holder(phase: str, engine: Path, model: Path, run_dir: Path, watch: Watch):
    """Kill -9 the holder: it is told, a ready engine ends by itself, a loading one by its record."""
    knobs(model, load_seconds=30 if phase == "loading" else 0.05, fork_child=True)
    watcher = watch()
    spec = spec_for(run_dir, engine, model)
    view = await watcher.holders.start(spec)
    await watcher.event(HolderState, lambda event: event.state == phase)
    record = read_record(spec.folder)
    assert record is not None
    if phase == "ready":
        # The end of its input is lost to an engine that has said so and does not take requests yet.
        async with client(spec) as http:
            assert (await http.post("/completion", json={"prompt": "x", "n_predict": 1})).status_code == 200
    os.kill(record.holder_pid, signal.SIGKILL)
    await watcher.event(HolderLost)
    if phase == "ready":
        await until(lambda: not alive(view.pid or 0), "the engine to notice")
    kill_recorded(record)
    helpers = [entry["helper"] for entry in journal(model) if entry["event"] == "helper"]
    await until(lambda: not any(alive(pid) for pid in (view.pid or 0, *helpers)), "all to end")
    assert watcher.of(HolderExit) == []


async def test_a_deaf_holder_is_not_adopted_and_can_be_ended(
    stub: Path, model: Path, run_dir: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
):
    """Stop a holder with SIGSTOP: adopting gives up in time, and its record ends it and its engine."""
    first, second = watch(), watch()
    spec = spec_for(run_dir, stub, model)
    view = await first.holders.start(spec)
    await first.event(HolderState, ready)
    record = read_record(spec.folder)
    assert record is not None
    monkeypatch.setattr("llamastead.supervisor.holders.ANSWER_S", 0.5)
    os.kill(record.holder_pid, signal.SIGSTOP)
    assert await second.holders.adopt(spec.folder) is None
    kill_recorded(record)
    await until(lambda: not alive(record.holder_pid) and not alive(view.pid or 0), "both to end")


async def test_a_machine_that_shuts_down_ends_instances_in_order(
    engine: Path, model: Path, run_dir: Path, watch: Watch
):
    """Send TERM to the holder: exit line, code 0, folder removed; HUP does nothing."""
    watcher = watch()
    spec = spec_for(run_dir, engine, model)
    view = await watcher.holders.start(spec)
    await watcher.event(HolderState, ready)
    record = read_record(spec.folder)
    assert record is not None
    os.kill(record.holder_pid, signal.SIGHUP)
    assert alive(view.pid or 0)
    os.kill(record.holder_pid, signal.SIGTERM)
    end = await watcher.event(HolderExit)
    assert (end.code, end.asked) == (0, True)
    await until(lambda: not spec.folder.exists(), "the folder to go")
    assert watcher.of(HolderLost) == []


async def test_a_slow_reader_misses_lines_and_nothing_else(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Let a connection read nothing while megabytes of lines pass; then it learns the state and the end.

    One that reads on is told more: all, unless this machine leaves it no time.
    """
    knobs(model, stderr_lines=60_000, load_gate=f"{model}.go")
    watcher = watch()
    await watcher.holders.start_spare()
    [spare] = (run_dir / "i").iterdir()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(spare / "h.sock"))
        slow.sendall(b'{"v": 1, "type": "hello", "epoch": null, "role": "standby"}\n')
        spec = spec_for(run_dir, stub, model)
        await watcher.holders.start(spec)
        # If we were stopped all the time, no more was told to us than to the other. What comes now is.
        await watcher.event(HolderState)
        await caught_up(watcher, spec.instance)
        Path(f"{model}.go").touch()
        await watcher.event(HolderState, ready)
        watcher.holders.stop(spec.instance, deadline_s=5)
        await watcher.event(HolderExit)
        # The holder must be gone before we read: from then on the stream has an end.
        slow.settimeout(PATIENCE_S)
        received = b""
        ends = b'"type": "exit"', b'"phase": "exited"'
        while not (received.endswith(b"\n") and any(end in received for end in ends)):
            got = await asyncio.to_thread(slow.recv, 1 << 16)
            assert got
            received += got
    messages = [json.loads(line) for line in received.splitlines() if line.endswith(b"}")]
    missed = 60_000 - sum(len(message["lines"]) for message in messages if message["type"] == "lines")
    assert missed > 0
    states = [message["state"] for message in messages if message["type"] in ("state", "hello")]
    assert states[-1] == "ready"
    assert sum(len(event.lines) for event in watcher.of(HolderLines)) > 60_000 - missed


@contextlib.asynccontextmanager
async def foreign_supervisor(run_dir: Path, spec_file: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a supervisor of its own process that starts the instance in `spec_file` and then only watches."""
    program = """
import asyncio, json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[3], str(Path(sys.argv[3]).parent)]
from holder_kit import Watcher
from llamastead.supervisor.holders import HolderState
from llamastead.supervisor.launch import InstanceSpec

async def main():
    watcher = Watcher(Path(sys.argv[1]))
    spec = json.loads(Path(sys.argv[2]).read_text())
    await watcher.holders.start(InstanceSpec(**spec | {"argv": tuple(spec["argv"])}))
    await watcher.event(HolderState, lambda event: event.state == "ready")
    print("ready", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    arguments = (str(run_dir), str(spec_file), str(Path(__file__).parent))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_r17_a_killed_supervisor_takes_nothing_along(
    engine: Path, model: Path, run_dir: Path, watch: Watch
):
    """Kill -9 the supervisor during a stream: the stream ends whole and the same pid is adopted."""
    knobs(model, token_gate=f"{model}.go")
    spec = spec_for(run_dir, engine, model, options=("-c", "4096"))
    spec_file = run_dir / "spec.json"
    spec_file.write_text(json.dumps(spec.message()))
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    # The real engine takes a while for these, so that the stream is not over before we look.
    chat |= {"max_tokens": 1500, "n_probs": 100}
    async with foreign_supervisor(run_dir, spec_file) as supervisor, client(spec) as http:
        assert supervisor.stdout is not None
        assert await supervisor.stdout.readline() == b"ready\n"
        record = read_record(spec.folder)
        assert record is not None
        async with http.stream("POST", "/v1/chat/completions", json=chat) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            os.kill(record.engine_pid, signal.SIGSTOP)  # so that we are not too late
            os.killpg(supervisor.pid, signal.SIGKILL)
            await supervisor.wait()
            os.kill(record.engine_pid, signal.SIGCONT)
            assert "requests_processing 1\n" in (await http.get("/metrics")).text
            logged = Path(spec.log_path).stat().st_size
            Path(f"{model}.go").touch()
            received = [line async for line in lines if line]
        assert received[-1] == "data: [DONE]"
        watcher = watch()
        view = await watcher.holders.adopt(spec.folder)
        assert view is not None
        assert (view.pid, view.phase, view.nonce) == (record.engine_pid, "ready", spec.nonce)
        if not journal(model):
            await until(lambda: Path(spec.log_path).stat().st_size > logged, "what it said meanwhile")
        watcher.holders.stop(spec.instance, deadline_s=5)
        assert (await watcher.event(HolderExit)).code == 0
