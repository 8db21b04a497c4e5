"""The worker as a process on a real Valkey: real jobs run, anything else fails without being imported."""

import json
import pickle
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as blocking
from tiny import tiny_model
from valkey_server import start_valkey
from worker_kit import KEYS, Worker, until

from llamastead.shared.jobs import MEASURE, Jobs, file_identity, import_rq
from llamastead.shared.store.connect import connect
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.words import JobState


@pytest.fixture
def worker(short_tmp: Path) -> Iterator[Worker]:
    """A worker that waits for jobs."""
    server = start_valkey(short_tmp, "--save", "")
    made = Worker(short_tmp)
    try:
        yield made.ready()
    finally:
        made.end()
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
    """C189: without a worker, ask twice for the same: the second is refused; the record names the limit.

    It is on silence. RQ's own, which is on the whole, is off.
    """
    server = start_valkey(short_tmp, "--save", "")
    client = blocking.Redis(unix_socket_path=f"{short_tmp}/valkey.sock")
    jobs = Jobs(f"unix://{short_tmp}/valkey.sock", KEYS)
    try:
        assert await jobs.read_metadata("m", tmp_path / "m.gguf", None, "id1")
        assert not await jobs.read_metadata("m", tmp_path / "m.gguf", None, "id1")
        record = await jobs.record("metadata-id1")
        assert record is not None
        assert (record.state, record.stall_s, record.model) == (JobState.QUEUED, 60, "m")
        assert client.ttl(KEYS.job("metadata-id1")) > 0
        limits = client.hmget(f"{KEYS.rq}:job:metadata-id1", "timeout", "result_ttl", "failure_ttl")
        assert limits == [b"-1", b"0", b"60"]
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


def test_no_address_in_redis_is_called(worker: Worker) -> None:
    """Queue a job with a webhook for its failure: it fails, and so does the next one; nobody was called."""
    rq = import_rq(KEYS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        hooks = [rq.webhook.Webhook(url, word, timeout=1) for word in ("failed", "finished")]
        enqueue(worker, "calls", "no.such", webhooks=hooks)
        until(lambda: worker.failed("calls"), "failure")
        enqueue(worker, "next", "no.such")
        until(lambda: worker.failed("next"), "failure")
        with pytest.raises(BlockingIOError):
            listener.accept()
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
        second.end()


def test_redis_away_at_start_is_told_without_the_password(short_tmp: Path) -> None:
    """Start a worker at an address where nobody is: it ends with code 1 and says what to do."""
    worker = Worker(short_tmp)
    assert worker.process.wait(20) == 1
    worker.redis.close()
    text = worker.log.read_text()
    assert "can't be reached" in text
    assert "Traceback" not in text
