"""Workers as processes on a real Valkey, with nothing else of a herd around them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import zlib
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import redis as blocking
from valkey_server import start_valkey
from waiting import until_blocking as until

from llamastead.shared.jobs import REQUEUE_AFTER_MS, Jobs
from llamastead.shared.store.connect import connect_sync
from llamastead.shared.store.jobs import JobRecord, JobStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.words import JobState

KEYS = Keys("llamastead:")
PROGRAM = (
    "import sys; from llamastead.measure_worker.main import run;"
    "from llamastead.shared.settings import Settings; sys.exit(run(Settings()))"
)
OVER = (JobState.DONE, JobState.FAILED)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Worker:
    """A worker process and a look into its Redis."""

    def __init__(
        self, folder: Path, url: str = "", env: Mapping[str, str] = {}, name: str = "worker"
    ) -> None:
        self.folder = folder
        self.url = url or f"unix://{folder}/valkey.sock"
        self.redis = blocking.Redis(unix_socket_path=f"{folder}/valkey.sock", decode_responses=True)
        self.log = folder / f"{name}.log"
        environ = os.environ | {
            "LLAMASTEAD_REDIS_URL": self.url,
            "LLAMASTEAD_RUN_DIR": str(folder),
            "LLAMASTEAD_HOST_ID": "here",
            **env,
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM], env=environ, stderr=log, stdout=log, cwd=folder
            )

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.process.pid

    def about(self) -> dict[str, str]:
        """Return what Redis shows of this worker, empty while it is not listed."""
        for name in self.redis.zrange(KEYS.workers, 0, -1):
            found: dict[str, str] = self.redis.hgetall(KEYS.worker(name))
            if found.get("pid") == str(self.pid):
                return found
        return {}

    def state(self) -> str | None:
        """Return `idle`, `busy`, …; None while it is not listed."""
        return self.about().get("state")

    def ready(self) -> "Worker":
        """Wait until it waits for jobs."""
        until(lambda: self.state() == "idle", "idle worker", 60)
        return self

    def forget(self) -> None:
        """Delete what Redis shows of it, as its TTL would."""
        for name in self.redis.zrange(KEYS.workers, 0, -1):
            if self.redis.hget(KEYS.worker(name), "pid") == str(self.pid):
                self.redis.delete(KEYS.worker(name))

    def failed(self, job: str) -> str | None:
        """Return why RQ calls a job failed, None while it does not."""
        if self.redis.hget(f"{KEYS.rq}:job:{job}", "status") != "failed":
            return None
        results = self.redis.xrange(f"{KEYS.rq}:results:{job}")
        return zlib.decompress(b64decode(results[-1][1]["exc_string"])).decode()

    def end(self) -> None:
        """Kill it, whatever it does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        self.redis.close()


class Stand:
    """A Valkey, its jobs, and as many workers as a test wants; all ended afterwards."""

    def __init__(self, folder: Path, *options: str) -> None:
        """`options` are Valkey's; it saves nothing without any."""
        self.folder = folder
        self.server = start_valkey(folder, *(options or ("--save", "")))
        self.url = f"unix://{folder}/valkey.sock"
        self.client = connect_sync(self.url)
        self.records = JobStore(self.client, KEYS)
        self.jobs = Jobs(self.url, KEYS)
        self.workers: list[Worker] = []

    def worker(self, url: str = "", env: Mapping[str, str] = {}) -> Worker:
        """Start one more worker."""
        self.workers.append(Worker(self.folder, url, env, f"worker{len(self.workers)}"))
        return self.workers[-1]

    def record(self, job: str) -> JobRecord:
        """Return a job's record, which is there."""
        found = self.records.read(job)
        assert found is not None, job
        return found

    def over(self, job: str, seconds: float = 20) -> JobRecord:
        """Wait until a job has ended, and return its record."""
        until(lambda: self.record(job).state in OVER, f"end of {job}", seconds)
        return self.record(job)

    async def swept(self, what: str, seconds: float = 60) -> list[str]:
        """Sweep until something was made good; return the lines that say what."""
        end = time.monotonic() + seconds
        while not (lines := await self.jobs.sweep()):
            assert time.monotonic() < end, f"{what} was not noticed within {seconds} s"
            await asyncio.sleep(0.2)
        return lines

    def let_time_pass(self, job: str) -> None:
        """Have a job and the ended workers' last signs look older than they are by what a sweep waits for."""
        for worker in self.workers:
            if worker.process.poll() is not None:
                worker.forget()
        changed = self.record(job).changed_ms
        self.client.hset(KEYS.job(job), "changed_ms", changed - REQUEUE_AFTER_MS)

    def restart_redis(self) -> None:
        """End the Valkey and start another one, empty, in its place."""
        self.server.kill()
        self.server.wait(10)
        self.server = start_valkey(self.folder, "--save", "")

    def keys_without_end(self) -> list[str]:
        """Return the keys that never run out."""
        return [key.decode() for key in self.client.keys("*") if self.client.pttl(key) < 0]

    def close(self) -> None:
        """End everything."""
        for worker in self.workers:
            worker.end()
        self.jobs.close()
        self.client.close()
        self.server.terminate()
        self.server.wait(10)


@contextmanager
def stand(folder: Path, *options: str) -> Iterator[Stand]:
    """Yield a stand; when a test fails the workers' last words are printed."""
    made = Stand(folder, *options)
    try:
        yield made
    except BaseException:
        for worker in made.workers:
            print(f"--- {worker.log.name}:\n{worker.log.read_text()[-4000:]}")
        raise
    finally:
        made.close()
