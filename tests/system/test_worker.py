"""The worker as a process on a real Valkey: real jobs run, anything else fails without being imported."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as blocking
from tiny import tiny_model
from valkey_server import start_valkey

from llamastead.shared.jobs import MEASURE, Jobs, file_identity, import_rq
from llamastead.shared.store.connect import connect
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys

KEYS = Keys("llamastead:")
PROGRAM = (
    "import sys; from llamastead.measure_worker.main import run;"
    "from llamastead.shared.settings import Settings; sys.exit(run(Settings()))"
)


def until(found: Callable[[], Any], what: str, seconds: float = 20) -> Any:
    """Return the first true value of `found`."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"no {what} after {seconds} s"
        time.sleep(0.02)
    return value


def opened(fifo: Path) -> int | None:
    """Return the writing end of a pipe, None while nobody reads it."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


class Worker:
    """A worker process and a look into its Redis."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder}/valkey.sock"
        self.redis = blocking.Redis(unix_socket_path=f"{folder}/valkey.sock", decode_responses=True)
        self.log = folder / "worker.log"
        environ = os.environ | {
            "LLAMASTEAD_REDIS_URL": self.url,
            "LLAMASTEAD_RUN_DIR": str(folder),
            "LLAMASTEAD_HOST_ID": "here",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM], env=environ, stderr=log, stdout=log, cwd=folder
            )

    def state(self) -> str | None:
        names = self.redis.zrange(KEYS.workers, 0, -1)
        return self.redis.hget(KEYS.worker(names[0]), "state") if names else None

    def failed(self, job: str) -> str | None:
        """Return why a job failed, None while it has not."""
        if self.redis.hget(f"{KEYS.rq}:job:{job}", "status") != "failed":
            return None
        results = self.redis.xrange(f"{KEYS.rq}:results:{job}")
        return zlib.decompress(b64decode(results[-1][1]["exc_string"])).decode()


@pytest.fixture
def worker(short_tmp: Path) -> Iterator[Worker]:
    server = start_valkey(short_tmp, "--save", "")
    worker = Worker(short_tmp)
    try:
        until(lambda: worker.state() == "idle", "idle worker")
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait(10)
        worker.redis.close()
        server.terminate()
        server.wait(10)


def enqueue(worker: Worker, job: str, name: str, serializer: Any = None, **options: Any) -> None:
    """Put a job of any shape into the queue, as somebody with access to Redis could."""
    rq = import_rq(KEYS)
    connection = blocking.Redis(unix_socket_path=worker.url.removeprefix("unix://"))
    queue = rq.Queue(MEASURE, connection=connection, serializer=serializer or rq.serializers.JSONSerializer)
    queue.enqueue_call(name, job_id=job, **options)
    connection.close()


async def test_real_job_reads_a_real_file_and_tells_the_supervisor(worker: Worker, tmp_path: Path) -> None:
    """Ask for a tiny GGUF's metadata twice: one job, the hash has the facts, the command names them."""
    model = tiny_model(tmp_path / "tiny.gguf", 1)
    identity = file_identity([model])
    jobs = Jobs(worker.url, KEYS)
    assert await jobs.read_metadata("tiny", model, None, identity)
    (command,) = until(lambda: worker.redis.xrange(KEYS.commands), "command")
    assert command[1] == {"verb": "metadata", "identity": identity, "model": "tiny"}
    found = worker.redis.hgetall(KEYS.metadata(identity))
    assert (found["architecture"], found["n_ctx_train"], found["shards"]) == ("llama", "2048", "1")
    assert json.loads(found["input_modalities"]) == ["text"]
    assert int(found["size_bytes"]) == model.stat().st_size
    # A finished job leaves nothing that would block the same one.
    until(lambda: not worker.redis.exists(f"{KEYS.rq}:job:metadata-{identity}"), "end of the job's record")
    assert await jobs.read_metadata("tiny", model, None, identity)
    until(lambda: worker.redis.xlen(KEYS.commands) == 2, "second command")
    jobs.close()


async def test_unreadable_file_is_an_outcome(worker: Worker, tmp_path: Path) -> None:
    """Ask for a file that is no GGUF: the hash says why and the supervisor is told all the same."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    jobs = Jobs(worker.url, KEYS)
    await jobs.read_metadata("broken", broken, None, "id1")
    until(lambda: worker.redis.xlen(KEYS.commands), "command")
    assert str(broken) in worker.redis.hgetall(KEYS.metadata("id1"))["error"]
    jobs.close()


async def test_the_same_job_is_queued_once(short_tmp: Path, tmp_path: Path) -> None:
    """Without a worker, ask twice for the same: the second is refused, the limits stand in the record."""
    server = start_valkey(short_tmp, "--save", "")
    client = blocking.Redis(unix_socket_path=f"{short_tmp}/valkey.sock")
    jobs = Jobs(f"unix://{short_tmp}/valkey.sock", KEYS)
    try:
        assert await jobs.read_metadata("m", tmp_path / "m.gguf", None, "id1")
        assert not await jobs.read_metadata("m", tmp_path / "m.gguf", None, "id1")
        limits = client.hmget(f"{KEYS.rq}:job:metadata-id1", "timeout", "result_ttl", "failure_ttl")
        assert limits == [b"60", b"0", b"60"]
        assert client.ttl(f"{KEYS.rq}:job:metadata-id1") > 0
        assert all(name.startswith(KEYS.prefix.encode()) for name in client.keys("*"))
    finally:
        jobs.close()
        client.close()
        server.terminate()
        server.wait(10)


def test_no_name_in_redis_is_imported(worker: Worker) -> None:
    """Queue a job whose function and callbacks leave a file when imported: it fails, no file is there."""
    folder = worker.log.parent
    (folder / "trap.py").write_text(f"open({str(folder / 'sprung')!r}, 'w')\ndef spring(*a): pass\n")
    rq = import_rq(KEYS)
    callback = rq.Callback("trap.spring")
    enqueue(worker, "bad", "trap.spring", on_success=callback, on_failure=callback, on_stopped=callback)
    assert "UnknownJobError" in until(lambda: worker.failed("bad"), "failure")
    enqueue(worker, "system", "os.system", args=("true",))
    assert "none of read_metadata" in until(lambda: worker.failed("system"), "failure")
    assert not (folder / "sprung").exists()
    assert worker.process.poll() is None


class Trap:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Pickle:
    """RQ's default way of writing jobs."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        return pickle.dumps(value)

    loads = staticmethod(pickle.loads)


def test_pickled_job_fails_without_being_unpickled(worker: Worker) -> None:
    """Queue a pickled job that leaves a file when loaded: it fails, and no file is there."""
    sprung = worker.log.parent / "sprung"
    enqueue(worker, "pickled", "read_metadata", serializer=Pickle, args=(Trap(sprung),))
    assert "DeserializationError" in until(lambda: worker.failed("pickled"), "failure")
    assert not sprung.exists()
    assert worker.process.poll() is None


def test_stops_when_asked_and_is_gone_from_the_list(worker: Worker) -> None:
    """SIGHUP does nothing; SIGTERM ends an idle worker with code 0, and it is no longer listed."""
    worker.process.send_signal(signal.SIGHUP)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(20) == 0
    assert worker.redis.zrange(KEYS.workers, 0, -1) == []
    assert not worker.redis.keys(f"{KEYS.prefix}worker:*")


def test_term_waits_for_the_job_at_hand(worker: Worker, tmp_path: Path) -> None:
    """Ask it to stop while a job hangs on its file: the job ends first, then it, with code 0."""
    model, fifo = tiny_model(tmp_path / "tiny.gguf", 1), tmp_path / "mmproj.gguf"
    os.mkfifo(fifo)
    arguments = {"model": "m", "path": str(model), "mmproj": str(fifo), "identity": "id1"}
    enqueue(worker, "slow", "read_metadata", kwargs=arguments)
    until(lambda: worker.state() == "busy", "busy worker")
    end = until(lambda: opened(fifo), "job that reads the pipe")
    worker.process.send_signal(signal.SIGTERM)
    os.close(end)  # the job reads on and finds an empty file
    assert worker.process.wait(20) == 0
    assert "error" in worker.redis.hgetall(KEYS.metadata("id1"))


async def test_living_workers_are_shown_and_dead_ones_forgotten(worker: Worker) -> None:
    """The worker is listed with host and pid; a dead one goes at the next start."""
    worker.redis.zadd(KEYS.workers, {"dead-1": 1})
    client = connect(worker.url)
    (shown,) = (await GatewayStore(client, KEYS).read_workers()).values()
    await client.aclose()
    assert (shown["host"], int(shown["pid"])) == ("here", worker.process.pid)
    second = Worker(worker.log.parent)
    try:
        until(lambda: "dead-1" not in worker.redis.zrange(KEYS.workers, 0, -1), "clean list")
    finally:
        second.process.kill()
        second.process.wait(10)
        second.redis.close()


def test_redis_away_at_start_is_told_without_the_password(short_tmp: Path) -> None:
    """Start a worker at an address where nobody is: it ends with code 1 and says what to do."""
    worker = Worker(short_tmp)
    assert worker.process.wait(20) == 1
    worker.redis.close()
    text = worker.log.read_text()
    assert "can't be reached" in text
    assert "Traceback" not in text
