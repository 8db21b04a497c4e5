"""Jobs of the measure worker: their names, their limits, and how the supervisor asks for one.

RQ reads its key prefix when it is imported, so it is imported here only once the prefix is known.
"""

import asyncio
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llamastead.shared.store.connect import connect_sync
from llamastead.shared.store.keys import Keys

MEASURE = "measure"
DOWNLOAD = "download"

READ_METADATA = "read_metadata"
MEASURE_MODEL = "measure_model"

METADATA_TIMEOUT_S = 60  # a header is read in milliseconds; a network disk may take its time
MEASURE_TIMEOUT_S = 180  # two engines, each given up after 30 s without a word
QUEUED_TTL_S = (
    300  # a job that a dying worker lost between taking and starting it may be asked for again then
)
FAILURE_TTL_S = 60  # a failed job blocks the same one for so long


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
    """The supervisor's side: asks for jobs. Outcomes come as commands, never as return values."""

    def __init__(self, redis_url: str, keys: Keys) -> None:
        """`redis_url` is the herd's, used from the first job on; StoreUnreachable for a URL that is none."""
        self._client = connect_sync(redis_url)
        self._rq = import_rq(keys)

    async def read_metadata(self, model: str, path: Path, mmproj: Path | None, identity: str) -> bool:
        """Ask for what the headers at `path` and `mmproj` say, to be kept under `identity`.

        False when the same is under way. The hash `metadata:<identity>` holds the outcome, or `error`, and a
        command {verb: metadata, identity, model} tells. Raises redis.exceptions.RedisError.
        """
        arguments = {
            "model": model,
            "path": str(path),
            "mmproj": str(mmproj) if mmproj else None,
            "identity": identity,
        }
        return await asyncio.to_thread(
            self._enqueue, MEASURE, READ_METADATA, f"metadata-{identity}", arguments, METADATA_TIMEOUT_S
        )

    async def measure_model(self, model: str, key: tuple[str, str], order: str, sealed: str) -> bool:
        """Ask for a model's memory to be measured at once, to be kept under `key`: file identity and preset.

        `order` is JSON: `commands` (smallest context first), `variables`; `sealed` proves where it comes
        from, since a worker runs what it names. False when the same is under way. The hash
        `measurement:<identity>:<preset>` holds the outcome, and a command {verb: measured, identity, preset,
        model} tells. Raises redis.exceptions.RedisError.
        """
        identity, preset = key
        arguments = {"model": model, "identity": identity, "preset": preset, "order": order, "sealed": sealed}
        return await asyncio.to_thread(
            self._enqueue,
            MEASURE,
            MEASURE_MODEL,
            f"measure-{identity}-{preset}",
            arguments,
            MEASURE_TIMEOUT_S,
            at_front=True,
        )

    def _enqueue(
        self,
        queue: str,
        name: str,
        job_id: str,
        arguments: dict[str, Any],
        timeout_s: int,
        *,
        at_front: bool = False,
    ) -> bool:
        rq = self._rq
        try:
            rq.Queue(queue, connection=self._client, serializer=rq.serializers.JSONSerializer).enqueue_call(
                name,
                kwargs=arguments,
                job_id=job_id,
                unique=True,
                at_front=at_front,
                timeout=timeout_s,
                ttl=QUEUED_TTL_S,
                result_ttl=0,
                failure_ttl=FAILURE_TTL_S,
            )
        except rq.exceptions.DuplicateJobError:
            return False
        return True

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
