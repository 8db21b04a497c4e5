"""The functions that jobs may name: this table is all a job can reach."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from redis import Redis

from llamastead.shared.gguf import GgufError, read_metadata
from llamastead.shared.jobs import READ_METADATA
from llamastead.shared.store.keys import Keys

log = logging.getLogger(__name__)


def on_read_metadata(
    redis: Redis, keys: Keys, model: str, path: str, mmproj: str | None, identity: str
) -> None:
    """Read a GGUF's header, keep the outcome under its identity and tell the supervisor.

    A file that can't be read is an outcome too: `error` says why, so that nobody asks again and again.
    """
    try:
        found = asdict(read_metadata(Path(path), Path(mmproj) if mmproj else None))
        fields = {name: _text(value) for name, value in found.items() if value is not None}
    except GgufError as error:
        log.warning("metadata not read: %s", error, extra={"model": model})
        fields = {"error": str(error)}
    with redis.pipeline() as change:
        change.delete(keys.metadata(identity))
        change.hset(keys.metadata(identity), items=[part for pair in fields.items() for part in pair])
        change.xadd(keys.commands, {"verb": "metadata", "identity": identity, "model": model})
        change.execute()


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return json.dumps(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


FUNCTIONS: Mapping[str, Callable[..., None]] = {READ_METADATA: on_read_metadata}
