"""RQ's worker and job with what RQ leaves open: what a job may run, how a stop is asked, who is alive.

RQ hands a job over and forks for it. What the job is, who has it and how it ended stands in its record
(shared/store/jobs.py) alone, so that nothing depends on RQ's registries.
Import it only after shared.jobs.import_rq: RQ reads its key prefix when it is imported.
"""

import contextlib
import logging
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, cast

from rq import Worker, worker_registration
from rq.exceptions import DequeueTimeout, DeserializationError, StopRequested
from rq.job import Job
from rq.queue import Queue
from rq.worker import WorkerStatus

from llamastead.measure_worker.attempt import AWAY, Attempt, Desk, Result, fail_attempt, run_attempt
from llamastead.measure_worker.jobs import FUNCTIONS
from llamastead.measure_worker.lifeline import end_with
from llamastead.measure_worker.outage import Outage
from llamastead.shared.clock import wall_ms
from llamastead.shared.store.jobs import JobRecord, JobStore
from llamastead.shared.store.keys import Keys

log = logging.getLogger(__name__)

ALIVE_MS = 20_000
"""How long a worker counts as alive after its last sign; it gives one every few seconds, in a job too."""
LOOK_AGAIN_S = 1.0
KILL_AFTER_S = 10.0
"""So long a job may take to end by itself once it is called off or stalls; then its process is killed."""


class UnknownJobError(Exception):
    """A job names a function that is not in the table."""


class TableJob(Job):
    """A job that runs a function of the table or nothing: no name in Redis makes a worker import or call."""

    keys: ClassVar[Keys]
    run_dir: ClassVar[Path]
    stop_noted: ClassVar[mmap.mmap] = mmap.mmap(-1, 1)  # shared with the forked process
    record: JobRecord | None = None

    @property
    def func(self) -> Callable[..., None]:
        """The attempt at what its record says; UnknownJobError for a name that is not in the table."""
        if self.record is None:
            raise UnknownJobError(f"{self.func_name!r} is none of {', '.join(FUNCTIONS)}")
        return partial(run_attempt, FUNCTIONS[self.record.name], self.desk(), self.record)

    def desk(self) -> Desk:
        """Return what the attempt at hand works with."""
        assert self.record is not None
        store = JobStore(self.connection, self.keys)
        attempt = Attempt(store, self.record.id, self.record.attempt)
        return Desk(self.connection, self.keys, self.run_dir, attempt, lambda: self.stop_noted[0] != 0)

    def restore(self, raw_data: Any) -> None:
        """Read a job from Redis without what would make RQ import functions or call addresses."""
        super().restore(raw_data)
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
        self.webhooks = []


class MeasureWorker(Worker):
    """A worker that ends between two jobs when asked, lives through outages, and shows that it is alive."""

    def __init__(self, queues: list[str], keys: Keys, host: str, outage: Outage, **options: Any) -> None:
        """`host` is shown; `options` are RQ's."""
        self._keys = keys
        self._host = host
        self._outage = outage
        self._verdict = ""
        self._seen = (0, 0.0)
        super().__init__(queues, **options)
        self._records = JobStore(self.connection, keys)

    @property
    def was_stopped(self) -> bool:
        """Whether the worker ended because it was asked to."""
        return bool(self._stop_requested)

    @property
    def dequeue_timeout(self) -> int:
        """Seconds that one wait for a job takes: so long does a stop take to be seen."""
        return 2

    # --- a stop: signals set a flag, nothing is raised amid a call of Redis

    def request_stop(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Note a stop; a second signal ends the job at hand."""
        self._stop_requested = True
        TableJob.stop_noted[0] = 1
        signal.signal(signal.SIGINT, self.request_force_stop)
        signal.signal(signal.SIGTERM, self.request_force_stop)

    def request_force_stop(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Kill the job's process: the job is given back."""
        self.kill_horse()

    def kill_horse(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Kill the job's process and its children; right after the fork it is still in our own group."""
        with contextlib.suppress(ProcessLookupError):
            group = os.getpgid(self.horse_pid) if self.horse_pid else os.getpgrp()
            if group != os.getpgrp():
                os.killpg(group, sig)
            elif self.horse_pid:
                os.kill(self.horse_pid, sig)

    def subscribe(self) -> None:
        """Take no orders from RQ's channel: jobs are called off in their records."""

    def unsubscribe(self) -> None:
        """Nothing was subscribed."""

    def check_for_suspension(self, burst: bool) -> None:
        """RQ's own way to hold workers is not offered."""

    # --- waiting for a job

    def dequeue_job_and_maintain_ttl(self, timeout: int | None, max_idle_time: int | None = None) -> Any:  # noqa: ARG002
        """Wait for a job, Redis or not; StopRequested once a stop was noted.

        Between taking a job and starting it nothing raises for a stop, or the job would be lost.
        """
        while not self._stop_requested:
            try:
                self.set_state(WorkerStatus.IDLE)
                self.heartbeat()
                if self.should_run_maintenance_tasks:
                    self.run_maintenance_tasks()
                taken = self.queue_class.dequeue_any(
                    self._ordered_queues,
                    timeout,
                    connection=self.connection,
                    job_class=self.job_class,
                    serializer=self.serializer,
                    death_penalty_class=self.death_penalty_class,
                )
                if taken is not None:
                    taken[0].redis_server_version = self.get_redis_server_version()  # type: ignore[no-untyped-call]
                    return taken
            except DequeueTimeout:
                pass
            except (*AWAY, OSError) as error:
                # A job that was taken by then is handed in again by the supervisor.
                self._outage.lost(error)
                time.sleep(LOOK_AGAIN_S)
                continue
            self._outage.over()
        raise StopRequested

    def run_maintenance_tasks(self) -> None:
        """Have RQ tidy up its own keys; no state of ours depends on it."""
        try:
            super().run_maintenance_tasks()  # type: ignore[no-untyped-call]
        except AWAY as error:
            self._outage.lost(error)

    # --- a job

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Begin the job in its record and run it. A copy of one that is under way or over is dropped."""
        try:
            known = job.func_name in FUNCTIONS
        except DeserializationError:
            known = False
        if not known:
            super().execute_job(job, queue)  # there it fails
            return
        if not self._insist(lambda: self._records.start(job.id, self.name)):
            log.info("nothing to do any more", extra={"job": job.id})
            return
        mine = self._insist(lambda: self._records.read(job.id))
        cast("TableJob", job).record = mine
        if mine is None:
            return
        self._verdict, self._seen = "", (0, time.monotonic())
        try:
            super().execute_job(job, queue)
        except (*AWAY, OSError) as error:
            self._outage.lost(error)
            if self.horse_pid:
                self.kill_horse()
                self.wait_for_horse()
                self._horse_pid = 0
        # Whatever RQ did not see through: nobody else would take it from a worker that lives.
        self._insist(lambda: self._records.lose(mine.id, mine.attempt, given_back=True))

    def _insist(self, call: Callable[[], Result]) -> Result:
        """Return what `call` returns, with Redis away until it is back; StopRequested after a stop."""
        while True:
            try:
                return call()
            except AWAY as error:
                self._outage.lost(error)
                if self._stop_requested:
                    raise StopRequested from None
                time.sleep(LOOK_AGAIN_S)

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        """Run in the forked process, which ends with the worker."""
        end_with(cast("int", self.pid))
        super().main_work_horse(job, queue)

    def maintain_heartbeats(self, job: Job, execution: Any) -> None:
        """Show that worker and job live, and end a job that stalls or was called off and does not listen."""
        try:
            super().maintain_heartbeats(job, execution)
            record = self._records.read(job.id)
        except AWAY as error:
            self._outage.lost(error)
            self._seen = (0, time.monotonic())  # nobody can note progress meanwhile
            return
        self._outage.over()
        mine = cast("TableJob", job).record
        if mine is None or record is None or record.attempt != mine.attempt:
            return  # the horse finds out with its next sign
        if record.changed_ms != self._seen[0]:
            self._seen = (record.changed_ms, time.monotonic())
        silent_s = time.monotonic() - self._seen[1]
        if silent_s > (KILL_AFTER_S if record.cancelled else record.stall_s + KILL_AFTER_S):
            self._verdict = "called off" if record.cancelled else f"no progress for {record.stall_s} s"
            self.kill_horse()

    def handle_work_horse_killed(self, job: Job, retpid: int, ret_val: int, rusage: Any) -> None:
        """Close the job's record in the place of its dead process, or give the job back after a stop."""
        mine = cast("TableJob", job).record
        if mine is None:
            return
        number = os.WTERMSIG(ret_val) if os.WIFSIGNALED(ret_val) else 0
        if self._stop_requested or number == signal.SIGTERM:
            self._records.lose(mine.id, mine.attempt, given_back=True)
            return
        why = self._verdict or _death(retpid, number, ret_val, rusage)
        log.warning("%s: %s", mine.name, why, extra={"job": mine.id, "model": mine.model})
        fail_attempt(FUNCTIONS[mine.name], cast("TableJob", job).desk(), mine, why)

    # --- who is alive

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Show that the worker is alive; an outage that took what Redis knew of it is made good."""
        change = self.connection.pipeline() if pipeline is None else pipeline
        super().heartbeat(timeout, change)
        mine = {
            "host": self._host,
            "machine": socket.gethostname(),
            "pid": str(self.pid),
            "state": self.get_state(),
            "job": next((each.job_id for each in self.executions.values()), ""),
        }
        place = self._keys.worker(self.name)
        change.hset(place, items=[part for pair in mine.items() for part in pair])
        change.pexpire(place, ALIVE_MS)
        change.zadd(self._keys.workers, {self.name: wall_ms()})
        change.hset(self.key, mapping=self.serialize())
        worker_registration.register(self, change)
        if pipeline is not None:
            return
        try:
            change.execute()
        except AWAY as error:
            self._outage.lost(error)

    def register_birth(self) -> None:
        """Register, and forget the workers that died without a word."""
        super().register_birth()  # type: ignore[no-untyped-call]
        for known in cast("list[bytes]", self.connection.zrange(self._keys.workers, 0, -1)):
            if not self.connection.exists(self._keys.worker(known.decode())):
                self.connection.zrem(self._keys.workers, known)

    def register_death(self) -> None:
        """Unregister; without Redis the entries run out by themselves."""
        try:
            super().register_death()  # type: ignore[no-untyped-call]
            self.connection.delete(self._keys.worker(self.name))
            self.connection.zrem(self._keys.workers, self.name)
        except AWAY as error:
            self._outage.lost(error)


def _death(pid: int, number: int, status: int, rusage: Any) -> str:
    most = f"it had used up to {rusage.ru_maxrss // 1024} MiB" if rusage else ""
    if number == signal.SIGKILL:
        return f"the job's process (pid {pid}) was killed by signal 9, likely for lack of memory; {most}"
    how = f"by signal {number}" if number else f"with code {os.waitstatus_to_exitcode(status)}"
    return f"the job's process (pid {pid}) ended {how}; {most}"
