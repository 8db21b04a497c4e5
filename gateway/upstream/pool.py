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
from llamastead.gateway.upstream.silence import SILENCE_S, notice_silence
from llamastead.shared.addresses import TcpAddress, UnixAddress, parse_address

IDLE_S = 4.0
"""How long an unused connection is kept: an instance closes it after 5 s."""

CONNECT_S = 5.0
"""How long a connect is tried while the instance's backlog is full, unless told otherwise."""

STALE_S = 1.0
"""A kept connection that ends later than this in a request was not closed for having been idle."""

_BACKLOG_PAUSE_S = 0.01


class Pool:
    """The connections to one instance."""

    def __init__(self, address: str, connect_s: float | None = CONNECT_S, most: int | None = None) -> None:
        """Take the instance's address as text, how long a connect is tried (None: without end), and how many
        requests may be in it at once.

        Raises ValueError for an address that is none.
        """
        self.address = address
        self._most = most
        self._connecting = 0
        self._where = parse_address(address)
        self._connect_s = connect_s
        # Kept, since asking for it costs a system call each time (Python before 3.12).
        self._loop = asyncio.get_running_loop()
        # The youngest at the end; taken from there, so that a burst's surplus grows old and goes.
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False
        self._reaper: asyncio.TimerHandle | None = None
        self._looker: asyncio.TimerHandle | None = None

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

        A kept connection that turns out closed, at once and before any byte of an answer came, is replaced by
        a fresh one, once. One that ends later took the request with it: what an instance worked on when it
        went is not begun anew. `bodiless` says that the answer has no body whatever its headers say (HEAD).
        Raises AddressRefused when nobody listens any more, Unreachable when no connection can be made for
        another reason or the instance has all the requests it may have, and UpstreamDied when it goes or
        talks nonsense.
        """
        if self._most is not None and len(self._busy) + self._connecting >= self._most:
            raise Unreachable(f"it has {self._most} requests of this gateway, the most for one instance")
        connection = self._take()
        if connection is not None:
            began = self._loop.time()
            try:
                return await self._exchange(connection, head, body, bodiless=bodiless)
            except UpstreamDied as died:
                if died.answered or self._loop.time() - began > STALE_S:
                    raise
        self._connecting += 1
        try:
            connection = await self._connect()
        finally:
            self._connecting -= 1
        return await self._exchange(connection, head, body, bodiless=bodiless)

    def close(self) -> None:
        """Keep nothing any more; running exchanges go on to their end."""
        self._closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None

    def cut(self, problem: str) -> None:
        """End the running exchanges with UpstreamDied of that text."""
        for connection in list(self._busy):
            connection.cut(problem)

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
        if isinstance(self._where, TcpAddress):
            return await self._connect_tcp(self._where)
        return await self._connect_unix(self._where)

    async def _connect_tcp(self, where: TcpAddress) -> Connection:
        loop = self._loop
        try:
            async with asyncio.timeout(self._connect_s):
                transport, connection = await loop.create_connection(
                    lambda: Connection(loop, self._on_lost), where.host, where.port
                )
        except ConnectionRefusedError as error:
            raise AddressRefused(f"{self.address}: {error.strerror}") from None
        except OSError as error:
            problem = error.strerror or self._took_too_long()
            raise Unreachable(problem) from None
        notice_silence(transport.get_extra_info("socket"))
        if self._looker is None:
            self._looker = loop.call_later(SILENCE_S / 4, self._look)
        return connection

    async def _connect_unix(self, where: UnixAddress) -> Connection:
        loop = self._loop
        deadline = None if self._connect_s is None else loop.time() + self._connect_s
        while True:
            # A unix connect never waits: it succeeds, is refused, or finds the backlog full (which the event
            # loops' own connect takes for "in progress" or for an error).
            try:
                sock = socket.socket(socket.AF_UNIX)
            except OSError as error:
                raise Unreachable(error.strerror) from None
            try:
                sock.setblocking(False)
                sock.connect(where.path)
                _, connection = await loop.create_unix_connection(
                    lambda: Connection(loop, self._on_lost), sock=sock
                )
            except OSError as error:
                sock.close()
                if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                    raise AddressRefused(f"{self.address}: {error.strerror}") from None
                if error.errno != errno.EAGAIN:
                    raise Unreachable(error.strerror) from None
                if deadline is not None and loop.time() > deadline:
                    raise Unreachable(self._took_too_long()) from None
            except BaseException:
                sock.close()
                raise
            else:
                return connection
            await asyncio.sleep(_BACKLOG_PAUSE_S)

    def _took_too_long(self) -> str:
        return f"no connection within {self._connect_s:g} s (connect-timeout)"

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

    def _look(self) -> None:
        self._looker = None
        for connection in list(self._busy):
            connection.look()
        if self._busy or self._idle:
            self._looker = self._loop.call_later(SILENCE_S / 4, self._look)


class Pools:
    """One pool per instance, so that one that hangs or floods can't starve another.

    `most` is how many requests one instance may have at once, None for no limit.
    """

    def __init__(self, connect_s: float | None = CONNECT_S, most: int | None = None) -> None:
        self.most = most
        self._connect_s = connect_s
        self._pools: dict[str, Pool] = {}

    def get(self, instance: str, address: str) -> Pool:
        """Return the instance's pool, made at first use. Raises ValueError for an unknown kind of address."""
        pool = self._pools.get(instance)
        if pool is None:
            pool = self._pools[instance] = Pool(address, self._connect_s, self.most)
        return pool

    def drop(self, instance: str) -> None:
        """Forget an instance that is gone or about to go: unused connections close, running answers go on."""
        pool = self._pools.pop(instance, None)
        if pool is not None:
            pool.close()

    def cut(self, instance: str, problem: str) -> None:
        """End what runs at an instance, with UpstreamDied of that text."""
        pool = self._pools.get(instance)
        if pool is not None:
            pool.cut(problem)

    async def close(self) -> None:
        """Drop every pool and let the event loop close the sockets."""
        for instance in list(self._pools):
            self.drop(instance)
        await asyncio.sleep(0)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return instance → connections (busy, idle), for display."""
        return {instance: (pool.busy, pool.idle) for instance, pool in self._pools.items()}
