"""The way of one proxied request: find its model, get a claim, carry the bytes, give the claim back."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, quote

from llamastead.gateway.body import Body, ClientGone, Message, Receive, read_body
from llamastead.gateway.headers import is_event_stream, request_head, response_headers
from llamastead.gateway.jsonscan import NotAString
from llamastead.gateway.seams import Admission, Catalog, CatalogModel, Claim, Scope, request_id, route_of
from llamastead.gateway.upstream import AddressRefused, Pools, Response, Unreachable, UpstreamDied
from llamastead.gateway.watch import ClientWatch
from llamastead.shared.errors import ApiError
from llamastead.shared.settings import Settings
from llamastead.shared.words import UseKind

log = logging.getLogger(__name__)

Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 512 * 1024 * 1024
"""The largest request body taken, unless the constructor is told otherwise."""

AUTOLOAD_HEADER = b"x-llamastead-autoload"
"""Does what `?autoload=` does, where a client can't change the address."""

_ADDRESS_TRIES = 3
_SHOWN_CHARS = 200


class AnswerCut(Exception):  # noqa: N818
    """An answer that had begun can't be finished: the connection must close without a clean end."""


class Proxy:
    """ASGI endpoint for every route that an instance answers."""

    def __init__(
        self,
        catalog: Catalog,
        admission: Admission[Any],
        pools: Pools,
        settings: Settings,
        *,
        max_body: int = MAX_BODY_BYTES,
    ) -> None:
        """Take the parts; `max_body` is the largest request body in bytes. Requires: a running event loop."""
        self._catalog = catalog
        self._admission = admission
        self._pools = pools
        self._autoload = settings.models_autoload
        self._max_body = max_body
        self._loop = asyncio.get_running_loop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request. Requires: authenticated, a known route, `scope["state"]` as in seams.py.

        Raises ApiError before the answer began, AnswerCut after. A client that goes ends it quietly.
        """
        body: Body | None = None
        try:
            headers, method = scope["headers"], scope["method"]
            reads = method in ("GET", "HEAD")
            if not reads or _has_body(headers):
                body = await read_body(receive, headers, self._max_body, search=not reads)
            query = dict(parse_qsl(scope["query_string"].decode("latin-1"))) if scope["query_string"] else {}
            model = await self._find_model(body, query)
            self._check_loading(model, scope, query)
            async with ClientWatch(receive, self._loop):
                await self._serve(scope, send, model.name, body or Body())
        except ClientGone:
            log.debug("client gone", extra={"request_id": request_id(scope)})
        finally:
            if body is not None:
                body.close()

    async def _find_model(self, body: Body | None, query: dict[str, str]) -> CatalogModel:
        named = body.model if body is not None else None
        if isinstance(named, NotAString):
            raise ApiError(400, f"`model` must be a string, not {named.shown}", {"param": "model"})
        name = named or query.get("model")
        if not name:
            raise ApiError(400, "model name is missing from the request", {"param": "model"})
        model = self._catalog.resolve(name) or await self._catalog.look_again(name)
        if model is None:
            shown = name if len(name) <= _SHOWN_CHARS else name[:_SHOWN_CHARS] + "…"
            # A lone surrogate can be written in JSON but not in UTF-8.
            shown = shown.encode(errors="backslashreplace").decode()
            raise ApiError(400, f"model '{shown}' not found", {"param": "model"})
        return model

    def _check_loading(self, model: CatalogModel, scope: Scope, query: dict[str, str]) -> None:
        route = route_of(scope)
        would_wake = model.asleep and route.use is not UseKind.PEEK and not route.may_load
        if model.running and not model.leaving and not would_wake:
            return
        asked = query.get("autoload") or _header(scope["headers"], AUTOLOAD_HEADER)
        may_load = asked in ("true", "1") if asked else self._autoload and route.may_load
        if not may_load:
            raise ApiError(400, "model is not loaded", {"param": "model"})

    async def _serve(self, scope: Scope, send: Send, model: str, body: Body) -> None:
        claim: Claim = await self._admission.acquire(
            model, route_of(scope).use or UseKind.READ, request_id(scope)
        )
        try:
            for _ in range(_ADDRESS_TRIES):
                try:
                    response = await self._ask(claim, scope, body)
                    break
                except AddressRefused:
                    self._pools.drop(claim.instance)
                    claim = await self._admission.refused(claim)
            else:
                raise ApiError(503, f"no instance of '{model}' could be reached", retry_after=1)
            claim.answered(response.status)
            try:
                await _relay(response, claim, scope, send)
            finally:
                response.close()
        finally:
            claim.close()

    async def _ask(self, claim: Claim, scope: Scope, body: Body) -> Response:
        """Send the request to the claimed instance. Raises AddressRefused, or ApiError for other failures."""
        method: str = scope["method"]
        has_body = method not in ("GET", "HEAD") or body.size > 0
        size = body.size if has_body else None
        head = request_head(method, _target(scope), scope["headers"], size, claim.key, request_id(scope))
        pool = self._pools.get(claim.instance, claim.address)
        try:
            return await pool.exchange(head, body, bodiless=method == "HEAD")
        except Unreachable as problem:
            _log_failure(claim, scope, problem)
            raise ApiError(503, "the model's server takes no connections now", retry_after=1) from problem
        except UpstreamDied as problem:
            _log_failure(claim, scope, problem)
            raise ApiError(502, f"the model's server gave no answer: {problem}") from problem


async def _relay(response: Response, claim: Claim, scope: Scope, send: Send) -> None:
    """Pass the answer on as it comes. Raises AnswerCut when the instance goes before its end, ClientGone.

    A stream that is cut short, by the instance's end or by this gateway's, ends in an error event.
    """
    headers = response_headers(response.status, response.headers, claim, request_id(scope))
    streams = is_event_stream(response.headers)
    began, tail = False, b""
    try:
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        if response.arrived:
            start["body_follows"] = True
        await send(start)
        began = True
        while True:
            data = await response.read()
            ended = response.ended
            await send({"type": "http.response.body", "body": data, "more_body": not ended})
            if ended:
                return
            tail = data if len(data) > 1 else tail[-1:] + data
    except UpstreamDied as problem:
        _log_failure(claim, scope, problem)
        if streams:
            await _send_error(send, ApiError(502, f"the model's server broke off: {problem}"), tail)
        raise AnswerCut(str(problem)) from problem
    except asyncio.CancelledError:
        # This gateway leaves. A client that went, the other reason, hears nothing any more.
        if streams and began:
            with suppress(OSError):
                await _send_error(send, ApiError(503, "the gateway is shutting down"), tail)
        raise
    except OSError as error:
        # What servers of ASGI 2.4 raise from send after a disconnect; reading from the instance raises none.
        raise ClientGone from error


async def _send_error(send: Send, error: ApiError, tail: bytes) -> None:
    """Send an event that ends a stream in error; `tail` is how the stream's bytes ended so far."""
    # An event that was cut is ended first, or this one would become part of it.
    between = "" if not tail or tail.endswith(b"\n\n") else "\n\n"
    event = f"{between}data: {json.dumps(error.body())}\n\n".encode()
    await send({"type": "http.response.body", "body": event, "more_body": True})


def _log_failure(claim: Claim, scope: Scope, problem: Exception) -> None:
    log.warning(
        "instance failed a request",
        extra={"instance": claim.instance, "request_id": request_id(scope), "problem": str(problem)},
    )


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)


def _header(headers: list[tuple[bytes, bytes]], wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in headers if name == wanted), "")


def _target(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path
