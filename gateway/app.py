"""The ASGI application of a gateway: request id, key, route, and the answer."""

import logging
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from itertools import count
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from redis.exceptions import RedisError
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from llamastead.gateway.answers import read_body, send_empty, send_error, send_json, send_stream, send_text
from llamastead.gateway.auth import Keys
from llamastead.gateway.cors import Cors
from llamastead.gateway.instance_metrics import InstanceMetrics
from llamastead.gateway.routes import OPEN_PATHS, PROBES, WITH_MODEL_PROXIED, Access, Route, Router, Serves
from llamastead.gateway.runtime import Gateway
from llamastead.gateway.views.health import ALIVE, readiness
from llamastead.gateway.views.logs import follow, read_tail, wanted_lines
from llamastead.gateway.views.metrics import herd_page, process_page
from llamastead.gateway.views.models import list_models, show_model
from llamastead.gateway.views.orders import (
    download_model,
    load_model,
    reload_models,
    remove_model,
    unload_model,
)
from llamastead.gateway.views.props import router_props
from llamastead.gateway.views.queue import show_queue
from llamastead.gateway.views.web_ui import WebUi
from llamastead.shared.errors import ApiError
from llamastead.shared.store.errors import StoreError

log = logging.getLogger(__name__)

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]

NOWHERE = "/\0"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class App:
    """Serves the routes of gateway/routes.py: views itself, everything with a model through `proxy`."""

    def __init__(self, gateway: Gateway, proxy: Endpoint, keys: Keys, sockets: Endpoint) -> None:
        self._gateway = gateway
        self._proxy = proxy
        self._sockets = sockets
        self._keys = keys
        self._asks = {"owner": keys.owner, "probes": keys.probes}
        self._router = Router()
        self._cors = Cors.of(gateway.settings)
        self._instance_metrics = InstanceMetrics(gateway.catalog, gateway.store, proxy)
        self._web_ui = WebUi(gateway.settings.run_dir)
        self._ids = _new_ids()
        self._prefix = gateway.settings.api_prefix
        folder = gateway.settings.static_path
        self._static = StaticFiles(directory=folder, html=True) if folder else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Requires: scope types http and websocket only (the server runs no lifespan)."""
        request_id, origin = _edge_headers(scope)
        request_id = request_id or next(self._ids)
        if self._prefix:
            scope = _without_prefix(scope, self._prefix)
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send, request_id)
            return
        if origin:
            send = self._cors.answering(send, origin)
        if scope["method"] == "OPTIONS":
            await self._cors.preflight(scope, receive, send, request_id)
            return
        try:
            await self._serve(scope, receive, send, request_id)
        except (ApiError, StoreError, RedisError) as problem:
            await send_error(send, _refusal(problem, scope), request_id)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        async def refuse(message: Message) -> None:
            await send({**message, "type": f"websocket.{message['type']}"})

        await receive()  # websocket.connect
        try:
            self._keys.check(Access.INFERENCE, scope["headers"])
            route = self._router.find_socket(scope["path"])
            if route is None:
                raise ApiError(404, "File Not Found")
            scope["state"] = {"request_id": request_id, "route": route, **self._asks}
            await self._sockets(scope, receive, send)
        except (ApiError, StoreError, RedisError) as problem:
            await send_error(refuse, _refusal(problem, scope), request_id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        path = scope["path"]
        found = self._router.find(scope["method"], path)
        if found is None:
            reads = scope["method"] in ("GET", "HEAD")
            if reads and self._static:
                if path not in OPEN_PATHS:
                    self._keys.check(Access.INFERENCE, scope["headers"])
                await self._file(self._static, scope, receive, send)
                return
            if reads and self._web_ui.has(self._gateway.catalog.herd.get("web_ui", ""), path):
                await (await self._web_ui.page(path, scope["headers"], request_id))(scope, receive, send)
                return
            if path not in OPEN_PATHS:
                self._keys.check(Access.INFERENCE, scope["headers"])
            raise ApiError(404, "File Not Found")
        route, rest = found
        self._keys.check(route.access, scope["headers"])
        scope["state"] = {"request_id": request_id, "route": route, **self._asks}
        named = _query(scope).get("model") if route.serves in WITH_MODEL_PROXIED else None
        if route.serves is Serves.METRICS and named:
            await self._instance_metrics(scope, receive, send, named)
        elif route.serves is Serves.PROXY or named:
            await self._proxy(scope, receive, send)
        elif route.serves is Serves.EVENTS:
            stream = self._gateway.events.stream()
            await send_stream(receive, send, stream, "text/event-stream", request_id)
        elif route.serves is Serves.METRICS:
            page = await herd_page(self._gateway.store)
            await send_text(send, page, request_id, CONTENT_TYPE_PLAIN_0_0_4)
        elif route.serves is Serves.PROCESS:
            await send_text(send, process_page(self._gateway), request_id, CONTENT_TYPE_PLAIN_0_0_4)
        elif route.serves is Serves.STREAM:
            await self._stream(scope, receive, send, rest, request_id)
        elif route.serves is Serves.LOGS:
            await self._logs(scope, receive, send, rest, request_id)
        else:
            status, answer = await self._view(route, rest, scope, receive)
            await send_json(send, status, answer, request_id)

    @staticmethod
    async def _file(static: StaticFiles, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await static.get_response(static.get_path(scope), scope)
        except HTTPException:
            raise ApiError(404, "File Not Found") from None
        await answer(scope, receive, send)

    async def _view(self, route: Route, rest: str, scope: Scope, receive: Receive) -> tuple[int, object]:
        gateway = self._gateway
        match route.serves:
            case Serves.HEALTH | Serves.LIVE:
                return 200, ALIVE
            case Serves.READY:
                return readiness(gateway)
            case Serves.MODELS:
                query = _query(scope)
                if query.get("reload") in ("1", "true"):
                    await reload_models(gateway.catalog, gateway.commands)
                return 200, list_models(gateway.catalog, hidden=query.get("hidden") in ("1", "true"))
            case Serves.MODEL:
                return 200, show_model(gateway.catalog, rest)
            case Serves.PROPS:
                return 200, router_props(gateway.settings, gateway.catalog.herd, await self._devices())
            case Serves.QUEUE:
                return 200, await show_queue(gateway.store, gateway.id, gateway.admission.leases.busy())
            case Serves.LOAD:
                body = await read_body(scope, receive)
                return 200, await load_model(gateway.catalog, gateway.commands, body)
            case Serves.UNLOAD:
                body = await read_body(scope, receive)
                return 200, await unload_model(gateway.catalog, gateway.commands, body)
            case Serves.RELOAD:
                body = await read_body(scope, receive)
                return 200, await reload_models(gateway.catalog, gateway.commands, body)
            case Serves.LOOKUP:
                return 200, await gateway.replay.look_up(scope, await read_body(scope, receive))
            case Serves.DOWNLOAD:
                return 200, await download_model(gateway.commands, await read_body(scope, receive))
            case Serves.REMOVE:
                model = _query(scope).get("model", "")
                return 200, await remove_model(gateway.catalog, gateway.commands, model)
            case Serves.DISABLED:
                return 403, {"error": {"message": "this feature is disabled", "type": "feature_disabled"}}
        raise ApiError(404, "File Not Found")

    async def _devices(self) -> dict[str, dict[str, Any]]:
        """Return the accounts of the host's memory; none while Redis is away: the rest can be told."""
        try:
            return await self._gateway.store.read_devices(self._gateway.catalog.herd.get("host", ""))
        except RedisError:
            return {}

    async def _stream(
        self, scope: Scope, receive: Receive, send: Send, conversation: str, request_id: str
    ) -> None:
        if scope["method"] == "DELETE":
            await self._gateway.replay.stop(scope, conversation)
            await send_empty(send, request_id)
        else:
            await self._gateway.replay.read(scope, receive, send, conversation)

    async def _logs(self, scope: Scope, receive: Receive, send: Send, name: str, request_id: str) -> None:
        gateway, query = self._gateway, _query(scope)
        model = gateway.catalog.resolve(name) or await gateway.catalog.look_again(name)
        if model is None:
            raise ApiError(404, f"model '{name}' not found")
        text, offset = await read_tail(gateway.commands, model.name, wanted_lines(query.get("lines")))
        if query.get("follow") not in ("1", "true"):
            await send_text(send, text, request_id)
            return

        async def lines() -> AsyncGenerator[bytes]:
            yield text.encode()
            async for piece in follow(gateway.commands, model.name, offset, gateway.draining):
                yield piece.encode()

        await send_stream(receive, send, lines(), "text/plain; charset=utf-8", request_id)


def _refusal(problem: Exception, scope: Scope) -> ApiError:
    """Return what a client is told of a problem: a refusal as it is, or that Redis does not answer."""
    if isinstance(problem, ApiError):
        return problem
    log.warning("no answer from Redis", extra={"path": scope["path"], "problem": str(problem)})
    return ApiError(503, "Redis is not reachable", retry_after=5)


def _without_prefix(scope: Scope, prefix: str) -> Scope:
    """Return the scope as if the prefix were not there; a path without it leads nowhere, save for probes."""
    path = scope["path"]
    if path in PROBES:
        return scope
    if path != prefix and not path.startswith(f"{prefix}/"):
        return {**scope, "path": NOWHERE, "raw_path": NOWHERE.encode()}
    raw, end = scope.get("raw_path") or b"", 0
    for _ in prefix.encode():
        # A client may write any byte as an escape.
        end += 3 if raw[end : end + 1] == b"%" else 1
    return {**scope, "path": path[len(prefix) :] or "/", "raw_path": raw[end:] or b"/"}


def _edge_headers(scope: Scope) -> tuple[str, bytes]:
    """Return the client's own request id if it is a plain word, and its Origin; each empty without one."""
    request_id, origin = "", b""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            request_id = value.decode()
        elif name == b"origin":
            origin = value
    return request_id, origin


def _new_ids() -> Iterator[str]:
    """Return request ids that nobody else gives: a random beginning and a count, no system call each."""
    beginning = os.urandom(8).hex()
    return (f"{beginning}{number:08x}" for number in count())


def _query(scope: Scope) -> QueryParams:
    return QueryParams(scope["query_string"])
