"""Keeps the client of a stream that says nothing yet: comment lines while it waits, loads, reads its prompt.

Until the first of them goes out nothing is promised, and a refusal has its own status. From then on the
answer is a 200 and a stream of events, and a refusal is its one and last event.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from llamastead.gateway.body import Body, Message
from llamastead.gateway.headers import HeaderList, event_stream_head, header, is_event_stream, our_facts
from llamastead.gateway.jsonscan import BrokenJson, JsonScan, NotAString
from llamastead.gateway.seams import Scope, request_id, route_of
from llamastead.gateway.writer import pass_on_of
from llamastead.shared.errors import TYPES, ApiError

Send = Callable[[Message], Awaitable[None]]
State = Callable[[], dict[str, Any]]

PROGRESS_HEADER = b"x-llamastead-progress"
"""`true` makes an event of each ping: named, and no part of the answer's text."""
PROGRESS_EVENT = "llamastead.progress"

SHUTTING_DOWN = ApiError(503, "the gateway is shutting down")

_ERROR_BYTES = 64 * 1024


async def asks_for_stream(body: Body) -> bool:
    """Tell whether a request's body is a JSON object with `"stream": true` at its top."""
    scan = JsonScan("stream")
    try:
        offset = 0
        while offset < body.size:
            piece = body.data if body.in_memory else await body.read_at(offset)
            scan.feed(piece)
            offset += len(piece)
        return scan.finish() == NotAString("true")
    except BrokenJson:  # a form, for example
        return False


def error_event(error: dict[str, Any], path: str) -> bytes:
    """Return the event that ends a stream in error; `error` is a body as ApiError makes it."""
    if path.endswith("/v1/messages"):
        # Clients of this protocol look for the name, and skip data without one.
        return b"event: error\ndata: %b\n\n" % json.dumps({"type": "error", **error}).encode()
    return b"data: %b\n\n" % json.dumps(error).encode()


class Pings:
    """The answer to one request that may ask for a stream; it is called in place of the server's `send`.

    Use as an async context around everything that may take long. Inside, `began` tells that the head went out
    with a ping; then an ApiError that leaves the context becomes the stream's last event.
    """

    def __init__(
        self, send: Send, scope: Scope, body: Body, delay_s: float, interval_s: float, state: State
    ) -> None:
        """`state` returns what a progress event tells; `delay_s` is the silence before the first ping."""
        self.began = False
        self._send = send
        self._pass_on = pass_on_of(send)
        self._scope = scope
        self._body = body
        self._delay_s = delay_s
        self._interval_s = interval_s
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._writing: asyncio.Future[None] | None = None  # done when the ping that goes out now is out
        self._headed = False
        self._busy = False
        self._silent = False
        self._tail = b""
        self._spoke_at = -math.inf
        self._error: bytearray | None = None
        self._error_status = 0
        self._over = False
        self._lead = 0
        self._lead_over = False
        self._answered = False

    async def __aenter__(self) -> Send:
        """Begin to count the silence."""
        self._body.kept = True
        self._timer = self._loop.call_later(self._delay_s, self._begin)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """End the pings; swallow an ApiError that could still be told as an event."""
        assert self._timer is not None
        self._timer.cancel()
        if self._pinging is None:
            return False
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        self._pinging.cancel()
        if not self.began or self._over:
            return False
        if self._error is not None:
            await self._end(_as_error(self._error_status, bytes(self._error)))
            return False
        if isinstance(error, ApiError):
            await self._end(error.body())
            return True
        if isinstance(error, asyncio.CancelledError) and not self._tail:
            # This gateway leaves; a client that went, the other reason, hears nothing any more.
            with suppress(OSError):
                await self._end(SHUTTING_DOWN.body())
        return False

    async def end_lead(self, headers: HeaderList) -> int:
        """Send no more pings, and return how many bytes of ours the client gets before those of the answer.

        For an answer that can be resumed: clients count the bytes they get, and ask for what comes after as
        many. Once it begins the engine keeps its client itself, by comments that it counts. `headers` are
        what the answer is about to begin with.
        """
        self._lead_over = True
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        return self._lead + (len(_facts(headers)) if self.began else 0)

    def pass_on(self, data: bytes) -> bool:
        """Write a piece from the middle of the answer at once; False where it has to be sent."""
        if self._pass_on is None or self._writing is not None or self._error is not None:
            return False
        if not self._pass_on(data):
            return False
        self._note(data)
        self._spoke_at = self._loop.time()
        return True

    def _note(self, data: bytes) -> None:
        self._tail = data[-2:] if len(data) > 1 else self._tail[-1:] + data

    async def __call__(self, message: Message) -> None:
        """Pass on one message of the answer, in the shape that what was sent so far allows."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        self._busy = True
        try:
            if message["type"] == "http.response.start":
                await self._start(message)
            elif self._error is not None:
                await self._collect(message)
            else:
                self._note(message.get("body", b""))
                self._over = not message.get("more_body", False)
                await self._send(message)
        finally:
            self._busy = False
            self._spoke_at = self._loop.time()

    async def _start(self, message: Message) -> None:
        streams = message["status"] == 200 and is_event_stream(message["headers"])
        self._answered = True
        self._silent = not streams
        if not self.began:
            self._headed = True
            await self._send(message)
        elif streams:
            await self._send(_piece(_facts(message["headers"])))
        else:
            self._error, self._error_status = bytearray(), message["status"]

    async def _collect(self, message: Message) -> None:
        assert self._error is not None
        if len(self._error) < _ERROR_BYTES:
            self._error += message.get("body", b"")
        if not message.get("more_body", False):
            await self._end(_as_error(self._error_status, bytes(self._error)))

    async def _end(self, error: dict[str, Any]) -> None:
        self._over = True
        await self._send(_piece(error_event(error, self._scope["path"]), more=False))

    def _begin(self) -> None:
        self._pinging = self._loop.create_task(self._ping())

    async def _ping(self) -> None:
        with suppress(OSError):  # what servers of ASGI 2.4 raise once the client has gone
            asks = await asks_for_stream(self._body)
            self._body.kept = False
            if self._answered:
                self._body.forget()
            if not asks:
                return
            shown = header(self._scope["headers"], PROGRESS_HEADER) in ("true", "1")
            while True:
                due = self._spoke_at + self._interval_s - self._loop.time()
                if due > 0:
                    await asyncio.sleep(due)
                    continue
                # Only between events, and never where the head told of something else than a stream.
                between = not self._tail or self._tail == b"\n\n"
                if between and not (self._busy or self._silent or self._over or self._lead_over):
                    await self._write(self._progress() if shown else b": waiting\n\n")
                await asyncio.sleep(self._interval_s)

    async def _write(self, ping: bytes) -> None:
        self._writing = self._loop.create_future()
        try:
            if not self._headed:
                self.began = self._headed = True
                head: HeaderList = event_stream_head(request_id(self._scope))
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": head, "body_follows": True}
                )
            self._lead += len(ping)
            await self._send(_piece(ping))
        finally:
            self._writing.set_result(None)
            self._writing = None

    def _progress(self) -> bytes:
        return f"event: {PROGRESS_EVENT}\ndata: {json.dumps(self._state())}\n\n".encode()


def may_ping(scope: Scope, body: Body) -> bool:
    """Tell whether a request is one whose answer may be a stream of events."""
    return route_of(scope).streams and body.size > 0


def _facts(headers: HeaderList) -> bytes:
    return b": %b\n\n" % our_facts(headers)


def _piece(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _as_error(status: int, body: bytes) -> dict[str, Any]:
    """Return an instance's refusal as the content of an error event."""
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    if isinstance(said, dict) and "error" in said:
        return said
    text = body.decode(errors="replace").strip()[:1000] or f"the model's server answered {status}"
    kind = TYPES.get(status, "server_error")
    return {"error": {"code": status, "message": text, "type": kind}}
