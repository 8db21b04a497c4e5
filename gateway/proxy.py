"""The way of one proxied request: find its model, get a claim, carry the bytes, give the claim back."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote

from llamastead.gateway.body import Body, ClientGone, Receive, read_body
from llamastead.gateway.conversations import Carried, Conversations
from llamastead.gateway.headers import HeaderList, header, is_event_stream, request_head, response_headers
from llamastead.gateway.jsonscan import NotAString
from llamastead.gateway.pings import SHUTTING_DOWN, Pings, Send, error_event, may_ping
from llamastead.gateway.seams import (
    Admission,
    AnswerCut,
    Catalog,
    CatalogModel,
    Claim,
    NoLoad,
    Scope,
    probes,
    request_id,
    route_of,
)
from llamastead.gateway.tally import Tally
from llamastead.gateway.timeouts import FIRST_BYTE, IDLE, TOTAL, Patience, TimedOut, limits
from llamastead.gateway.upstream import AddressRefused, Pools, Response, Unreachable, UpstreamDied
from llamastead.gateway.watch import ClientWatch
from llamastead.gateway.writer import pass_on_of
from llamastead.shared.addresses import outlives_its_instance
from llamastead.shared.errors import ApiError
from llamastead.shared.settings import Settings
from llamastead.shared.words import UseKind

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 512 * 1024 * 1024
"""The largest request body taken, unless the constructor is told otherwise."""

AUTOLOAD_HEADER = b"x-llamastead-autoload"
"""Does what `?autoload=` does, for those who can't change the address; `false` stands against any address."""

YES = ("true", "1")

ADDRESS_TRIES = 3
_SHOWN_CHARS = 200


class Proxy:
    """ASGI endpoint for every route that an instance answers."""

    def __init__(
        self,
        catalog: Catalog,
        admission: Admission[Any],
        pools: Pools,
        settings: Settings,
        conversations: Conversations | None = None,
        tally: Tally | None = None,
        *,
        max_body: int = MAX_BODY_BYTES,
    ) -> None:
        """Take the parts; `max_body` is the largest request body in bytes. Requires: a running event loop."""
        self._tally = tally or Tally()
        self._catalog = catalog
        self._admission = admission
        self._pools = pools
        self._conversations = conversations
        self._autoload = settings.models_autoload
        self._timeouts = limits(
            {
                FIRST_BYTE: settings.first_byte_timeout,
                IDLE: settings.idle_timeout,
                TOTAL: settings.total_timeout,
            },
            {},
        )
        self._ping_delay, self._ping_interval = settings.ping_delay, settings.ping_interval
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
            model = await self.find_model(body, query)
            self.check_loading(model, scope, query)
            body = body or Body()
            carried = None
            if self._conversations is not None:
                carried = await self._conversations.begin(scope, body, model.name)
            pings = self._pings(scope, send, body, model)
            if carried is None:
                async with ClientWatch(receive, self._loop), pings as send:
                    with self._counting(scope, model):
                        await self._serve(scope, send, model, body, query)
            else:
                # Whether or not its client stays: only the answer is watched.
                async with pings as send, carried:
                    lead = pings.end_lead if isinstance(pings, Pings) else None
                    renamed = carried.renamed(scope)
                    with self._counting(renamed, model):
                        await self._serve(renamed, send, model, body, query, carried, receive, lead)
        except ClientGone:
            log.debug("client gone", extra={"request_id": request_id(scope)})
        finally:
            if body is not None:
                body.close()

    def _pings(
        self, scope: Scope, send: Send, body: Body, model: CatalogModel
    ) -> AbstractAsyncContextManager[Send]:
        if self._ping_interval <= 0 or not may_ping(scope, body):
            return nullcontext(send)
        arrived = self._loop.time()

        def state() -> dict[str, Any]:
            now = self._catalog.resolve(model.name) or model
            waited = round(self._loop.time() - arrived, 1)
            return {"model": model.name, "state": now.state, "progress": now.progress, "waited_s": waited}

        return Pings(send, scope, body, self._ping_delay, self._ping_interval, state)

    async def find_model(self, body: Body | None, query: dict[str, str]) -> CatalogModel:
        """Return the model that a request names, in its body or else in its query. Raises ApiError 400."""
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
        other = query.get("model")
        if other and other != name and not self._is(other, model):
            message = f"the body names model '{model.name}', the query another one: name it once"
            raise ApiError(400, message, {"param": "model"})
        return model

    def _is(self, name: str, model: CatalogModel) -> bool:
        found = self._catalog.resolve(name)
        return found is not None and found.name == model.name

    def check_loading(self, model: CatalogModel, scope: Scope, query: dict[str, str]) -> None:
        """Raise ApiError where the request would load a model, or wake it, and may not: 503 where its header
        or its key forbid it, else 400 as llama-server. This is as the copy of the registry has it; admission
        has the last word.
        """
        there = model.running and not model.leaving
        would_wake = model.asleep and route_of(scope).use is not UseKind.PEEK
        if there and not would_wake:
            return
        no_load = self.no_load(scope, query)
        if no_load is not None and not (there and no_load.may_wake):
            self._count(scope, model, no_load.error.status)
            raise no_load.error

    def no_load(self, scope: Scope, query: dict[str, str]) -> NoLoad | None:
        """Return that the request may not have a model loaded, None if it may."""
        route, in_header, probe = route_of(scope), header(scope["headers"], AUTOLOAD_HEADER), probes(scope)
        if probe or (in_header and in_header not in YES):
            # The operator's word, who may have put the header there: no address overrules it.
            error = ApiError(503, "model is not loaded", {"param": "model", "reason": "not_loaded"})
            return NoLoad(error, may_wake=route.may_load and not probe)
        asked = query.get("autoload") or in_header
        if asked in YES if asked else self._autoload and route.may_load:
            return None
        return NoLoad(ApiError(400, "model is not loaded", {"param": "model"}), may_wake=route.may_load)

    @contextmanager
    def _counting(self, scope: Scope, model: CatalogModel) -> Iterator[None]:
        """Count what ends in an error, before a ping has made a stream's end of it."""
        try:
            yield
        except ApiError as refusal:
            self._count(scope, model, refusal.status)
            raise
        except AnswerCut:
            if route_of(scope).use is UseKind.INFERENCE:
                self._tally.cut(model.name)
            raise

    def _count(self, scope: Scope, model: CatalogModel, status: int) -> None:
        if route_of(scope).use is UseKind.INFERENCE:
            self._tally.answered(model.name, status)

    async def _serve(
        self,
        scope: Scope,
        send: Send,
        model: CatalogModel,
        body: Body,
        query: dict[str, str],
        carried: Carried | None = None,
        receive: Receive | None = None,
        end_lead: Callable[[HeaderList], Awaitable[int]] | None = None,
    ) -> None:
        no_load = partial(self.no_load, scope, query)
        claim: Claim = await self._admission.acquire(
            model.name, route_of(scope).use or UseKind.READ, request_id(scope), no_load
        )
        if claim.path == "cold" and route_of(scope).use is UseKind.INFERENCE:
            self._tally.waited(model.name, claim.wait_ms)
        patience = None
        if self._timeouts or model.timeouts:
            patience = Patience(limits(self._timeouts, model.timeouts))
        key_refused = False
        try:
            for _ in range(ADDRESS_TRIES):
                try:
                    response = await self._ask(claim, scope, body, patience)
                    if response.status != 401 or key_refused or not outlives_its_instance(claim.address):
                        break
                    # Its instance has ended, and another one listens there. Twice it is the key.
                    key_refused = True
                    response.close()
                except AddressRefused:
                    pass
                self._pools.drop(claim.instance)
                claim = await self._admission.refused(claim, no_load)
            else:
                raise ApiError(503, f"no instance of '{model.name}' could be reached", retry_after=1)
            claim.answered(response.status)
            body.forget()
            try:
                if response.status == 401:
                    raise wrong_key(claim)
                if carried is None or receive is None:
                    self._count(scope, model, response.status)
                    await relay(response, claim, scope, send, patience)
                else:
                    headers = response_headers(response.status, response.headers, claim, request_id(scope))
                    lead = await end_lead(headers) if end_lead else 0
                    async with (
                        carried.answering(claim, response.status, lead),
                        ClientWatch(receive, self._loop),
                    ):
                        self._count(scope, model, response.status)
                        await relay(response, claim, scope, send, patience, goes_on=True)
            finally:
                response.close()
        finally:
            claim.close()

    async def _ask(self, claim: Claim, scope: Scope, body: Body, patience: Patience | None) -> Response:
        """Send the request to the claimed instance. Raises AddressRefused, or ApiError for other failures."""
        method: str = scope["method"]
        has_body = method not in ("GET", "HEAD") or body.size > 0
        size = body.size if has_body else None
        head = request_head(method, _target(scope), scope["headers"], size, claim.key, request_id(scope))
        pool = self._pools.get(claim.instance, claim.address)
        try:
            answer = pool.exchange(head, body, bodiless=method == "HEAD")
            return await (answer if patience is None else patience.wait(answer, FIRST_BYTE))
        except Unreachable as problem:
            _log_failure(claim, scope, problem)
            raise ApiError(
                503, f"the model's server takes no connections now: {problem}", retry_after=1
            ) from problem
        except TimedOut as problem:
            _log_failure(claim, scope, problem)
            raise ApiError(504, f"the model's server gave no answer: {problem}") from problem
        except UpstreamDied as problem:
            _log_failure(claim, scope, problem)
            raise ApiError(502, f"the model's server gave no answer: {problem}") from problem


async def relay(
    response: Response,
    claim: Claim,
    scope: Scope,
    send: Send,
    patience: Patience | None,
    *,
    goes_on: bool = False,
) -> None:
    """Pass the answer on as it comes. Raises AnswerCut when the instance goes before its end, ClientGone.

    A stream that is cut short, by the instance's end or by this gateway's, ends in an error event; not by
    this gateway's where the answer `goes_on`: it is no error, and the client would count the event's bytes.
    """
    headers = response_headers(response.status, response.headers, claim, request_id(scope))
    streams = is_event_stream(response.headers)
    began, tail = False, b""
    write = pass_on_of(send) if patience is None else None

    def pass_on(data: bytes) -> bool:
        nonlocal tail
        passed = write is not None and write(data)
        if passed:
            tail = data if len(data) > 1 else tail[-1:] + data
        return passed

    try:
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        if response.arrived:
            start["body_follows"] = True
        await send(start)
        began = True
        while True:
            if write is not None:
                await response.pour(pass_on)
            data = await (response.read() if patience is None else patience.wait(response.read(), IDLE))
            ended = response.ended
            piece = {"type": "http.response.body", "body": data, "more_body": not ended}
            await (send(piece) if patience is None else patience.wait(send(piece)))
            if ended:
                return
            tail = data if len(data) > 1 else tail[-1:] + data
    except UpstreamDied as problem:
        _log_failure(claim, scope, problem)
        status = 504 if isinstance(problem, TimedOut) else 502
        if streams:
            await _send_error(send, scope, ApiError(status, f"the model's server broke off: {problem}"), tail)
        raise AnswerCut(str(problem)) from problem
    except asyncio.CancelledError:
        # This gateway leaves. A client that went, the other reason, hears nothing any more.
        if streams and began and not goes_on:
            with suppress(OSError):
                await _send_error(send, scope, SHUTTING_DOWN, tail)
        raise
    except OSError as error:
        # What servers of ASGI 2.4 raise from send after a disconnect; reading from the instance raises none.
        raise ClientGone from error


async def _send_error(send: Send, scope: Scope, error: ApiError, tail: bytes) -> None:
    """Send an event that ends a stream in error; `tail` is how the stream's bytes ended so far."""
    # An event that was cut is ended first, or this one would become part of it.
    between = b"" if not tail or tail.endswith(b"\n\n") else b"\n\n"
    event = between + error_event(error.body(), scope["path"])
    await send({"type": "http.response.body", "body": event, "more_body": True})


def wrong_key(claim: Claim) -> ApiError:
    """Return what a client is told whose own key was right."""
    log.error("instance refused this gateway's key", extra={"instance": claim.instance})
    return ApiError(502, "the model's server refused this gateway's key: the herd secrets differ")


def _log_failure(claim: Claim, scope: Scope, problem: Exception) -> None:
    log.warning(
        "instance failed a request",
        extra={"instance": claim.instance, "request_id": request_id(scope), "problem": str(problem)},
    )


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)


def _target(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path
