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
from starlette.types import Receive, Scope, Send

from llamastead.gateway.answers import read_body, send_error, send_json, send_stream, send_text
from llamastead.gateway.auth import Keys
from llamastead.gateway.cors import allow_origin, preflight
from llamastead.gateway.routes import OPEN_PATHS, WITH_MODEL_PROXIED, Access, Route, Router, Serves
from llamastead.gateway.runtime import Gateway
from llamastead.gateway.views.health import ALIVE, readiness
from llamastead.gateway.views.logs import follow, read_tail, wanted_lines
from llamastead.gateway.views.metrics import herd_page, process_page
from llamastead.gateway.views.models import list_models, show_model
from llamastead.gateway.views.orders import load_model, unload_model
from llamastead.gateway.views.props import router_props
from llamastead.gateway.views.queue import show_queue
from llamastead.shared.errors import ApiError
from llamastead.shared.store.errors import StoreError

log = logging.getLogger(__name__)

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class App:
    """Serves the routes of gateway/routes.py: views itself, everything with a model through `proxy`."""

    def __init__(self, gateway: Gateway, proxy: Endpoint, keys: Keys) -> None:
        self._gateway = gateway
        self._proxy = proxy
        self._keys = keys
        self._router = Router()
        self._ids = _new_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Requires: scope types http and websocket only (the server runs no lifespan)."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        request_id, origin = _edge_headers(scope)
        request_id = request_id or next(self._ids)
        if origin:
            send = allow_origin(send, origin)
        if scope["method"] == "OPTIONS":
            await preflight(scope, receive, send, request_id)
            return
        try:
            await self._serve(scope, receive, send, request_id)
        except ApiError as refusal:
            await send_error(send, refusal, request_id)
        except (StoreError, RedisError) as problem:
            log.warning("no answer from Redis", extra={"path": scope["path"], "problem": str(problem)})
            await send_error(send, ApiError(503, "Redis is not reachable", retry_after=5), request_id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        path = scope["path"]
        found = self._router.find(scope["method"], path)
        if found is None:
            if path not in OPEN_PATHS:
                self._keys.check(Access.INFERENCE, scope["headers"])
            raise ApiError(404, "File Not Found")
        route, rest = found
        self._keys.check(route.access, scope["headers"])
        scope["state"] = {"request_id": request_id, "route": route}
        if route.serves is Serves.PROXY or (
            route.serves in WITH_MODEL_PROXIED and _query(scope).get("model")
        ):
            await self._proxy(scope, receive, send)
        elif route.serves is Serves.EVENTS:
            stream = self._gateway.events.stream()
            await send_stream(receive, send, stream, "text/event-stream", request_id)
        elif route.serves is Serves.METRICS:
            page = await herd_page(self._gateway.store)
            await send_text(send, page, request_id, CONTENT_TYPE_PLAIN_0_0_4)
        elif route.serves is Serves.PROCESS:
            await send_text(send, process_page(self._gateway), request_id, CONTENT_TYPE_PLAIN_0_0_4)
        elif route.serves is Serves.LOGS:
            await self._logs(scope, receive, send, rest, request_id)
        else:
            status, answer = await self._view(route, rest, scope, receive)
            await send_json(send, status, answer, request_id)

    async def _view(self, route: Route, rest: str, scope: Scope, receive: Receive) -> tuple[int, object]:
        gateway = self._gateway
        match route.serves:
            case Serves.HEALTH | Serves.LIVE:
                return 200, ALIVE
            case Serves.READY:
                return readiness(gateway)
            case Serves.MODELS:
                return 200, list_models(gateway.catalog)
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
            case Serves.DISABLED:
                return 403, {"error": {"message": "this feature is disabled", "type": "feature_disabled"}}
        raise ApiError(404, "File Not Found")

    async def _devices(self) -> dict[str, dict[str, Any]]:
        """Return the accounts of the host's memory; none while Redis is away: the rest can be told."""
        try:
            return await self._gateway.store.read_devices(self._gateway.catalog.herd.get("host", ""))
        except RedisError:
            return {}

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
