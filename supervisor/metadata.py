"""What the worker reads from model files: asked for by the supervisor, copied to the models it belongs to."""

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamastead.shared.jobs import Jobs, file_identity
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.registry.changes import Changes
from llamastead.supervisor.registry.model import ModelEntry, Registry

log = logging.getLogger(__name__)

SLICE = 100
MOST_JOBS = 100
"""Of so many jobs no more is asked for: what thousands of files wait for waits here, not in a queue."""
LOOK_S = 0.5
_FIELDS = {"name": "file_name", "error": "file_error"}


class Metadata:
    """Keeps `model:<name>` in line with `metadata:<identity>`, and has missing ones read by a job."""

    def __init__(self, jobs: Jobs, redis: Redis, keys: Keys, store: LeaderStore) -> None:
        self._jobs = jobs
        self._redis = redis
        self._keys = keys
        self._store = store
        self._models: dict[str, list[str]] = {}
        self._pending: dict[str, ModelEntry] = {}
        self._wanted = asyncio.Event()

    def read_missing(self, registry: Registry, changes: Changes | None = None) -> None:
        """Have what is known of the models' files copied, of those that changed if that is told, and what is
        not known read by jobs.
        """
        if changes is None:
            self._models, self._pending = {}, {}
            names: Iterable[str] = registry.entries
        else:
            gone = {*changes.removed, *changes.changed}
            kept = {identity: [n for n in names if n not in gone] for identity, names in self._models.items()}
            self._models = {identity: names for identity, names in kept.items() if names}
            for name in gone:
                self._pending.pop(name, None)
            names = (*changes.changed, *changes.added)
        self._pending.update((name, registry.entries[name]) for name in names)
        self._wanted.set()

    async def run(self) -> None:
        """Copy and ask for what is missing, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while names := list(itertools.islice(self._pending, SLICE)):
                entries = [self._pending.pop(name) for name in names]
                identities = await asyncio.to_thread(lambda some: [*map(_identity, some)], entries)
                there = [pair for pair in zip(identities, entries, strict=True) if pair[0]]
                for identity, entry in there:
                    self._models.setdefault(identity, []).append(entry.name)
                unread = await self._copy([identity for identity, _ in there])
                for identity, entry in there:
                    if identity in unread:
                        await self._ask(entry, identity)

    async def copy(self, identity: str) -> bool:
        """Write a file's metadata to the models that use it; False when no job has read it yet."""
        return not await self._copy([identity])

    async def _copy(self, identities: Collection[str]) -> set[str]:
        """Write what is known of files to the models that use them and do not say so yet; return the files
        that no job has read yet.
        """
        pipeline = self._redis.pipeline(transaction=False)
        for identity in identities:
            pipeline.hgetall(self._keys.metadata(identity))
        known = dict(zip(identities, await pipeline.execute(), strict=True))
        fields_of = {
            model: {_FIELDS.get(name, name): value for name, value in known[identity].items()}
            for identity in identities
            if known[identity]
            for model in self._models.get(identity, ())
        }
        pipeline = self._redis.pipeline(transaction=False)
        for model, fields in fields_of.items():
            pipeline.hmget(self._keys.model(model), list(fields))
        for (model, fields), written in zip(fields_of.items(), await pipeline.execute(), strict=True):
            if list(fields.values()) != written:
                await self._store.put_model(model, fields, {"kind": "metadata", "model": model})
        return {identity for identity in identities if not known[identity]}

    async def _ask(self, entry: ModelEntry, identity: str) -> None:
        assert entry.path is not None
        model = entry.name
        try:
            while await self._jobs.count() >= MOST_JOBS:  # noqa: ASYNC110 - workers in other processes do them
                await asyncio.sleep(LOOK_S)
            await self._jobs.read_metadata(model, entry.path, entry.mmproj, identity)
        except RedisError as error:
            # Only what listings show depends on it, and the next reign or reload asks again.
            log.warning("metadata not asked for: %s", error, extra={"model": model})


def _identity(entry: ModelEntry) -> str:
    try:
        return file_identity(entry.files) if entry.path is not None else ""
    except OSError:
        return ""
