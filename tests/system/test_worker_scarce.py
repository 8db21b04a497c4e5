"""Workers that lack a Redis that can save, or files to open, for a while: they wait, say why, and go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from few_files import no_more_files
from full_disk import full, small_disk
from redis.exceptions import ResponseError
from test_worker_kills import Slow
from tiny import tiny_model
from worker_kit import Stand, stand, until

from llamastead.shared.words import JobState

REFUSED = "MISCONF"
NO_FILES = "Too many open files"


@pytest.fixture
def bench(short_tmp: Path) -> Iterator[Stand]:
    """A stand without workers, whose Valkey saves to a small disk, though never by itself."""
    with small_disk(short_tmp / "disk", "4m") as disk:
        options = ("--dir", str(disk), "--save", "3600 1000000")
        with stand(short_tmp, *options) as made:
            yield made


def refuses_writes(bench: Stand) -> bool:
    """Whether Valkey takes no writes since it could not save."""
    try:
        bench.client.set("probe", 1, px=1)
    except ResponseError as error:
        return REFUSED in str(error)
    return False


@contextmanager
def failing_saves(bench: Stand) -> Iterator[None]:
    """Fill the disk of Valkey and have it save: it takes no writes any more until it could."""
    with full(bench.folder / "disk"):
        bench.client.bgsave()
        until(lambda: refuses_writes(bench), "Valkey to refuse writes")
        yield
        assert refuses_writes(bench)
    bench.client.bgsave()
    until(lambda: not refuses_writes(bench), "Valkey to take writes")


@pytest.mark.parametrize("busy", [False, True])
async def test_a_worker_waits_while_redis_cannot_save(bench: Stand, busy: bool, tmp_path: Path) -> None:
    """Have Valkey refuse all writes since its disk is full, while a worker waits and while it measures: it
    says why in one line, and the same process goes on when there is room; a job is done once.
    """
    slow = Slow(bench)
    worker = bench.worker().ready()
    if busy:
        await slow.ask()
        slow.processes(worker)
    with failing_saves(bench):
        until(lambda: REFUSED in worker.log.read_text(), "word of the refusal", 60)
        if busy:
            slow.open()
        assert worker.process.poll() is None
    until(lambda: worker.state() == "idle", "idle worker", 60)
    if busy:
        record = bench.over(slow.job, 60)
        assert (record.state, record.lost) == (JobState.DONE, 0)
        assert slow.outcome()["state"] == "measured"
    await bench.jobs.read_metadata("m", tiny_model(tmp_path / "m.gguf", 1), None, "id")
    assert bench.over("metadata-id").state is JobState.DONE
    log = worker.log.read_text()
    assert worker.process.poll() is None
    assert "Traceback" not in log, log
    assert log.count("trying until it is back") == 1, log
    assert "make room on its disk" in log
    until(lambda: "Redis is back after" in worker.log.read_text(), "word of the end")


async def test_a_worker_waits_while_redis_is_a_replica(bench: Stand, tmp_path: Path) -> None:
    """Make Valkey a replica while a worker waits for a job in it: the same process goes on afterwards."""
    worker = bench.worker().ready()

    def waits() -> bool:
        return any(client["cmd"] == "blpop" for client in bench.client.client_list())

    until(waits, "the worker to wait for a job")
    bench.client.replicaof("127.0.0.1", 1)
    until(lambda: "read only replica" in worker.log.read_text(), "word of the replica", 60)
    bench.client.replicaof("NO", "ONE")
    until(lambda: "Redis is back after" in worker.log.read_text(), "word of the end", 60)
    await bench.jobs.read_metadata("m", tiny_model(tmp_path / "m.gguf", 1), None, "id")
    assert bench.over("metadata-id").state is JobState.DONE
    assert worker.process.poll() is None
    assert "Traceback" not in worker.log.read_text(), worker.log.read_text()


@pytest.mark.parametrize("beyond", [0, 1])
async def test_a_worker_without_files_waits_for_some(bench: Stand, beyond: int, tmp_path: Path) -> None:
    """Let an idle worker open no more files, or one, and ask for a job: the worker says why it is not done,
    or the job does, and the same process does the next one when there are files. None is lost.
    """
    worker = bench.worker().ready()
    model = tiny_model(tmp_path / "m.gguf", 1)
    with no_more_files(worker.pid, beyond):
        await bench.jobs.read_metadata("m", model, None, "first")
        until(lambda: NO_FILES in worker.log.read_text(), "word of the shortage")
        if beyond:
            assert NO_FILES in bench.over("metadata-first").error
        assert worker.process.poll() is None
    await bench.jobs.read_metadata("m", model, None, "second")
    assert bench.over("metadata-second", 60).state is JobState.DONE
    if not beyond:
        bench.let_time_pass("metadata-first")
        await bench.swept("the job that was taken and could not be read")
        assert bench.over("metadata-first").state is JobState.DONE
    assert worker.process.poll() is None
    log = worker.log.read_text()
    assert "Traceback" not in log, log
    assert beyond or "ulimit -n" in log, log
