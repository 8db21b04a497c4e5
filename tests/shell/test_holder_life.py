"""The holder from its start to the removal of its folder, with the stub and with the real engine."""

import asyncio
import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from holder_kit import PATIENCE_S, Watcher, alive, caught_up, client, journal, spec_for, until

from llamastead.supervisor.holders import (
    PROGRAM,
    HolderError,
    HolderExit,
    HolderLines,
    HolderLost,
    HolderState,
    HolderStop,
    Record,
    kill_recorded,
    read_record,
)
from llamastead.supervisor.launch import InstanceSpec

Watch = Callable[..., Watcher]


def knobs(model: Path, **given: object) -> None:
    """Set what the stub does with a model."""
    Path(f"{model}.json").write_text(json.dumps(given))


def ready(event: HolderState) -> bool:
    """Whether a state line says ready."""
    return event.state == "ready"


async def test_an_instance_from_start_to_forget(engine: Path, model: Path, run_dir: Path, watch: Watch):
    """Start, wait for ready, look at view, record and modes; stop; nothing but the log is left."""
    watcher = watch()
    spec = spec_for(run_dir, engine, model)
    view = await watcher.holders.start(spec)
    assert (view.phase, view.instance, view.nonce) == ("starting", spec.instance, spec.nonce)
    assert watcher.holders.model_of(spec.instance) == "tiny"
    told = await watcher.event(HolderState, ready)
    assert told.payload["meta"]["n_ctx_train"] == 2048
    states = [event.state for event in watcher.of(HolderState)]
    assert states[0] == "loading"
    assert states[-1] == "ready"

    record = read_record(spec.folder)
    assert record is not None
    assert (record.engine_pid, record.nonce, record.address) == (view.pid, spec.nonce, spec.address)
    assert os.getpgid(record.engine_pid) == record.engine_pid
    assert json.loads((spec.folder / "intent.json").read_text())["holder_pid"] == record.holder_pid
    assert "test-key" not in "".join(path.read_text() for path in spec.folder.glob("*.json"))
    for name in ("e.sock", "h.sock", "record.json"):
        assert stat.S_IMODE((spec.folder / name).stat().st_mode) & 0o077 == 0
    async with client(spec) as http:
        assert (await http.post("/tokenize", json={"content": "hi"})).status_code == 200
    # The stub counts a request for a moment longer than its client waits for the answer.
    await until(lambda: not list(model.parent.glob("*.serving.*")), "the request to be over")

    watcher.holders.stop(spec.instance, deadline_s=5)
    end = await watcher.event(HolderExit)
    assert (end.code, end.signal, end.phase, end.asked, end.killed) == (0, None, "ready", True, False)
    assert [event.step for event in watcher.of(HolderStop)] == ["unlinked", "exit"]
    assert not alive(record.engine_pid)
    assert spec.folder.exists()
    watcher.holders.forget(spec.instance)
    await until(lambda: not spec.folder.exists(), "the folder to go")
    await until(lambda: not alive(record.holder_pid), "the holder to go")
    assert "listening" in Path(spec.log_path).read_text()
    assert watcher.of(HolderLost) == []


async def stood_still_after_the_end(watcher: Watcher, spec: InstanceSpec) -> Record:
    """Start and stop an instance and STOP its holder, which then waits to be told to leave."""
    await watcher.holders.start(spec)
    await watcher.event(HolderState, ready)
    record = read_record(spec.folder)
    assert record is not None
    watcher.holders.stop(spec.instance, deadline_s=5)
    await watcher.event(HolderExit)
    os.kill(record.holder_pid, signal.SIGSTOP)
    return record


async def test_a_holder_killed_between_the_end_and_forget(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """STOP a holder once its engine has ended, tell it to leave, KILL it: its folder goes all the same."""
    watcher = watch()
    spec = spec_for(run_dir, stub, model)
    record = await stood_still_after_the_end(watcher, spec)
    watcher.holders.forget(spec.instance)
    os.kill(record.holder_pid, signal.SIGKILL)
    await until(lambda: not spec.folder.exists(), "the folder to go")
    assert watcher.of(HolderLost) == []


async def test_a_supervisor_that_leaves_hangs_up_on_a_holder_that_is_about_to(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """STOP a holder once its engine has ended, tell it to leave and close all: no connection stays open."""
    watcher = watch()
    spec = spec_for(run_dir, stub, model)
    record = await stood_still_after_the_end(watcher, spec)
    [link] = watcher.holders._links.values()
    watcher.holders.forget(spec.instance)
    assert link.connected
    watcher.holders.close()
    await until(lambda: not link.connected, "the connection to close")
    os.kill(record.holder_pid, signal.SIGCONT)
    await until(lambda: not spec.folder.exists(), "the folder to go")


async def test_a_spare_becomes_the_instance(stub: Path, model: Path, run_dir: Path, watch: Watch):
    """Start a spare, see that it is the one that holds the instance, and that another start has its own."""
    watcher = watch()
    await watcher.holders.start_spare()
    await watcher.holders.start_spare()
    spares = list((run_dir / "i").iterdir())
    first = await watcher.holders.start(spec_for(run_dir, stub, model, "host-1-1"))
    second = await watcher.holders.start(spec_for(run_dir, stub, model, "host-1-2"))
    assert [path.name[:6] for path in spares] == ["spare-"]
    assert sorted(path.name for path in (run_dir / "i").iterdir()) == ["host-1-1", "host-1-2"]
    assert first.pid != second.pid
    await watcher.event(HolderState, ready)


async def test_a_holder_keeps_nothing_open_that_its_supervisor_was_given(run_dir: Path, watch: Watch):
    """Start a spare beside a file that all children inherit, as a wrapper's lock is: it lets go of that."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    watcher = watch()
    await watcher.holders.start_spare()
    os.close(writer)
    os.set_blocking(reader, False)

    def at_end() -> bool:
        try:
            return os.read(reader, 1) == b""
        except BlockingIOError:
            return False

    await until(at_end, "the holder to close it")
    assert len(list((run_dir / "i").iterdir())) == 1
    os.close(reader)


async def test_a_spare_without_its_supervisor_leaves(run_dir: Path, watch: Watch):
    """Start a spare and hang up: within seconds its process and its folder are gone."""
    watcher = watch()
    await watcher.holders.start_spare()
    watcher.holders.close()
    await until(lambda: list((run_dir / "i").iterdir()) == [], "the spare to leave")


async def test_a_stale_engine_socket_is_removed(real_engine: Path, model: Path, run_dir: Path, watch: Watch):
    """Leave a socket file where the engine will bind, which the engine itself would fail on."""
    watcher = watch()
    await watcher.holders.start_spare()
    [spare] = (run_dir / "i").iterdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(spare / "e.sock"))
    await watcher.holders.start(spec_for(run_dir, real_engine, model))
    await watcher.event(HolderState, ready)


async def test_a_socket_path_that_is_too_long_is_refused(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Ask for a socket beyond 107 bytes: the refusal says what to do, nothing is started."""
    watcher = watch()
    deep = run_dir / ("d" * 80)
    with pytest.raises(HolderError, match=r"at most 107 are possible: use a --run-dir .* bytes shorter"):
        await watcher.holders.start(spec_for(deep, stub, model))
    assert not deep.exists()


async def test_no_instance_opens_a_tcp_port(real_engine: Path, model: Path, run_dir: Path, watch: Watch):
    """Compare the sockets that the ready engine has open with those in /proc/net/tcp and tcp6."""
    watcher = watch()
    view = await watcher.holders.start(spec_for(run_dir, real_engine, model))
    await watcher.event(HolderState, ready)
    links = [str(path.readlink()) for path in Path(f"/proc/{view.pid}/fd").iterdir()]
    ours = {link[len("socket:[") : -1] for link in links if link.startswith("socket:")}
    tables = (Path(f"/proc/{view.pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    assert ours
    assert ours & {row[9] for row in rows} == set()


async def test_an_engine_that_can_not_be_run(model: Path, run_dir: Path, watch: Watch):
    """Start a program that does not exist: the exit tells it, as for any other end."""
    watcher = watch()
    await watcher.holders.start(spec_for(run_dir, run_dir / "nothing-here", model))
    end = await watcher.event(HolderExit)
    assert (end.code, end.phase, end.asked) == (127, "starting", False)
    assert "No such file or directory" in end.tail[-1]


async def test_an_engine_that_dies_at_its_load(real_engine: Path, model: Path, run_dir: Path, watch: Watch):
    """Cut the model file short: exit code and phase arrive, and the holder waits for forget."""
    model.write_bytes(model.read_bytes()[:5000])
    watcher = watch()
    spec = spec_for(run_dir, real_engine, model)
    await watcher.holders.start(spec)
    end = await watcher.event(HolderExit)
    # What it says is not looked at: an engine that fails within milliseconds may lose its own last lines.
    assert (end.code, end.phase, end.asked) == (1, "loading", False)
    watcher.holders.forget(spec.instance)
    await until(lambda: not spec.folder.exists(), "the folder to go")


async def test_an_engine_that_refuses_its_arguments(
    real_engine: Path, model: Path, run_dir: Path, watch: Watch
):
    """Give an argument that it does not know: exit code, phase and its words arrive."""
    watcher = watch()
    await watcher.holders.start(spec_for(run_dir, real_engine, model, options=("--frobnicate",)))
    end = await watcher.event(HolderExit)
    assert (end.code, end.phase, end.asked) == (1, "starting", False)
    assert "error: invalid argument: --frobnicate" in end.tail


async def test_logs_are_bounded_and_pipes_drained(stub: Path, model: Path, run_dir: Path, watch: Watch):
    """Let the engine write ten times the bound before it loads: two files stay below the bound."""
    gate = Path(f"{model}.go")
    noise = {"stderr_lines": 10_000, "crash_text": "the very last line"}
    knobs(model, crash="ready", load_gate=str(gate), **noise)
    watcher = watch()
    spec = spec_for(run_dir, stub, model, log_bytes=100_000)
    await watcher.holders.start(spec)
    await until(
        lambda: Path(spec.log_path).exists() and "noise 9999 " in Path(spec.log_path).read_text(), "noise"
    )
    await caught_up(watcher, spec.instance)
    gate.touch()
    end = await watcher.event(HolderExit)
    assert len(end.tail) == 50
    assert end.tail[-1] == "the very last line"
    log = Path(spec.log_path)
    sizes = [path.stat().st_size for path in sorted(log.parent.iterdir())]
    assert [path.name for path in sorted(log.parent.iterdir())] == ["tiny.log", "tiny.log.1"]
    assert all(size <= 100_000 for size in sizes)
    assert "the very last line" in log.read_text()
    assert "ended, exit code 1" in log.read_text().splitlines()[-1]
    lines = [line for event in watcher.of(HolderLines) for line in event.lines]
    assert lines[-1] == "the very last line"


async def test_a_settled_instance_is_passed_on_by_what_matters(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Ask until the information among its lines stays behind; warnings come on, and the log file has all."""
    said = (
        "0.01.000.000 I srv  params:",
        "\ttop_k = 40",
        "0.01.000.001 W srv  slow:",
        "\twhy",
        "GGML_ASSERT(x) failed",
        "0.01.000.002 E srv  bad",
    )
    knobs(model, chatter="\n".join(said))
    watcher = watch()
    spec = spec_for(run_dir, stub, model)
    await watcher.holders.start(spec)
    await watcher.event(HolderState, ready)
    told, asked = list[str](), itertools.count(1)
    async with client(spec) as engine, asyncio.timeout(PATIENCE_S):
        while told.count(said[0]) == told.count(said[-1]):
            assert (await engine.post("/completion", json={"prompt": "x"})).status_code == 200
            told = await lines_until(watcher, said[-1], next(asked))
    assert tuple(told[-4:]) == said[2:]
    assert [Path(spec.log_path).read_text().splitlines().count(line) for line in said] == [
        next(asked) - 1
    ] * 6


async def test_an_engine_that_warns_all_the_time_floods_nobody(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Ask until warnings stay behind: one line says so, and the log file has all of them."""
    knobs(model, chatter="\n".join(["0.01.000.001 W srv  slow"] * 100))
    watcher = watch()
    spec = spec_for(run_dir, stub, model, log_bytes=1 << 30)  # so that the file is not begun anew meanwhile
    await watcher.holders.start(spec)
    await watcher.event(HolderState, ready)
    asked = 0
    async with client(spec) as engine, asyncio.timeout(PATIENCE_S):
        while not any("log file only" in line for event in watcher.of(HolderLines) for line in event.lines):
            assert (await engine.post("/completion", json={"prompt": "x"})).status_code == 200
            asked += 1
    warned = [line for event in watcher.of(HolderLines) for line in event.lines if " W " in line]
    assert len(warned) < asked * 100
    await until(lambda: Path(spec.log_path).read_text().count(" W ") == asked * 100, "all lines in the file")


async def lines_until(watcher: Watcher, line: str, times: int) -> list[str]:
    """Return the lines that a holder told, once this one came so many times."""

    def told() -> list[str]:
        return [line for event in watcher.of(HolderLines) for line in event.lines]

    await until(lambda: told().count(line) == times, f"line {times}")
    return told()


@pytest.mark.parametrize("end", ["stop", "crash", "kill"])
async def test_r7_no_helper_of_the_engine_outlives_it(
    end: str, stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Fork a helper that ignores TERM; end the engine by a stop, a crash and a KILL from outside."""
    knobs(model, fork_child=True, exit_after=0.05 if end == "crash" else None)
    watcher = watch()
    spec = spec_for(run_dir, stub, model)
    view = await watcher.holders.start(spec)
    await watcher.event(HolderState, ready)
    [helper] = [entry["helper"] for entry in journal(model) if entry["event"] == "helper"]
    assert alive(helper) or end == "crash"
    if end == "stop":
        watcher.holders.stop(spec.instance, deadline_s=5)
    if end == "kill":
        os.kill(view.pid, 9)
    told = await watcher.event(HolderExit)
    assert (told.asked, told.signal) == (end == "stop", 9 if end == "kill" else None)
    await until(lambda: not alive(helper), "the helper to end", PATIENCE_S)


async def test_r13_a_stranger_with_the_same_pid_is_not_killed(
    stub: Path, model: Path, run_dir: Path, watch: Watch
):
    """Alter the record's start times, then its boot: nothing is killed; with the true one, all."""
    knobs(model, fork_child=True)
    watcher = watch()
    spec = spec_for(run_dir, stub, model)
    view = await watcher.holders.start(spec)
    await watcher.event(HolderState, ready)
    record = read_record(spec.folder)
    assert record is not None
    reused = replace(record, holder_start=1, engine_start=1, nonce="0" * 32)
    assert kill_recorded(reused) == []
    assert kill_recorded(replace(record, boot_id="another")) == []
    assert alive(record.holder_pid)
    assert alive(view.pid)
    [helper] = [entry["helper"] for entry in journal(model) if entry["event"] == "helper"]
    # The engine may end by itself between the holder's end and its own turn.
    assert {record.holder_pid, helper} <= set(kill_recorded(record))
    await until(lambda: not any(map(alive, (record.holder_pid, view.pid, helper))), "all to end")
    assert kill_recorded(record) == []
    await watcher.event(HolderLost)


def test_the_holder_imports_nothing_slow():
    """Import its main module with its own interpreter flags and look at what came along."""
    interpreter = getattr(sys, "_base_executable", sys.executable)
    program = f"import sys; sys.path.insert(0, {str(PROGRAM)!r}); import holding; print(*sys.modules)"
    run = subprocess.run([interpreter, "-I", "-S", "-c", program], check=True, capture_output=True, text=True)
    slow = {"asyncio", "logging", "multiprocessing", "pathlib", "site", "subprocess", "threading", "typing"}
    assert slow & set(run.stdout.split()) == set()
