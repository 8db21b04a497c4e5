"""One connection to an instance: one request at a time, its answer read with back-pressure."""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from llamastead.gateway.body import Body
from llamastead.gateway.upstream.silence import is_cut_off

READ_HIGH_BYTES = 256 * 1024
"""Answer bytes held for one request before reading from the instance pauses: what a slow client costs."""

MAX_REQUESTS = 100
"""An instance closes a connection after this many requests; we do so first."""


class AddressRefused(Exception):  # noqa: N818
    """Nobody listens at the instance's address: no byte of the request went anywhere."""


class Unreachable(Exception):  # noqa: N818
    """No connection could be made, for another reason: the instance is swamped, or we may not."""


class UpstreamDied(Exception):  # noqa: N818
    """The connection ended before the answer did, or what came is no HTTP.

    `answered` is true when any byte of an answer came, or none is wanted any more: nobody asks again.
    """

    def __init__(self, problem: str, *, answered: bool) -> None:
        super().__init__(problem)
        self.answered = answered


class Connection(asyncio.Protocol):
    """The asyncio side and the parser's side of one connection.

    Between `request` and `release` it belongs to one exchange; `reusable` then says whether it may serve
    another. `on_lost` is called once, when the socket is gone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[["Connection"], None]) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.idle_since = 0.0
        self.lost = False
        self._loop = loop
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._whole: asyncio.Future[None] | None = None
        self._served = 0
        self._busy = False
        self._problem = "the connection was closed"
        self._cut = False
        self._parts: list[bytes] = []
        self._held = 0
        self._write_paused = False
        self._read_paused = False
        self._pass_on: Callable[[bytes], bool] | None = None
        self._start_answer(bodiless=False)

    def _start_answer(self, *, bodiless: bool) -> None:
        self.headers = []
        self._most_held = READ_HIGH_BYTES
        self._bodiless = bodiless
        self._answered = False
        self._head_done = False
        self._done = False
        self._sent = False
        self._until_close = False
        self._keep_alive = False

    # --- what an exchange does

    @property
    def ended(self) -> bool:
        """True when all of the answer's body was read."""
        return self._done and not self._parts

    @property
    def arrived(self) -> bool:
        """True when a piece of the body waits to be read."""
        return bool(self._parts)

    @property
    def reusable(self) -> bool:
        """True when the last exchange ended cleanly and neither side wants to close."""
        return (
            self._done and self._sent and self._keep_alive and not self.lost and self._served < MAX_REQUESTS
        )

    async def request(self, head: bytes, body: Body, *, bodiless: bool) -> None:
        """Send a request and wait for the head of its answer, then in `status` and `headers`.

        `bodiless` says that the answer has no body whatever its headers say (HEAD). Raises UpstreamDied.
        """
        self._start_answer(bodiless=bodiless)
        self._busy = True
        self._served += 1
        if self._transport is None or self.lost:
            raise self._died()
        if body.in_memory:
            self._transport.write(head + body.data)
            self._sent = True
        else:
            self._transport.write(head)
            await self._send_pieces(body)
        while not self._head_done:
            if self.lost:
                raise self._died()
            await self._wait()

    async def read(self) -> bytes:
        """Return the next bytes of the answer's body, all that came since; empty at its end.

        Raises UpstreamDied when the instance goes before that.
        """
        while not self._parts:
            if self._done:
                return b""
            if self.lost:
                raise self._died()
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._empty()
        return data

    async def pour(self, pass_on: Callable[[bytes], bool]) -> None:
        """Give `pass_on` each piece of the body in the instant in which it comes, until it returns False.

        That piece is left to `read`, and so is the last one; also returns when the instance goes.
        """
        self._pass_on = pass_on
        try:
            while not (self._parts or self._done or self.lost):
                await self._wait()
        finally:
            self._pass_on = None

    def read_ahead(self, most: int) -> None:
        """Hold up to so many bytes of this answer for a slow reader."""
        self._most_held = most
        if self._held <= most and self._read_paused and self._transport is not None:
            self._read_paused = False
            self._transport.resume_reading()

    async def whole(self) -> None:
        """Return once nothing more of this answer comes from the instance. For one caller at a time."""
        if not (self._done or self.lost):
            self._whole = self._loop.create_future()
            await self._whole

    def _settle(self) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def release(self) -> None:
        """End the exchange; a connection that is not `reusable` then is to be aborted."""
        self._busy = False
        self._empty()

    def _empty(self) -> None:
        self._parts.clear()
        self._held = 0
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            self._transport.resume_reading()

    def cut(self, problem: str) -> None:
        """End the exchange under its reader, who is told `problem` and does not ask again."""
        self._problem = problem
        self._cut = True
        self.abort()

    def abort(self) -> None:
        """Close at once; the instance notices and stops what it was doing."""
        if self._transport is not None:
            self._transport.abort()

    async def _send_pieces(self, body: Body) -> None:
        offset = 0
        while offset < body.size:
            piece = await body.read_at(offset)
            while self._write_paused and not self.lost and not self._head_done:
                await self._wait()
            # An answer before the end of the request, a refusal, is all there will be.
            if self._transport is None or self._head_done:
                return
            self._transport.write(piece)
            offset += len(piece)
        self._sent = True

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _died(self) -> UpstreamDied:
        return UpstreamDied(self._problem, answered=self._answered or self._cut)

    def look(self) -> None:
        """Cut an exchange with another host that acknowledges nothing any more."""
        if self._transport is not None and is_cut_off(self._transport.get_extra_info("socket")):
            self.cut("the other host does not answer")

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        """Feed the parser; bytes that belong to no request end the connection."""
        if not self._busy or self._done:
            self._keep_alive = False
            self.abort()
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._problem = f"the answer is no HTTP: {error}"
            self._keep_alive = False
            self.abort()
            return
        if self._pass_on is not None and self._parts and not self._done:
            if self._pass_on(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)):
                self._parts.clear()
                self._held = 0
                return
            self._pass_on = None
        if self._held > self._most_held and not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """End an answer that lasts until the connection closes; any other one is cut."""
        self.lost = True
        if exc is not None:
            self._problem = f"the connection broke: {exc}"
        if self._head_done and self._until_close and exc is None:
            self._done = True
        self._transport = None
        self._wake()
        self._settle()
        self._on_lost(self)

    def pause_writing(self) -> None:
        """Hold back the request's next piece."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """Go on with it."""
        self._write_paused = False
        self._wake()

    # --- what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; trailers come after the head and are dropped."""
        if not self._head_done:
            self.headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        """Take the head, unless it is an interim one (1xx)."""
        if self._head_done:
            # A second answer to one request: the first stands, the connection goes.
            self._keep_alive = False
            return
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []
            return
        self.status = status
        names = {name for name, _ in self.headers}
        self._until_close = b"content-length" not in names and b"transfer-encoding" not in names
        self._head_done = True
        if self._bodiless:
            # The parser would wait for the body the head speaks of: this connection can't go on.
            self._done = True

    def on_body(self, data: bytes) -> None:
        """Hold a piece of the body for `read`."""
        if not self._done:
            self._parts.append(data)
            self._held += len(data)

    def on_message_complete(self) -> None:
        """End the answer, unless it was an interim one."""
        if self._head_done and not self._done:
            self._done = True
            self._keep_alive = self._parser.should_keep_alive()
            self._settle()


class Response:
    """The answer to one request; whoever got it must `close` it, however the request ends."""

    __slots__ = ("_connection", "_on_close", "headers", "status")

    def __init__(self, connection: Connection, on_close: Callable[[Connection], None]) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self._connection: Connection | None = connection
        self._on_close = on_close

    @property
    def ended(self) -> bool:
        """True when all of the body was read."""
        return self._connection is None or self._connection.ended

    @property
    def arrived(self) -> bool:
        """True when a piece of the body waits to be read."""
        return self._connection is not None and self._connection.arrived

    async def read(self) -> bytes:
        """Return the next bytes of the body as they come, empty at its end. Raises UpstreamDied."""
        return b"" if self._connection is None else await self._connection.read()

    async def pour(self, pass_on: Callable[[bytes], bool]) -> None:
        """Give `pass_on` pieces as they come; `read` has what it did not take, and the last one."""
        if self._connection is not None:
            await self._connection.pour(pass_on)

    def read_ahead(self, most: int) -> None:
        """Have up to so many bytes of the body brought here before they are read."""
        if self._connection is not None:
            self._connection.read_ahead(most)

    async def whole(self) -> None:
        """Return once nothing more comes from the instance, read or not."""
        if self._connection is not None:
            await self._connection.whole()

    def close(self) -> None:
        """Give the connection back if the answer was read to its end, else close it; idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._on_close(connection)
