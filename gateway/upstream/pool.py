"""The connections of each instance: kept while they are fresh, never shared by two requests at once."""

import asyncio
import errno
import socket

from llamastead.gateway.body import Body
from llamastead.gateway.upstream.connection import (
    AddressRefused,
    Connection,
    Response,
    Unreachable,
    UpstreamDied,
)

IDLE_S = 4.0
"""How long an unused connection is kept: an instance closes it after 5 s."""

CONNECT_S = 5.0
"""How long a connect is tried while the instance's backlog is full."""

_BACKLOG_PAUSE_S = 0.01


class Pool:
    """The connections to one instance."""

    def __init__(self, address: str) -> None:
        """Take the instance's address, `unix:<path>`."""
        scheme, _, path = address.partition(":")
        if scheme != "unix" or not path:
            raise ValueError(f"an instance's address must be unix:<path>, not {address!r}")
        self.address = address
        self._path = path
        # Kept, since asking for it costs a system call each time (Python before 3.12).
        self._loop = asyncio.get_running_loop()
        # The youngest at the end; taken from there, so that a burst's surplus grows old and goes.
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False
        self._reaper: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> int:
        """How many connections wait for a request."""
        return len(self._idle)

    @property
    def busy(self) -> int:
        """How many connections serve one."""
        return len(self._busy)

    async def exchange(self, head: bytes, body: Body, *, bodiless: bool = False) -> Response:
        """Send a request and return its answer once the answer's head is there.

        A kept connection that turns out closed before any byte of an answer came is replaced by a fresh one,
        once. `bodiless` says that the answer has no body whatever its headers say (HEAD).
        Raises AddressRefused when nobody listens any more, Unreachable when no connection can be made for
        another reason, and UpstreamDied when the instance goes or talks nonsense.
        """
        connection = self._take()
        if connection is not None:
            try:
                return await self._exchange(connection, head, body, bodiless=bodiless)
            except UpstreamDied as died:
                if died.answered:
                    raise
        return await self._exchange(await self._connect(), head, body, bodiless=bodiless)

    def close(self) -> None:
        """Keep nothing any more; running exchanges go on to their end."""
        self._closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None

    async def _exchange(self, connection: Connection, head: bytes, body: Body, *, bodiless: bool) -> Response:
        self._busy.add(connection)
        try:
            await connection.request(head, body, bodiless=bodiless)
        except BaseException:
            self._give_back(connection)
            raise
        return Response(connection, self._give_back)

    def _give_back(self, connection: Connection) -> None:
        self._busy.discard(connection)
        connection.release()
        if self._closed or not connection.reusable:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._reaper is None:
            self._reaper = self._loop.call_later(IDLE_S, self._reap)

    def _take(self) -> Connection | None:
        oldest = self._loop.time() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = self._loop
        deadline = loop.time() + CONNECT_S
        while True:
            # A unix connect never waits: it succeeds, is refused, or finds the backlog full (which the event
            # loops' own connect takes for "in progress" or for an error).
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.setblocking(False)
                sock.connect(self._path)
                _, connection = await loop.create_unix_connection(
                    lambda: Connection(loop, self._on_lost), sock=sock
                )
            except OSError as error:
                sock.close()
                if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                    raise AddressRefused(f"{self.address}: {error.strerror}") from None
                if error.errno != errno.EAGAIN or loop.time() > deadline:
                    raise Unreachable(f"{self.address}: {error.strerror}") from None
            except BaseException:
                sock.close()
                raise
            else:
                return connection
            await asyncio.sleep(_BACKLOG_PAUSE_S)

    def _on_lost(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def _reap(self) -> None:
        self._reaper = None
        oldest = self._loop.time() - IDLE_S
        while self._idle and self._idle[0].idle_since <= oldest:
            self._idle.pop(0).abort()
        if self._idle:
            self._reaper = self._loop.call_at(self._idle[0].idle_since + IDLE_S, self._reap)


class Pools:
    """One pool per instance, so that one that hangs or floods can't starve another."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}

    def get(self, instance: str, address: str) -> Pool:
        """Return the instance's pool, made at first use. Raises ValueError for an unknown kind of address."""
        pool = self._pools.get(instance)
        if pool is None:
            pool = self._pools[instance] = Pool(address)
        return pool

    def drop(self, instance: str) -> None:
        """Forget an instance that is gone or about to go: unused connections close, running answers go on."""
        pool = self._pools.pop(instance, None)
        if pool is not None:
            pool.close()

    async def close(self) -> None:
        """Drop every pool and let the event loop close the sockets."""
        for instance in list(self._pools):
            self.drop(instance)
        await asyncio.sleep(0)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return instance → connections (busy, idle), for display."""
        return {instance: (pool.busy, pool.idle) for instance, pool in self._pools.items()}
