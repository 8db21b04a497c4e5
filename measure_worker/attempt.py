"""One attempt at a job, inside the work-horse: what it works with, and how it tells that it gets on."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamastead.shared.store.connect import SavingFailsError
from llamastead.shared.store.jobs import Beat, JobRecord, JobStore
from llamastead.shared.store.keys import Keys

log = logging.getLogger(__name__)

AWAY = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OutOfMemoryError, SavingFailsError)
"""Errors of a Redis that is away, or takes no writes, for a while."""

OUTAGE_PATIENCE_S = 600.0
BEAT_S = 1.0
_LOOK_S = 1.0

Result = TypeVar("Result")


class JobError(Exception):
    """A job can't be done; the message says why."""


class JobOverError(Exception):
    """Nobody wants this attempt to go on: the job was called off, or given to another worker."""


def patiently(call: Callable[[], Result], patience_s: float = OUTAGE_PATIENCE_S) -> Result:
    """Return what `call` returns, trying again while Redis is away, for so long at most."""
    ends_at = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except AWAY:
            if time.monotonic() > ends_at:
                raise
            time.sleep(_LOOK_S)


class Attempt:
    """An attempt at a job. `beat` is to be called at each piece of progress."""

    def __init__(self, store: JobStore, job: str, number: int) -> None:
        self.job, self.number = job, number
        self._store = store
        self._next_beat = time.monotonic() + BEAT_S

    def beat(self, progress: str = "") -> None:
        """Note progress, once a second at most. Raises JobOverError when the work is to end."""
        if time.monotonic() >= self._next_beat:
            self.check(progress)

    def check(self, progress: str = "") -> None:
        """Note progress now: before a step that only the job's one holder may do. Raises JobOverError.

        While Redis is away the work goes on and nothing is noted.
        """
        self._next_beat = time.monotonic() + BEAT_S
        try:
            found = self._store.beat(self.job, self.number, progress)
        except AWAY:
            return
        if found is Beat.CANCELLED:
            raise JobOverError("called off")
        if found is Beat.LOST:
            raise JobOverError("given to another worker")


@dataclass(frozen=True)
class Desk:
    """What a job works with: the herd's Redis, the run folder with the herd secret, and its attempt.

    `stopping` says that the worker was asked to stop: what can go on later should.
    """

    redis: Redis
    keys: Keys
    run_dir: Path
    attempt: Attempt
    stopping: Callable[[], bool]


@dataclass(frozen=True)
class Function:
    """What a job may run. Both get the desk and the job's arguments by name.

    `run` does it and raises JobError if it can't be done; `failed` (its second argument is why) writes down
    that it was not done, also where the process that ran it is dead.
    """

    run: Callable[..., None]
    failed: Callable[..., None]


def run_attempt(function: Function, desk: Desk, record: JobRecord) -> None:
    """Do the job and close its record. Raises what `function` raises, JobError and JobOverError excepted."""
    attempt, store = desk.attempt, JobStore(desk.redis, desk.keys)
    about = {"job": record.id, "model": record.model, "attempt": attempt.number}
    try:
        function.run(desk, **record.arguments)
    except JobError as error:
        log.warning("%s: %s", record.name, error, extra=about)
        fail_attempt(function, desk, record, str(error))
    except JobOverError as over:
        why = str(over)
        log.info("%s ends: %s", record.name, why, extra=about)
        patiently(lambda: store.end(record.id, attempt.number, why))
    except Exception as error:
        fail_attempt(function, desk, record, repr(error))
        raise
    else:
        patiently(lambda: store.end(record.id, attempt.number))


def fail_attempt(function: Function, desk: Desk, record: JobRecord, why: str) -> None:
    """Write down why a job was not done, and close its record, if the attempt still has it."""
    store, number = JobStore(desk.redis, desk.keys), desk.attempt.number
    if patiently(lambda: store.beat(record.id, number)) is not Beat.LOST:
        patiently(lambda: function.failed(desk, why, **record.arguments))
        patiently(lambda: store.end(record.id, number, why))
