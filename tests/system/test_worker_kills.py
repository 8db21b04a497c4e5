"""Workers and their jobs killed, told to end and cut off at bad moments: no job is lost or done by halves."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from fault_orders import FaultOrders
from stalling_proxy import StallingProxy
from tiny import stub_engine, tiny_model
from worker_kit import KEYS, Stand, Worker, children, is_gone, stand, until

from llamastead.shared.jobs import MEASURE, import_rq, measure_job
from llamastead.shared.secret import read_or_make_herd_secret, seal
from llamastead.shared.words import JobState

RUNS = int(os.environ.get("TERM_RUNS", "24"))


@pytest.fixture
def bench(short_tmp: Path) -> Iterator[Stand]:
    """A stand without workers."""
    with stand(short_tmp) as made:
        yield made


class Slow:
    """A measurement by a stub engine that tells nothing before `open` was called."""

    key = ("file", "preset")
    job = measure_job(key)

    def __init__(self, bench: Stand) -> None:
        self.bench = bench
        self.model = tiny_model(bench.folder / "m.gguf", 1)
        self.gate = bench.folder / "gate"
        knobs = {"memory_mib": {"Host": [9, 5, 2]}, "measure_gate": str(self.gate)}
        (bench.folder / "m.gguf.json").write_text(json.dumps(knobs))
        argv = [str(stub_engine(bench.folder)), "--model", str(self.model), "--fit", "on"]
        self.order = json.dumps({"commands": [argv], "variables": {}})

    async def ask(self) -> None:
        """Have it measured."""
        secret = read_or_make_herd_secret(self.bench.folder / "secret")
        assert await self.bench.jobs.measure_model("m", self.key, self.order, seal(secret, self.order))

    def open(self) -> None:
        """Let the engine tell."""
        self.gate.touch()

    def processes(self, worker: Worker) -> tuple[int, int]:
        """Wait until the engine of a worker's job runs; return the pids of job and engine."""

        def look() -> tuple[int, int] | None:
            for horse in children(worker.pid):
                for engine in children(horse):
                    return horse, engine
            return None

        found: tuple[int, int] = until(look, "engine", 30)
        return found

    def outcome(self) -> dict[str, str]:
        """Return what is kept of the measurement."""
        found: dict[bytes, bytes] = self.bench.client.hgetall(KEYS.measurement(*self.key))  # type: ignore[assignment]
        return {name.decode(): value.decode() for name, value in found.items()}


@pytest.fixture
def slow(bench: Stand) -> Slow:
    """A measurement that takes as long as a test wants."""
    return Slow(bench)


async def test_c181_c174_a_killed_worker_takes_job_and_engine_along_and_the_job_is_done_by_another(
    bench: Stand, slow: Slow
) -> None:
    """KILL a worker amid a measurement: its processes end; within a minute another does it; nothing stays."""
    first = bench.worker().ready()
    await slow.ask()
    pids = slow.processes(first)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: all(is_gone(pid) for pid in pids), "end of job and engine")
    assert bench.record(slow.job).state is JobState.RUNNING
    left = list((bench.folder / "w").iterdir())
    assert len(left) == 1
    second = bench.worker().ready()
    (line,) = await bench.swept("the dead worker")
    assert line.startswith("measure_model of m is handed in again: worker here-")
    slow.processes(second)
    assert not left[0].exists()
    slow.open()
    record = bench.over(slow.job)
    assert (record.state, record.attempt, record.lost) == (JobState.DONE, 2, 1)
    assert json.loads(slow.outcome()["min"])["host"]["model"] == 10 << 20
    until(lambda: second.state() == "idle", "idle worker")
    # Nothing of the job is left: no record of RQ's, no lock, no folder.
    assert [key for key in bench.keys_without_end() if ":rq:job" in key or ":lock" in key] == []
    assert list((bench.folder / "w").iterdir()) == []


async def test_c190_c181_a_killed_job_fails_with_a_reason_and_is_not_tried_for_ever(
    bench: Stand, slow: Slow
) -> None:
    """KILL the job's process: the engine ends with it; the reason names signal, process and memory."""
    worker = bench.worker().ready()
    await slow.ask()
    horse, engine = slow.processes(worker)
    os.kill(horse, signal.SIGKILL)
    record = bench.over(slow.job)
    until(lambda: is_gone(engine), "end of the engine")
    assert record.state is JobState.FAILED
    assert f"(pid {horse}) was killed by signal 9, likely for lack of memory" in record.error
    assert "it had used up to" in record.error
    assert (slow.outcome()["state"], slow.outcome()["failures"]) == ("failed", "1")
    assert slow.outcome()["error"] == record.error
    assert await bench.jobs.sweep() == []
    until(lambda: worker.state() == "idle", "idle worker")


async def test_c189_a_job_that_gets_on_is_not_ended_and_one_that_hangs_is(bench: Stand, slow: Slow) -> None:
    """With a limit of 1 s let an engine talk for 12 s, then hang the job: only then it ends, and says so."""
    worker = bench.worker().ready()
    await slow.ask()
    bench.client.hset(KEYS.job(slow.job), "stall_s", 1)
    horse, _ = slow.processes(worker)
    began = bench.record(slow.job).changed_ms
    until(lambda: bench.record(slow.job).changed_ms > began + 12_000, "12 s of progress", 60)
    assert bench.record(slow.job).state is JobState.RUNNING
    os.kill(horse, signal.SIGSTOP)
    record = bench.over(slow.job, 60)
    assert (record.state, record.error) == (JobState.FAILED, "no progress for 1 s")
    assert is_gone(horse)


async def test_a_job_is_called_off(bench: Stand, slow: Slow) -> None:
    """Call off a queued job and a running one: the one was never there, the other ends within seconds."""
    await slow.ask()
    await bench.jobs.cancel(slow.job)
    assert bench.records.read(slow.job) is None
    worker = bench.worker().ready()
    await slow.ask()
    pids = slow.processes(worker)
    await bench.jobs.cancel(slow.job)
    record = bench.over(slow.job)
    assert (record.state, record.error) == (JobState.FAILED, "called off")
    until(lambda: all(is_gone(pid) for pid in pids), "end of job and engine")
    assert slow.outcome() == {}


@pytest.mark.parametrize(
    ("point", "worker_dies"),
    [("start_job.before", True), ("start_job.after", True), ("end_job.after", False)],
)
async def test_c178_c181_a_job_survives_a_kill_at_each_step(
    bench: Stand, point: str, worker_dies: bool, tmp_path: Path
) -> None:
    """KILL the process that comes by a step of a job: the job is done once all the same, by whom ever."""
    orders = FaultOrders(tmp_path / "faults")
    first = bench.worker(env=orders.env).ready()
    orders.order(point)
    model = tiny_model(tmp_path / "m.gguf", 1)
    await bench.jobs.read_metadata("m", model, None, "id")
    pid = await orders.hit(point)
    assert (pid == first.pid) is worker_dies
    if worker_dies:
        assert first.process.wait(10) == -signal.SIGKILL
        bench.worker().ready()
        bench.let_time_pass("metadata-id")
        await bench.swept("the lost job")
    record = bench.over("metadata-id")
    assert record.state is JobState.DONE
    assert record.attempt == (2 if point == "start_job.after" else 1)
    until(lambda: bench.client.hget(KEYS.metadata("id"), "architecture") == b"llama", "what the job read")


@pytest.mark.parametrize("point", ["beat_job.before", "beat_job.after", "end_job.before", "end_job.after"])
async def test_c178_c181_a_measurement_survives_a_kill_at_each_step(
    bench: Stand, slow: Slow, point: str, tmp_path: Path
) -> None:
    """KILL the process that measures at a step of its work: the job ends once, done or failed with the
    reason, what was found is kept; no engine and no folder is left, and the next order measures.
    """
    orders = FaultOrders(tmp_path / "faults")
    worker = bench.worker(env=orders.env).ready()
    slow.open()
    orders.order(point)
    await slow.ask()
    pid = await orders.hit(point)
    assert pid != worker.pid
    record = bench.over(slow.job)
    if record.state is JobState.FAILED:
        assert f"(pid {pid}) was killed by signal 9" in record.error
    assert (record.state is JobState.DONE) is (point == "end_job.after")
    assert ("min" in slow.outcome()) is point.startswith("end_job")
    until(lambda: worker.state() == "idle", "idle worker")
    assert children(worker.pid) == []
    await slow.ask()
    until(lambda: bench.record(slow.job).state is JobState.DONE, "the measurement")
    assert slow.outcome()["state"] == "measured"
    until(lambda: list((bench.folder / "w").iterdir()) == [], "its folders to go")


async def test_c183_c193_told_to_end_at_any_moment_a_worker_loses_no_job(
    bench: Stand, tmp_path: Path
) -> None:
    """TERM workers at random moments of a stream of jobs, TERM_RUNS times: each job is done, and done once.

    Nothing had to be swept: no signal came between taking a job and starting it, none broke a call of Redis.
    """
    seed = int(os.environ.get("TERM_SEED", random.randrange(1 << 30)))
    print(f"TERM_SEED={seed}")
    source, model, names = random.Random(seed), tiny_model(tmp_path / "m.gguf", 1), []

    async def ask(count: int) -> None:
        for _ in range(count):
            names.append(f"metadata-{len(names)}")
            await bench.jobs.read_metadata("m", model, None, str(len(names) - 1))

    following = bench.worker()
    for _ in range(RUNS):
        worker, following = following.ready(), bench.worker()
        await ask(source.randrange(1, 6))
        await asyncio.sleep(source.random() * 0.08)
        os.kill(worker.pid, signal.SIGTERM)
        await ask(1)  # it need not sit out its wait for a job
        states = [bench.record(name).state for name in names]
        assert set(states) <= set(JobState)
        assert worker.process.wait(30) == 0, worker.log.read_text()
        assert "Traceback" not in worker.log.read_text()
        shutil.rmtree(worker.folder / "w", ignore_errors=True)
    following.ready()
    for name in names:
        record = bench.over(name)
        assert (record.state, record.attempt) == (JobState.DONE, 1), name
    assert await bench.jobs.sweep() == []


async def test_term_waits_for_the_job_at_hand(bench: Stand, slow: Slow) -> None:
    """TERM once amid a measurement: the job ends first, whole, then the worker, with code 0."""
    worker = bench.worker().ready()
    await slow.ask()
    pids = slow.processes(worker)
    os.kill(worker.pid, signal.SIGTERM)
    seen = bench.record(slow.job).changed_ms
    until(lambda: bench.record(slow.job).changed_ms > seen + 1000, "job that goes on")
    assert not any(is_gone(pid) for pid in pids)
    slow.open()
    assert worker.process.wait(30) == 0
    record = bench.record(slow.job)
    assert (record.state, record.attempt) == (JobState.DONE, 1)
    assert slow.outcome()["state"] == "measured"


async def test_c193_signals_set_a_flag_and_raise_nothing(bench: Stand, slow: Slow) -> None:
    """TERM twice amid a measurement: the job is given back, not failed, and another worker does it."""
    first = bench.worker().ready()
    await slow.ask()
    pids = slow.processes(first)
    os.kill(first.pid, signal.SIGTERM)
    seen = bench.record(slow.job).changed_ms
    until(lambda: bench.record(slow.job).changed_ms > seen + 1000, "job that goes on after the first")
    assert not any(is_gone(pid) for pid in pids)
    os.kill(first.pid, signal.SIGTERM)
    assert first.process.wait(30) == 0
    assert "Traceback" not in first.log.read_text()
    record = bench.record(slow.job)
    assert (record.state, record.attempt, record.lost) == (JobState.QUEUED, 1, 0)
    slow.open()
    bench.worker().ready()
    bench.let_time_pass(slow.job)
    await bench.swept("the job that was given back")
    assert bench.over(slow.job).state is JobState.DONE


async def test_c184_what_rq_believes_changes_nothing(bench: Stand, slow: Slow) -> None:
    """Have RQ's own clean-up fail a job that runs: its record says running, then done, with its outcome."""
    worker = bench.worker().ready()
    await slow.ask()
    slow.processes(worker)
    rq = import_rq(KEYS)
    queue = rq.Queue(MEASURE, connection=bench.client, serializer=rq.serializers.JSONSerializer)
    queue.started_job_registry.cleanup(timestamp=time.monotonic() + 1e12)
    assert bench.client.hget(f"{KEYS.rq}:job:{slow.job}", "status") == b"failed"
    assert bench.record(slow.job).state is JobState.RUNNING
    assert await bench.jobs.sweep() == []
    slow.open()
    record = bench.over(slow.job)
    assert (record.state, record.attempt) == (JobState.DONE, 1)
    assert slow.outcome()["state"] == "measured"
    until(lambda: worker.state() == "idle", "idle worker")


@pytest.mark.parametrize("busy", [False, True])
async def test_c186_a_worker_that_redis_forgot_registers_again(bench: Stand, slow: Slow, busy: bool) -> None:
    """Put an empty Redis in the place of its own, idle and busy: it is listed again, the same process."""
    worker = bench.worker().ready()
    if busy:
        await slow.ask()
        slow.processes(worker)
    bench.restart_redis()
    until(lambda: worker.about(), "worker in the new Redis", 60)
    until(lambda: bench.client.smembers(f"{KEYS.rq}:workers"), "worker in RQ's list", 60)
    assert worker.process.poll() is None
    slow.open()
    until(lambda: worker.state() == "idle", "idle worker", 60)
    log = worker.log.read_text()
    assert busy or "Traceback" not in log
    assert log.count("trying until it is back") <= 1 + busy


def healthy(bench: Stand, url: str) -> bool:
    """Ask what the container's health check asks."""
    place = bench.folder / "url"
    place.write_text(url)
    script = Path(__file__).parents[2] / "deploy/image/healthy.py"
    environ = os.environ | {"LLAMASTEAD_REDIS_URL_FILE": str(place)}
    return (
        subprocess.run([sys.executable, script, "worker"], env=environ, capture_output=True).returncode == 0
    )


async def test_c187_a_worker_whose_redis_neither_answers_nor_closes_comes_back(
    bench: Stand, tmp_path: Path
) -> None:
    """Stall the way to Redis without closing anything: one line says so, the health check fails; resume."""
    proxy = StallingProxy(bench.folder / "valkey.sock")
    try:
        url = f"redis://127.0.0.1:{proxy.port}"
        worker = bench.worker(url).ready()
        assert healthy(bench, url)
        proxy.stall()
        until(lambda: "does not answer in time" in worker.log.read_text(), "word of the outage", 60)
        until(lambda: not worker.about(), "end of its life in Redis", 60)
        assert not healthy(bench, bench.url)
        assert proxy.swallowed > 0
        proxy.resume()
        until(lambda: worker.state() == "idle", "worker that is back", 60)
        await bench.jobs.read_metadata("m", tiny_model(tmp_path / "m.gguf", 1), None, "id")
        assert bench.over("metadata-id").state is JobState.DONE
        until(lambda: "Redis is back after" in worker.log.read_text(), "word of the end of the outage")
        log = worker.log.read_text()
        assert log.count("trying until it is back") == 1, log
        assert "Traceback" not in log
        assert healthy(bench, url)
        worker.process.kill()
        worker.process.wait(10)
        assert not healthy(bench, url), "Redis lists it still, and its process is gone"
    finally:
        proxy.close()


def test_c192_the_rq_that_is_installed_is_one_that_was_tested() -> None:
    """Compare what pyproject.toml allows with what is installed: 3.0.0 is lowest and highest.

    All that the worker replaces of it is there to be replaced.
    """
    rq = import_rq(KEYS)
    from llamastead.measure_worker.worker import MeasureWorker, TableJob

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert [line for line in project["project"]["dependencies"] if line.startswith("rq")] == ["rq>=3,<4"]
    assert version("rq").startswith("3.")
    ours = {"was_stopped", "_insist"}
    replaced: dict[type, Any] = {MeasureWorker: rq.Worker, TableJob: rq.job.Job}
    for mine, theirs in replaced.items():
        names = {name for name, value in vars(mine).items() if callable(value) or isinstance(value, property)}
        names -= {"__init__", "desk"} | ours
        assert [name for name in sorted(names) if not hasattr(theirs, name)] == []
