"""This gateway's copy of the registry and of what state each model is in, kept fresh by events."""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from llamastead.shared.errors import ApiError
from llamastead.shared.store.errors import NoHerd, StoreError, UnknownModel
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.words import InstanceState, Source, WireStatus

log = logging.getLogger(__name__)

LEAVING = frozenset({InstanceState.DRAINING, InstanceState.STOPPING, InstanceState.STOP_FAILED})
RUNNING = frozenset({WireStatus.LOADING, WireStatus.LOADED, WireStatus.SLEEPING})


@dataclass(frozen=True)
class CatalogModel:
    """A registry entry and its state, as Redis has them. `meta` and `progress` are the engine's own words."""

    name: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    source: str = Source.PRESET
    hidden: bool = False
    path: str = ""
    args: tuple[str, ...] = ()
    preset: str = ""
    revision: str = ""
    status: WireStatus = WireStatus.UNLOADED
    state: str = ""
    failed: bool = False
    exit_code: int | None = None
    end_class: str = ""
    reason: str = ""
    pid: int | None = None
    evictable: bool = False
    spared: str = ""
    progress: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """True when a request needs no new load."""
        return self.status in RUNNING

    @property
    def asleep(self) -> bool:
        """True while its engine sleeps: what it can't answer asleep wakes it."""
        return self.status is WireStatus.SLEEPING

    @property
    def leaving(self) -> bool:
        """True while its instance drains or stops: a request may find it, or have it loaded again."""
        return self.state in LEAVING


def parse_model(fields: Mapping[str, str]) -> CatalogModel:
    """Return the model that a `model:<name>` hash describes; fields that are missing take their defaults."""
    exit_code = fields.get("exit_code", "")
    return CatalogModel(
        name=fields["name"],
        aliases=_words(fields, "aliases"),
        tags=_words(fields, "tags"),
        source=fields.get("source", Source.PRESET),
        hidden=fields.get("hidden") == "1",
        path=fields.get("path", ""),
        args=_words(fields, "args"),
        preset=fields.get("preset", ""),
        revision=fields.get("revision", ""),
        status=WireStatus(fields.get("status") or WireStatus.UNLOADED),
        state=fields.get("state", ""),
        failed=fields.get("failed") == "1",
        exit_code=int(exit_code) if exit_code else None,
        end_class=fields.get("end_class", ""),
        reason=fields.get("reason", ""),
        pid=int(fields.get("pid") or 0) or None,
        evictable=fields.get("evictable") == "1",
        spared=fields.get("spared", ""),
        progress=json.loads(fields.get("progress") or "{}"),
        meta=json.loads(fields.get("meta") or "{}"),
        metadata=_metadata(fields),
        memory=json.loads(fields.get("memory") or "{}"),
    )


def _words(fields: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(json.loads(fields.get(name) or "[]"))


def _metadata(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return what is known from the file's header, without the model being loaded."""
    found: dict[str, Any] = {
        name: int(fields[name]) for name in ("n_ctx_train", "size_bytes", "shards") if fields.get(name)
    }
    found |= {name: fields[name] for name in ("architecture", "mmproj") if fields.get(name)}
    found |= {name: _words(fields, name) for name in ("input_modalities", "output_modalities")}
    return found


class Catalog:
    """The local copy; see gateway/seams.py for what the byte path may rely on."""

    def __init__(self, store: GatewayStore, reread_s: float) -> None:
        """`reread_s`: the copy is read anew at least so often, whether or not an event came."""
        self.herd: Mapping[str, str] = {}
        self.models: Mapping[str, CatalogModel] = {}
        self._store = store
        self._reread_s = reread_s
        self._aliases: Mapping[str, str] = {}
        self._stale: set[str] = set()
        self._all_stale = True
        self._look = asyncio.Event()

    def resolve(self, name: str) -> CatalogModel | None:
        """Return the entry of a name or alias, or None."""
        return self.models.get(name) or self.models.get(self._aliases.get(name, ""))

    async def look_again(self, name: str) -> CatalogModel | None:
        """Ask Redis for a name the copy doesn't have; ApiError 503 when it can't be asked."""
        try:
            canonical = (await self._store.read_aliases()).get(name, name)
            model = parse_model(await self._store.read_model(canonical))
        except UnknownModel:
            return None
        except NoHerd:
            raise ApiError(503, "No supervisor has opened the herd yet", retry_after=5) from None
        except (StoreError, RedisError, OSError):
            raise ApiError(503, "Redis is not reachable: models can't be looked up", retry_after=5) from None
        self.mark_all()
        return model

    def mark(self, model: str) -> None:
        """Note that a model changed."""
        self._stale.add(model)
        self._look.set()

    def mark_all(self) -> None:
        """Note that anything may have changed: the registry was read anew, or events were missed."""
        self._all_stale = True
        self._look.set()

    async def run(self) -> None:
        """Refresh the copy whenever something was marked, and now and then without; until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._reread_s):
                    await self._look.wait()
            except TimeoutError:
                self._all_stale = True
            self._look.clear()
            await self._refresh()

    async def _refresh(self) -> None:
        stale, everything = self._stale, self._all_stale
        self._stale, self._all_stale = set(), False
        try:
            if everything:
                await self._read_all()
            else:
                await self._read(stale)
        except (NoHerd, RedisError, OSError) as problem:
            # What is known stays known: running answers and warm requests go on with it.
            log.debug("catalog not refreshed", extra={"problem": str(problem)})
            self._all_stale = True

    async def _read_all(self) -> None:
        herd = await self._store.read_herd()
        aliases = await self._store.read_aliases()
        models = await self._store.read_models()
        self.herd, self._aliases = herd, aliases
        self.models = {name: parse_model(fields) for name, fields in models.items()}

    async def _read(self, names: set[str]) -> None:
        models = dict(self.models)
        for name in names:
            try:
                fields = await self._store.read_model(name)
            except UnknownModel:
                models.pop(name, None)
                continue
            if fields.get("removed") == "1":
                models.pop(name, None)
            else:
                models[name] = parse_model(fields)
        self.models = models
