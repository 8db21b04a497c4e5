"""This gateway's copy of the registry and of what state each model is in, kept fresh by events."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from redis.exceptions import RedisError

from llamastead.gateway.answers import no_answer
from llamastead.shared.errors import ApiError
from llamastead.shared.store.errors import NoHerd, StoreError, UnknownModel
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.words import InstanceState, Source, WireStatus

log = logging.getLogger(__name__)

LEAVING = frozenset({InstanceState.DRAINING, InstanceState.STOPPING, InstanceState.STOP_FAILED})
QUIET_SHARE = 20
PARSED_AT_ONCE = 100
PRESETS_S = 2
RUNNING = frozenset({WireStatus.LOADING, WireStatus.LOADED, WireStatus.SLEEPING})


@dataclass(frozen=True)
class CatalogDownload:
    """A download under way: bytes that are here, of all its files (0 while they are not known). `presets`: it
    may bring presets, with models of any name.
    """

    name: str
    state: str = ""
    bytes: int = 0
    total: int = 0
    askers: int = 1
    models: tuple[str, ...] = ()
    presets: bool = False
    progress: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CatalogModel:
    """A registry entry and its state, as Redis has them. `meta` and `progress` are the engine's own words;
    `download` brings its files.
    """

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
    place: str = ""
    warning: str = ""
    evictable: bool = False
    spared: str = ""
    changed: bool = False
    progress: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    download: CatalogDownload | None = None
    timeouts: Mapping[str, float] = field(default_factory=dict)

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
        place=fields.get("place", ""),
        warning=fields.get("warning", ""),
        evictable=fields.get("evictable") == "1",
        spared=fields.get("spared", ""),
        changed=fields.get("changed") == "1",
        progress=json.loads(fields.get("progress") or "{}"),
        meta=json.loads(fields.get("meta") or "{}"),
        metadata=_metadata(fields),
        memory=json.loads(fields.get("memory") or "{}"),
        timeouts=json.loads(fields.get("timeouts") or "{}"),
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


def parse_download(fields: Mapping[str, str]) -> CatalogDownload:
    """Return the download that a `download:<name>` hash describes."""
    return CatalogDownload(
        name=fields["name"],
        state=fields.get("state", ""),
        bytes=int(fields.get("bytes") or 0),
        total=int(fields.get("total") or 0),
        askers=int(fields.get("askers") or 1),
        models=_words(fields, "models"),
        presets=fields.get("presets") == "1",
        progress=json.loads(fields.get("progress") or "{}"),
    )


def _on_its_way(download: CatalogDownload) -> ApiError:
    share = f" ({download.bytes / download.total:.0%})" if download.total else ""
    text = f"model '{download.name}' is on its way from the hub{share}"
    return ApiError(503, text, {"param": "model", "reason": "downloading"}, retry_after=10)


class Catalog:
    """The local copy; see gateway/seams.py for what the byte path may rely on."""

    def __init__(self, store: GatewayStore, reread_s: float) -> None:
        """`reread_s`: the copy is read anew at least so often, whether or not an event came; a copy of
        thousands, which takes long, less often.
        """
        self.herd: Mapping[str, str] = {}
        self.models: Mapping[str, CatalogModel] = {}
        self.downloads: Mapping[str, CatalogDownload] = {}
        self._store = store
        self._reread_s = reread_s
        self._took_s = 0.0
        self._fields: dict[str, Mapping[str, str]] = {}  # what `models` was made of
        self._aliases: Mapping[str, str] = {}
        self._stale: set[str] = set()
        self._downloads_stale = False
        self._all_stale = True
        self._look = asyncio.Event()
        # One that began earlier and is slow must not put its older facts over a later one's.
        self._one_at_a_time = asyncio.Lock()

    def resolve(self, name: str) -> CatalogModel | None:
        """Return the entry of a name or alias, or None."""
        model = self.models.get(name) or self.models.get(self._aliases.get(name, ""))
        return self.with_download(model) if model is not None and self.downloads else model

    def with_download(self, model: CatalogModel) -> CatalogModel:
        """Return a model as it is while its files come from the hub, if they do."""
        download = None if model.running else self.download_of(model.name)
        if download is None:
            return model
        return replace(
            model,
            status=WireStatus.DOWNLOADING,
            state=str(WireStatus.DOWNLOADING),
            progress={"bytes": download.bytes, "total": download.total},
            download=download,
        )

    def download_of(self, model: str) -> CatalogDownload | None:
        """Return the download that has this name, or that this registered model waits for."""
        return self.downloads.get(model) or next(
            (each for each in self.downloads.values() if model in each.models), None
        )

    async def look_again(self, name: str) -> CatalogModel | None:
        """Ask Redis for a name the copy doesn't have.

        ApiError 503 when it can't be asked, and for what is on its way from the hub.
        """
        try:
            canonical = (await self._store.read_aliases()).get(name, name)
            model = parse_model(await self._store.read_model(canonical))
        except (UnknownModel, UnicodeEncodeError):  # half a character, which JSON can hold, names nothing
            if name in self.downloads:
                raise _on_its_way(self.downloads[name]) from None
            if presets := next((each for each in self.downloads.values() if each.presets), None):
                text = f"model '{name}' is not known yet: presets of '{presets.name}' are on their way"
                fields = {"param": "model", "reason": "downloading"}
                raise ApiError(503, text, fields, retry_after=PRESETS_S) from None
            await self._check_open()
            return None
        except (StoreError, RedisError, OSError) as problem:
            raise no_answer(problem, "models can't be looked up") from None
        self.mark_all()
        return model

    async def _check_open(self) -> None:
        """Raise ApiError 503 while no supervisor has opened the herd: before that no name is unknown."""
        try:
            await self._store.read_herd()
        except (StoreError, RedisError, OSError) as problem:
            raise no_answer(problem, "models can't be looked up") from None

    def mark(self, model: str) -> None:
        """Note that a model changed."""
        self._stale.add(model)
        self._look.set()

    def mark_downloads(self) -> None:
        """Note that a download began, moved or ended."""
        self._downloads_stale = True
        self._look.set()

    def mark_all(self) -> None:
        """Note that anything may have changed: the registry was read anew, or events were missed."""
        self._all_stale = True
        self._look.set()

    async def run(self) -> None:
        """Refresh the copy whenever something was marked, and now and then without; until cancelled."""
        while True:
            try:
                async with asyncio.timeout(max(self._reread_s, QUIET_SHARE * self._took_s)):
                    await self._look.wait()
            except TimeoutError:
                self._all_stale = True
            self._look.clear()
            await self._refresh()

    async def read_now(self) -> None:
        """Read the whole copy anew at once: somebody was told that the registry is another now."""
        self._all_stale = True
        await self._refresh()

    async def _refresh(self) -> None:
        async with self._one_at_a_time:
            await self._read_stale()

    async def _read_stale(self) -> None:
        stale, everything = self._stale, self._all_stale
        self._stale, self._all_stale = set(), False
        try:
            if everything:
                await self._read_all()
            else:
                await self._read(stale)
                if self._downloads_stale:
                    await self._read_downloads()
        except (NoHerd, RedisError, OSError) as problem:
            # What is known stays known: running answers and warm requests go on with it.
            log.debug("catalog not refreshed", extra={"problem": str(problem)})
            self._all_stale = True

    async def _read_all(self) -> None:
        began = time.monotonic()
        herd = await self._store.read_herd()
        aliases = await self._store.read_aliases()
        models = await self._store.read_models()
        await self._read_downloads()
        if (await self._store.read_herd()).get("incarnation") != herd.get("incarnation"):
            raise NoHerd("Redis lost its data meanwhile")
        parsed = await self._parse(models)
        self.herd, self._aliases, self.models = herd, aliases, parsed
        self._took_s = time.monotonic() - began

    async def _parse(self, models: Mapping[str, Mapping[str, str]]) -> dict[str, CatalogModel]:
        """Return the models of these fields; only what is not as before is parsed, in pieces."""
        known, before, self._fields = self.models, self._fields, dict(models)
        parsed, fresh = {}, 0
        for name, fields in models.items():
            if name in known and before.get(name) == fields:
                parsed[name] = known[name]
                continue
            parsed[name] = parse_model(fields)
            fresh += 1
            if fresh % PARSED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return parsed

    async def _read_downloads(self) -> None:
        self._downloads_stale = False
        found = await self._store.read_downloads()
        self.downloads = {name: parse_download(fields) for name, fields in found.items()}

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
                self._fields[name] = fields
        self.models = models
