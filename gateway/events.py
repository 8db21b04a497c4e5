"""GET /models/sse: what happens to models, in the shape of llama-server's router."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from redis.exceptions import RedisError

from llamastead.gateway.catalog import CatalogModel, parse_model
from llamastead.gateway.views.models import model_info
from llamastead.shared.store.errors import StoreError
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.words import InstanceState, WireStatus

log = logging.getLogger(__name__)

BACKLOG = 1000
COMMENT_S = 15.0

# The states whose beginning the router tells; draining and stopping are still "loaded" on the wire, and of a
# model that wakes only the progress is told.
TOLD: Mapping[str, WireStatus] = {
    InstanceState.STARTING: WireStatus.LOADING,
    InstanceState.LOADING: WireStatus.LOADING,
    InstanceState.READY: WireStatus.LOADED,
    InstanceState.SLEEPING: WireStatus.SLEEPING,
    InstanceState.STOPPED: WireStatus.UNLOADED,
    InstanceState.FAILED: WireStatus.UNLOADED,
}


class EventStreams:
    """Turns the herd's events into the router's and hands them to every open stream."""

    def __init__(self, store: GatewayStore) -> None:
        self._store = store
        self._happened: asyncio.Queue[Mapping[str, str]] = asyncio.Queue()
        self._streams: set[asyncio.Queue[bytes | None]] = set()
        self._told: dict[str, WireStatus] = {}
        self._closed = False

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def on_event(self, event: Mapping[str, str]) -> None:
        """Take an event of the herd."""
        self._happened.put_nowait(event)

    async def run(self) -> None:
        """Translate and hand out until cancelled."""
        while True:
            told = await self._translate(await self._happened.get())
            if told is not None:
                self._hand_out(f"data: {json.dumps(told, separators=(',', ':'))}\n\n".encode())

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield the bytes of one stream until `close`, or until its reader is too far behind."""
        if self._closed:
            return
        mine: asyncio.Queue[bytes | None] = asyncio.Queue(BACKLOG)
        self._streams.add(mine)
        try:
            while True:
                try:
                    async with asyncio.timeout(COMMENT_S):
                        chunk = await mine.get()
                except TimeoutError:
                    chunk = b":\n\n"  # keeps balancers from closing a silent stream
                if chunk is None:
                    return
                yield chunk
        finally:
            self._streams.discard(mine)

    def close(self) -> None:
        """End all streams and refuse new ones: the gateway is leaving."""
        self._closed = True
        for stream in list(self._streams):
            self._end(stream)

    def _hand_out(self, chunk: bytes) -> None:
        for stream in list(self._streams):
            if stream.full():
                self._end(stream)
            else:
                stream.put_nowait(chunk)

    def _end(self, stream: asyncio.Queue[bytes | None]) -> None:
        self._streams.discard(stream)
        if stream.full():
            stream.get_nowait()
        stream.put_nowait(None)

    async def _translate(self, event: Mapping[str, str]) -> dict[str, Any] | None:
        match event["kind"]:
            case "registry":
                # `data` is our own: what changed, and between which revisions of the registry.
                changes = json.loads(event.get("changes") or "{}")
                revisions = {name: event.get(name, "") for name in ("previous", "revision")}
                told: dict[str, Any] = {"model": "*", "event": "models_reload"}
                return told | ({"data": revisions | changes} if changes else {})
            case "download":
                return _download(event)
            case "removed":
                return {"model": event["model"], "event": "model_remove"}
            case "progress":
                progress = json.loads(event["progress"])
                return _change(event["model"], {"status": WireStatus.LOADING, "progress": progress})
            case "status":
                return await self._translate_status(event["model"], event)
            case _:
                return None

    async def _translate_status(self, model: str, event: Mapping[str, str]) -> dict[str, Any] | None:
        status = TOLD.get(event["state"])
        if status is None or (status is self._told.get(model) and status is not WireStatus.UNLOADED):
            return None
        self._told[model] = status
        # `instance`, `memory`, `end_class` and `reason` are our own.
        data: dict[str, Any] = {"status": status, "instance": event["instance"]}
        if status is WireStatus.LOADING:
            return {"model": model, "event": "model_status", "data": data}
        if status is WireStatus.LOADED:
            now = await self._read(model)
            data["info"] = model_info(now)
            if now.memory:
                data["memory"] = dict(now.memory)
        elif status is WireStatus.UNLOADED:
            exit_code = event.get("exit_code", "")
            data |= {"exit_code": int(exit_code) if exit_code else None, "end_class": event["end_class"]}
            if reason := event.get("reason"):
                data["reason"] = reason
        return _change(model, data)

    async def _read(self, model: str) -> CatalogModel:
        try:
            return parse_model(await self._store.read_model(model))
        except (StoreError, RedisError, OSError):
            return CatalogModel(model)


def _download(event: Mapping[str, str]) -> dict[str, Any]:
    """Return what happened to a download; `reason` and `error` of a failed one are our own."""
    model = event["model"]
    match event["change"]:
        case "started":
            return {"model": model, "event": "model_status", "data": {"status": WireStatus.DOWNLOADING}}
        case "progress":
            progress = json.loads(event["progress"])
            return {"model": model, "event": "download_progress", "data": {"progress": progress}}
        case "finished":
            return {"model": model, "event": "download_finished"}
    data = {"reason": event.get("reason", ""), "error": event.get("error", "")}
    return {"model": model, "event": "download_failed", "data": data}


def _change(model: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "event": "status_change", "data": data}
