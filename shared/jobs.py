"""Jobs of the measure worker: their names, their limits, and how the supervisor asks for one.

RQ reads its key prefix when it is imported, so it is imported here only once the prefix is known.
"""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from llamastead.shared.store.connect import connect_sync
from llamastead.shared.store.jobs import OPEN_TTL_MS, JobRecord, JobStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.words import JobState

MEASURE = "measure"
DOWNLOAD = "download"

PLAN_DOWNLOAD = "plan_download"
FETCH_FILE = "fetch_file"
PLACE_DOWNLOAD = "place_download"
REMOVE_MODEL = "remove_model"
READ_METADATA = "read_metadata"
MEASURE_MODEL = "measure_model"


@dataclass(frozen=True)
class Kind:
    """How jobs of a name are carried: RQ's queue, and the seconds one may run without a sign of progress.

    There is no limit on the whole: what gets on may take its time.
    """

    queue: str
    stall_s: int
    at_front: bool = False


KINDS: Mapping[str, Kind] = {
    READ_METADATA: Kind(MEASURE, 60),  # a header is read in milliseconds; a network disk may take its time
    MEASURE_MODEL: Kind(MEASURE, 60, at_front=True),  # an engine that is silent is given up after 30 s
    PLAN_DOWNLOAD: Kind(MEASURE, 90, at_front=True),  # three requests, each given up after 10 s
    FETCH_FILE: Kind(DOWNLOAD, 90),  # a connection is given up after 30 s without a byte
    PLACE_DOWNLOAD: Kind(MEASURE, 60, at_front=True),
    REMOVE_MODEL: Kind(MEASURE, 60, at_front=True),
}

NO_LIMIT = -1  # RQ's own limit, which is on the whole
FAILURE_TTL_S = 60  # of RQ's record of a failed job, which only people look at
REQUEUE_AFTER_MS = 10_000
"""A job that is queued in its record but not in RQ for so long got lost on the way: it is handed in again."""
SIGN_S = 10.0
"""Within so long each living worker has given a sign, twice if all goes well."""
JUMP_S = 1.0


def import_rq(keys: Keys) -> Any:
    """Import RQ with its keys below ours and return the module.

    Raises RuntimeError when this process imported it with another prefix before.
    """
    os.environ["RQ_KEY_PREFIX"] = keys.rq
    import rq
    from rq.defaults import RQ_KEY_PREFIX

    if keys.rq != RQ_KEY_PREFIX:
        raise RuntimeError(f"rq was imported with the key prefix {RQ_KEY_PREFIX}, not {keys.rq}")
    return rq


def file_identity(files: Iterable[Path]) -> str:
    """Return a name for these files as they are now, fit for keys and job ids: another file, another name.

    Paths, sizes and times of change count, not contents. Raises OSError for a file that is not there.
    """
    digest = hashlib.sha256()
    for file in files:
        facts = file.stat()
        digest.update(f"{file}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


class Jobs:
    """The supervisor's side: asks for jobs, and makes good what dead workers left undone.

    Outcomes come as commands, never as return values; how far a job is stands in its record. All methods
    raise redis.exceptions.RedisError.
    """

    def __init__(self, redis_url: str, keys: Keys) -> None:
        """`redis_url` is the herd's, used from the first job on; StoreUnreachable for a URL that is none."""
        self._client = connect_sync(redis_url)
        self._keys = keys
        self._rq = import_rq(keys)
        self._records = JobStore(self._client, keys)
        self._missing: dict[str, int] = {}
        self._swept: tuple[int, float] | None = None
        self._sure_from = 0.0

    async def read_metadata(self, model: str, path: Path, mmproj: Path | None, identity: str) -> bool:
        """Ask for what the headers at `path` and `mmproj` say, to be kept under `identity`.

        False when the same is under way. The hash `metadata:<identity>` holds the outcome, or `error`, and a
        command {verb: metadata, identity, model} tells.
        """
        arguments = {
            "model": model,
            "path": str(path),
            "mmproj": str(mmproj) if mmproj else None,
            "identity": identity,
        }
        return await self.ask(f"metadata-{identity}", READ_METADATA, model, arguments)

    async def measure_model(self, model: str, key: tuple[str, str], order: str, sealed: str) -> bool:
        """Ask for a model's memory to be measured at once, to be kept under `key`: file identity and preset.

        `order` is JSON: `commands` (smallest context first), `variables`; `sealed` proves where it comes
        from, since a worker runs what it names. False when the same is under way. The hash
        `measurement:<identity>:<preset>` holds the outcome, and a command {verb: measured, identity, preset,
        model} tells.
        """
        identity, preset = key
        arguments = {"model": model, "identity": identity, "preset": preset, "order": order, "sealed": sealed}
        return await self.ask(measure_job(key), MEASURE_MODEL, model, arguments)

    async def ask(self, job: str, name: str, model: str, arguments: Mapping[str, Any]) -> bool:
        """Ask for any job of KINDS under an id of letters, digits, - and _; False when it is under way."""
        return await asyncio.to_thread(self._ask, job, name, model, arguments)

    async def record(self, job: str) -> JobRecord | None:
        """Return the record of a job, None when there is none (any more)."""
        return await asyncio.to_thread(self._records.read, job)

    async def under_way(self) -> list[JobRecord]:
        """Return the jobs that are queued or running."""
        return await asyncio.to_thread(self._records.under_way)

    async def count(self) -> int:
        """Return how many jobs are queued or running."""
        return await asyncio.to_thread(self._records.count)

    async def cancel(self, job: str) -> None:
        """Call a job off: it vanishes from the queue, or ends with its next sign of life."""
        await asyncio.to_thread(self._cancel, job)

    async def sweep(self) -> list[str]:
        """Hand in again what got lost with a worker or on the way; return a line for people for each.

        A worker that was silent for 20 s is gone; its job fails once it took three workers with it. Redis
        counts these seconds by the machine's clock: where that was set ahead, the signs of all workers are
        over at once, and nobody is called gone before each could give another.
        """
        return await asyncio.to_thread(self._sweep)

    def _ask(self, job: str, name: str, model: str, arguments: Mapping[str, Any]) -> bool:
        kind = KINDS[name]
        fields: dict[str, str | int] = {
            "name": name,
            "queue": kind.queue,
            "model": model,
            "arguments": json.dumps(dict(arguments)),
            "stall_s": kind.stall_s,
        }
        if not self._records.ask(job, fields):
            return False
        self._hand_in(job, name)
        return True

    def _hand_in(self, job: str, name: str) -> None:
        """Put a job into RQ's queue, once. What it is to do stands in its record alone."""
        self._take_out(job, KINDS[name].queue)
        serializer = self._rq.serializers.JSONSerializer
        self._rq.Queue(KINDS[name].queue, connection=self._client, serializer=serializer).enqueue_call(
            name,
            job_id=job,
            at_front=KINDS[name].at_front,
            timeout=NO_LIMIT,
            ttl=OPEN_TTL_MS // 1000,
            result_ttl=0,
            failure_ttl=FAILURE_TTL_S,
        )

    def _take_out(self, job: str, queue: str) -> None:
        with self._client.pipeline() as change:
            change.lrem(f"{self._keys.rq}:queue:{queue}", 0, job)
            change.delete(f"{self._keys.rq}:job:{job}")
            change.execute()

    def _cancel(self, job: str) -> None:
        record = self._records.read(job)
        if record is not None and self._records.cancel(job) is JobState.QUEUED:
            self._take_out(job, record.queue)

    def _sweep(self) -> list[str]:
        now_ms, sure = self._look_at_clock()
        done = []
        before, self._missing = self._missing, {}
        records = self._records.under_way()
        handed_in = self._handed_in({record.queue for record in records})
        for record in records:
            about = f"{record.name} of {record.model}"
            if record.state is JobState.RUNNING:
                if not sure:
                    continue
                after = self._records.lose(record.id, record.attempt)
                if after is JobState.QUEUED:
                    self._hand_in(record.id, record.name)
                    done.append(f"{about} is handed in again: worker {record.worker} is gone")
                elif after is JobState.FAILED:
                    done.append(f"{about} ends: worker {record.worker} is gone")
            elif now_ms - record.changed_ms >= REQUEUE_AFTER_MS and record.id not in handed_in:
                # A worker may have taken it this moment and not begun: lost is what was so at the last look.
                self._missing[record.id] = record.changed_ms
                if before.get(record.id) == record.changed_ms:
                    self._hand_in(record.id, record.name)
                    done.append(f"{about} is handed in again: it got lost on its way to a worker")
        return done

    def _look_at_clock(self) -> tuple[int, bool]:
        """Return Redis's time in milliseconds, and whether a worker without a sign is gone."""
        asked_at = time.monotonic()
        seconds, micros = self._client.time()
        now_ms = seconds * 1000 + micros // 1000
        if self._swept is not None:
            before_ms, before = self._swept
            if now_ms - before_ms > (asked_at - before + JUMP_S) * 1000:
                self._sure_from = asked_at + SIGN_S
        self._swept = now_ms, time.monotonic()
        return now_ms, asked_at >= self._sure_from

    def _handed_in(self, queues: Iterable[str]) -> set[str]:
        """Return the ids of the jobs that wait in RQ's queues."""
        lists = (self._client.lrange(f"{self._keys.rq}:queue:{queue}", 0, -1) for queue in queues)
        return {job.decode() for jobs in lists for job in cast("list[bytes]", jobs)}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def measure_job(key: tuple[str, str]) -> str:
    """Return the id of the job that measures this file with this preset."""
    return f"measure-{key[0]}-{key[1]}"
