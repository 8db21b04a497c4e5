"""uvicorn's HTTP/1.1 protocol with what the byte path needs of it."""

import asyncio
import json
import logging
from collections.abc import Collection
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from llamastead.gateway.answers import send_error
from llamastead.gateway.body import Receive
from llamastead.gateway.routes import PROBES
from llamastead.gateway.seams import AnswerCut, Scope
from llamastead.gateway.writer import AnswerWriter
from llamastead.shared.errors import ApiError

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # an own level spares uvicorn the trace text of every connection


HEAD_MAX_BYTES = 64 * 1024
HEAD_PATIENCE_S = 30.0  # from a request's first byte to the end of its head
BODY_PATIENCE_S = 60.0  # without a further byte of a body

LOOK_EVERY_S = 5.0

FIRST_REQUEST_S = 1.0  # a client that has just connected is about to ask, and may not ask twice

LEAVING = ApiError(503, "the gateway is shutting down", retry_after=1)
FAILED = ApiError(500, "the gateway failed, which is a fault of its own; its log says more")
FULL = ApiError(503, "too many clients at once for this gateway", retry_after=1)


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], AnswerCut | asyncio.CancelledError))


def _id_of(scope: Scope) -> str:
    return str(scope.get("state", {}).get("request_id", ""))


# uvicorn closes the connection of an application that raises, as AnswerCut wants it, but logs a
# trace, too; the proxy has told what happened.
log.addFilter(_is_news)


class EdgeProtocol(HttpToolsProtocol):
    """One client connection. Tells the running request, not only the last pipelined one, when it is lost.

    A connection beyond `limit_concurrency` is refused; uvicorn would refuse everybody while there are more.
    So is one whose request is no HTTP, whose head has no end, or that stops sending in the middle; `look`,
    to be called every few seconds, finds the last of these.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = log
        self._running: RequestResponseCycle | None = None
        self._most_clients, self.limit_concurrency = self.limit_concurrency, None
        self._in_excess = False
        self._in_head = False
        self._head_bytes = 0
        self._leaving = False
        self._since = self.loop.time()  # the head's first byte, or the latest byte of anything else

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection."""
        super().connection_made(transport)
        self._in_excess = self._most_clients is not None and len(self.connections) > self._most_clients

    def data_received(self, data: bytes) -> None:
        """Take what the client sends."""
        was_in_head = self._in_head
        if not was_in_head:
            self._since = self.loop.time()
        super().data_received(data)
        if self._in_head:
            self._head_bytes = self._head_bytes + len(data) if was_in_head else len(data)
            if self._head_bytes > HEAD_MAX_BYTES and not self.transport.is_closing():
                self._refuse(ApiError(431, f"the head of a request may have {HEAD_MAX_BYTES} bytes"))

    def on_message_begin(self) -> None:
        """Note the first byte of a request."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """Note the end of a request's head."""
        self._in_head = False
        super().on_headers_complete()
        if self._leaving and self.cycle is not None:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """Close once no answer is under way; a new connection has a moment for its first request."""
        self._leaving = True
        left_s = self._since + FIRST_REQUEST_S - self.loop.time()
        if self.cycle is None and left_s > 0:
            self.loop.call_later(left_s, super().shutdown)
        else:
            super().shutdown()

    def look(self, now: float) -> None:
        """Refuse a client that stopped sending in the middle of a request. `now` is the loop's time."""
        if self.transport.is_closing():
            return
        silent_s = now - self._since
        if self.cycle is None or (self._in_head and self.cycle.response_complete):
            if silent_s > HEAD_PATIENCE_S:
                self._refuse(ApiError(408, f"no whole request head within {HEAD_PATIENCE_S:g} s"))
        elif self.cycle.more_body and not self.flow.read_paused and silent_s > BODY_PATIENCE_S:
            self._refuse(ApiError(408, f"no further byte of the body within {BODY_PATIENCE_S:g} s"))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of all errors."""
        self._refuse(ApiError(400, f"{msg.rstrip('.')}: it is not HTTP/1.1 as RFC 9112 has it"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without a request and close. Where an answer is under way it is cut instead.

        That answer may be an earlier request's than the last one read: they may come in one go.
        """
        asked = [cycle for cycle in (self._running, self.cycle) if cycle is not None]
        if not any(cycle.response_started and not cycle.response_complete for cycle in asked):
            self.transport.write(_whole(error))
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle

        async def answering(scope: Scope, receive: Receive, _: Any) -> None:
            send = AnswerWriter(cycle)
            if self._in_excess:
                cycle.keep_alive = False
                # Who watches this process would take a refusal for its death, and cut all it serves.
                if scope["path"] not in PROBES:
                    await send_error(send, FULL, "")
                    return
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                # This gateway leaves. uvicorn would say 500, which no client tries again.
                if not cycle.response_started:
                    await send_error(send, LEAVING, _id_of(scope))
                raise
            except Exception:
                if not cycle.response_started:
                    await send_error(send, FAILED, _id_of(scope))
                raise

        super()._start_asgi_task(cycle, answering)  # type: ignore[arg-type]

    def _should_upgrade(self) -> bool:
        """Upgrade a whole opening of a WebSocket; one client too many is refused like any request."""
        whole = self.scope["method"] == "GET" and any(
            name == b"sec-websocket-key" for name, _ in self.headers
        )
        return bool(whole and not self._in_excess and super()._should_upgrade())

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: any client may ask for an upgrade, and gets the answer it would get without."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End every request of the connection."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)


class SocketProtocol(WebSocketsSansIOProtocol):
    """One client's WebSocket, from the request that opens it on.

    That request has been read as any other; here it is read again, more strictly: no body, so many headers,
    none too long. uvicorn would leave a client whose request does not pass without any answer.
    """

    def data_received(self, data: bytes) -> None:
        """Take what the client sends."""
        super().data_received(data)
        problem = self.conn.handshake_exc
        if problem is not None and not self.handshake_initiated and not self.transport.is_closing():
            self.handshake_complete = self.close_sent = True
            reason = problem.__cause__ or problem
            self.transport.write(_whole(ApiError(400, f"this request opens no WebSocket: {reason}")))
            self.transport.close()


def _whole(error: ApiError) -> bytes:
    """Return an answer that refuses, head and all; nothing comes after it."""
    body = json.dumps(error.body()).encode()
    return (
        b"%bcontent-type: application/json; charset=utf-8\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (STATUS_LINE[error.status], len(body), body)
    )


async def look_at_clients(connections: Collection[object]) -> None:
    """Find clients that stopped sending in the middle of a request, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        for connection in list(connections):
            if isinstance(connection, EdgeProtocol):
                connection.look(loop.time())
