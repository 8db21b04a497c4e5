"""uvicorn's HTTP/1.1 protocol with what the byte path needs of it."""

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llamastead.gateway.answers import send_error
from llamastead.gateway.body import Receive
from llamastead.gateway.proxy import AnswerCut
from llamastead.gateway.seams import Scope
from llamastead.gateway.writer import AnswerWriter
from llamastead.shared.errors import ApiError

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # an own level spares uvicorn the trace text of every connection


LEAVING = ApiError(503, "the gateway is shutting down", retry_after=1)
FULL = ApiError(503, "too many clients at once for this gateway", retry_after=1)


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], AnswerCut | asyncio.CancelledError))


# uvicorn closes the connection of an application that raises, as AnswerCut wants it, but logs a
# trace, too; the proxy has told what happened.
log.addFilter(_is_news)


class EdgeProtocol(HttpToolsProtocol):
    """One client connection. Tells the running request, not only the last pipelined one, when it is lost.

    A connection beyond `limit_concurrency` is refused; uvicorn would refuse everybody while there are more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = log
        self._running: RequestResponseCycle | None = None
        self._most_clients, self.limit_concurrency = self.limit_concurrency, None
        self._in_excess = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection."""
        super().connection_made(transport)
        self._in_excess = self._most_clients is not None and len(self.connections) > self._most_clients

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle

        async def answering(scope: Scope, receive: Receive, _: Any) -> None:
            send = AnswerWriter(cycle)
            if self._in_excess:
                cycle.keep_alive = False
                await send_error(send, FULL, "")
                return
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                # This gateway leaves. uvicorn would say 500, which no client tries again.
                if not cycle.response_started:
                    await send_error(send, LEAVING, scope.get("state", {}).get("request_id", ""))
                raise

        super()._start_asgi_task(cycle, answering)  # type: ignore[arg-type]

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: any client may ask for an upgrade, and gets the answer it would get without."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End every request of the connection."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)
