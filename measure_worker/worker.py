"""RQ's worker and job with what RQ leaves open: what a job may run, how a stop is asked, who is alive.

Import it only after shared.jobs.import_rq: RQ reads its key prefix when it is imported.
"""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, cast

from rq import Worker
from rq.exceptions import StopRequested
from rq.job import Job
from rq.queue import Queue
from rq.utils import now

from llamastead.measure_worker.jobs import FUNCTIONS, Desk
from llamastead.shared.clock import wall_ms
from llamastead.shared.store.keys import Keys

ALIVE_MS = 20_000
"""How long a worker counts as alive after its last sign; it gives one every few seconds, in a job too."""


class UnknownJobError(Exception):
    """A job names a function that is not in the table."""


class TableJob(Job):
    """A job that runs a function of the table or nothing: no name in Redis makes a worker import or call."""

    keys: ClassVar[Keys]
    run_dir: ClassVar[Path]

    @property
    def func(self) -> Callable[..., None]:
        """The function, with its desk as first argument; UnknownJobError for any other name."""
        function = FUNCTIONS.get(self.func_name or "")
        if function is None:
            raise UnknownJobError(f"{self.func_name!r} is none of {', '.join(FUNCTIONS)}")
        return partial(function, Desk(self.connection, self.keys, self.run_dir))

    def restore(self, raw_data: Any) -> None:
        """Read a job from Redis without what would make RQ import functions or call addresses."""
        super().restore(raw_data)
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
        self.webhooks = []


class MeasureWorker(Worker):
    """A worker that ends between two jobs when asked, and shows that it is alive."""

    # While Redis is away it looks again every 2 s: RQ would come to wait a minute.
    max_connection_wait_time = 2.0

    def __init__(self, queues: list[str], keys: Keys, host: str, **options: Any) -> None:
        """`host` is shown; `options` are RQ's."""
        self._keys = keys
        self._host = host
        self._holds_job = False
        super().__init__(queues, **options)

    @property
    def was_stopped(self) -> bool:
        """Whether the worker ended because it was asked to."""
        return bool(self._stop_requested)

    @property
    def dequeue_timeout(self) -> int:
        """Seconds that one wait for a job takes: so long does a stop take to be seen."""
        return 2

    def request_stop(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Note a stop. RQ raises here, and with that between taking and starting a job: the job is lost.

        A second signal ends the job at hand.
        """
        self._stop_requested = True
        self._shutdown_requested_date = now()
        signal.signal(signal.SIGINT, self.request_force_stop)
        signal.signal(signal.SIGTERM, self.request_force_stop)

    def dequeue_job_and_maintain_ttl(self, timeout: int | None, max_idle_time: int | None = None) -> Any:
        """Wait for a job; StopRequested once a stop was noted and no job is held (see heartbeat)."""
        self._holds_job = False
        return super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)

    def reorder_queues(self, reference_queue: Queue) -> None:
        """RQ's first call after it took a job: from now on a stop waits for the job's end."""
        self._holds_job = True
        super().reorder_queues(reference_queue)

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Show that the worker is alive. RQ calls this before each wait: the place to stop, Redis or not."""
        if self._stop_requested and not self._holds_job:
            raise StopRequested
        super().heartbeat(timeout, pipeline)
        change = self.connection.pipeline() if pipeline is None else pipeline
        place = self._keys.worker(self.name)
        change.hset(place, items=["host", self._host, "pid", os.getpid(), "state", self.get_state()])
        change.pexpire(place, ALIVE_MS)
        change.zadd(self._keys.workers, {self.name: wall_ms()})
        if pipeline is None:
            change.execute()

    def register_birth(self) -> None:
        """Register, and forget the workers that died without a word."""
        super().register_birth()  # type: ignore[no-untyped-call]
        for known in cast("list[bytes]", self.connection.zrange(self._keys.workers, 0, -1)):
            if not self.connection.exists(self._keys.worker(known.decode())):
                self.connection.zrem(self._keys.workers, known)

    def register_death(self) -> None:
        """Unregister."""
        super().register_death()  # type: ignore[no-untyped-call]
        self.connection.delete(self._keys.worker(self.name))
        self.connection.zrem(self._keys.workers, self.name)
