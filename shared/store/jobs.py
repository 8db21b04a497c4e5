"""The record of a job, `job:<id>`: what is to be done, who does it, how far it has come, how it ended.

RQ carries jobs to workers and forgets them; what became of one is told by its record alone. Each change is
one script that changes nothing when the job is no longer the caller's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from redis import Redis

from llamastead.shared.store.keys import Keys
from llamastead.shared.store.scripts import BlockingScripts
from llamastead.shared.words import JobState

OPEN_TTL_MS = 86_400_000  # of a record that nobody touches; whoever wants the job asks again then
ENDED_TTL_MS = 3_600_000
MOST_LOST = 3
"""A job that took so many workers with it fails."""


class Beat(Enum):
    """What a sign of life of a running job finds."""

    LOST = 0
    GOING = 1
    CANCELLED = 2


@dataclass(frozen=True)
class JobRecord:
    """A job as Redis has it; times are milliseconds since the epoch, 0 for not yet.

    `stall_s` is the limit in force: so long a running job may go without a sign of progress.
    """

    id: str
    name: str
    queue: str
    state: JobState
    model: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    stall_s: int = 0
    worker: str = ""
    attempt: int = 0
    lost: int = 0
    cancelled: bool = False
    asked_ms: int = 0
    started_ms: int = 0
    changed_ms: int = 0
    ended_ms: int = 0
    progress: str = ""
    error: str = ""


class JobStore:
    """Records of jobs on a blocking client of bytes. All methods raise redis.exceptions.RedisError."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = BlockingScripts(redis, keys.prefix)

    def ask(self, job: str, fields: Mapping[str, str | int]) -> bool:
        """Open a job with these fields (name, queue, model, arguments, stall_s); False if it is under way."""
        reply = self._scripts.call(
            "ask_job",
            {"job_key": self._keys.job(job), "jobs": self._keys.jobs},
            {"job": job, "fields": json.dumps(dict(fields)), "ttl_ms": OPEN_TTL_MS},
        )
        return bool(reply)

    def start(self, job: str, worker: str) -> int:
        """Begin a queued job; return the number of this attempt, 0 when there is nothing to do."""
        reply = self._scripts.call(
            "start_job", {"job_key": self._keys.job(job)}, {"worker": worker, "ttl_ms": OPEN_TTL_MS}
        )
        return int(reply)

    def beat(self, job: str, attempt: int, progress: str = "") -> Beat:
        """Note that an attempt gets on, and learn whether it still should."""
        reply = self._scripts.call(
            "beat_job",
            {"job_key": self._keys.job(job)},
            {"attempt": attempt, "progress": progress, "ttl_ms": OPEN_TTL_MS},
        )
        return Beat(int(reply))

    def end(self, job: str, attempt: int, error: str = "") -> bool:
        """Close a job as done, or as failed with `error`; False when it is no longer this attempt's."""
        reply = self._scripts.call(
            "end_job",
            {"job_key": self._keys.job(job), "jobs": self._keys.jobs},
            {"job": job, "attempt": attempt, "error": error, "ttl_ms": ENDED_TTL_MS},
        )
        return bool(reply)

    def lose(self, job: str, attempt: int, *, given_back: bool = False) -> JobState | None:
        """Take a job from a worker that is gone, or that gives it back; return its state then.

        None when nothing was changed: its worker lives, or the job is no longer this attempt's.
        """
        reply = self._scripts.call(
            "lose_job",
            {"job_key": self._keys.job(job), "jobs": self._keys.jobs},
            {
                "job": job,
                "attempt": attempt,
                "given_back": int(given_back),
                "most_lost": MOST_LOST,
                "ttl_ms": ENDED_TTL_MS,
            },
        )
        return {0: None, 1: JobState.QUEUED, 2: JobState.FAILED}[int(reply)]

    def cancel(self, job: str) -> JobState | None:
        """Call a job off; return the state it was in, None when it was over."""
        reply = self._scripts.call(
            "cancel_job", {"job_key": self._keys.job(job), "jobs": self._keys.jobs}, {"job": job}
        )
        return {0: None, 1: JobState.QUEUED, 2: JobState.RUNNING}[int(reply)]

    def read(self, job: str) -> JobRecord | None:
        """Return a job's record, None when there is none."""
        return _record(job, cast("dict[bytes, bytes]", self._redis.hgetall(self._keys.job(job))))

    def count(self) -> int:
        """Return how many jobs are queued or running."""
        return self._redis.zcard(self._keys.jobs)

    def under_way(self) -> list[JobRecord]:
        """Return all jobs that are queued or running, oldest first; names without a record are dropped."""
        names = [name.decode() for name in cast("list[bytes]", self._redis.zrange(self._keys.jobs, 0, -1))]
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(self._keys.job(name))
        records = {name: _record(name, found) for name, found in zip(names, pipeline.execute(), strict=True)}
        if gone := [name for name, record in records.items() if record is None]:
            self._redis.zrem(self._keys.jobs, *gone)
        return [record for record in records.values() if record is not None]


def _record(job: str, hash_of: Mapping[bytes, bytes]) -> JobRecord | None:
    found = {name.decode(): value.decode() for name, value in hash_of.items()}
    if "state" not in found:
        return None
    texts = {name: found.get(name, "") for name in ("name", "queue", "model", "worker", "progress", "error")}
    numbers = {
        name: int(found.get(name) or 0)
        for name in ("stall_s", "attempt", "lost", "asked_ms", "started_ms", "changed_ms", "ended_ms")
    }
    return JobRecord(
        id=job,
        state=JobState(found["state"]),
        arguments=json.loads(found.get("arguments") or "{}"),
        cancelled="cancelled" in found,
        **texts,  # type: ignore[arg-type]
        **numbers,  # type: ignore[arg-type]
    )
