"""What the worker reads from model files: asked for by the supervisor, copied to the models it belongs to."""

import logging
from pathlib import Path
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamastead.shared.jobs import Jobs, file_identity
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.registry.model import ModelEntry, Registry

log = logging.getLogger(__name__)


class Metadata:
    """Keeps `model:<name>` in line with `metadata:<identity>`, and has missing ones read by a job."""

    def __init__(self, jobs: Jobs, redis: Redis, keys: Keys, store: LeaderStore) -> None:
        self._jobs = jobs
        self._redis = redis
        self._keys = keys
        self._store = store
        self._models: dict[str, list[str]] = {}

    async def read_missing(self, registry: Registry) -> None:
        """Copy what is known of every model's files and have a job read what is not."""
        self._models = {}
        for entry in registry.entries.values():
            identity = _identity(entry)
            if identity is None or entry.path is None:
                continue
            self._models.setdefault(identity, []).append(entry.name)
            if not await self.copy(identity):
                await self._ask(entry.name, entry.path, entry.mmproj, identity)

    async def copy(self, identity: str) -> bool:
        """Write a file's metadata to the models that use it; False when no job has read it yet."""
        known = cast("dict[str, str]", await self._redis.hgetall(self._keys.metadata(identity)))
        if not known:
            return False
        fields = {
            f"file_{name}" if name in ("name", "error") else name: value for name, value in known.items()
        }
        for model in self._models.get(identity, ()):
            await self._store.put_model(model, fields, {"kind": "metadata", "model": model})
        return True

    async def _ask(self, model: str, path: Path, mmproj: Path | None, identity: str) -> None:
        try:
            await self._jobs.read_metadata(model, path, mmproj, identity)
        except RedisError as error:
            # Only what listings show depends on it, and the next reign or reload asks again.
            log.warning("metadata not asked for: %s", error, extra={"model": model})


def _identity(entry: ModelEntry) -> str | None:
    try:
        return file_identity(entry.files)
    except OSError:
        return None
