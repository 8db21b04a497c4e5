"""A TCP proxy between the herd and its Redis that can be slow, stand still, cut, refuse, lead elsewhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

Upstream = Path | tuple[str, int]
CHUNK = 65536


class TcpProxy:
    """Forwards connections on a port of loopback to `upstream`: a unix socket or (host, port).

    `delay_s` holds up each piece on its way there; `stall` lets nothing through and loses nothing; `cut` ends
    what is open; `refuse` cuts and turns newcomers away until `heal`. `pieces` counts what went through.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.delay_s = 0.0
        self.pieces = 0
        self.port = 0
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The address to give to the herd."""
        return f"redis://127.0.0.1:{self.port}"

    def stall(self) -> None:
        """Let nothing through from now on; connections stay and bytes wait."""
        self._flows.clear()

    def cut(self) -> None:
        """End all connections; who connects anew is let in."""
        for task in self._open:
            task.cancel()

    def refuse(self) -> None:
        """End all connections and turn newcomers away."""
        self._refuses = True
        self.cut()

    def heal(self) -> None:
        """Be a wire again."""
        self._refuses, self.delay_s = False, 0.0
        self._flows.set()

    def lead_to(self, upstream: Upstream) -> None:
        """Send who connects from now on elsewhere; connections that are open stay where they are."""
        self.upstream = upstream

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End."""
        assert self._server is not None
        self._server.close()
        self.refuse()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        writers = [writer]
        try:
            if not self._refuses:
                there, back = await self._connect()
                writers.append(back)
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(reader, back, delayed=True))
                    pumps.create_task(self._pump(there, writer, delayed=False))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            for each in writers:
                each.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self.upstream, Path):
            return await asyncio.open_unix_connection(str(self.upstream))
        return await asyncio.open_connection(*self.upstream)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, delayed: bool) -> None:
        while piece := await source.read(CHUNK):
            if delayed and self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._flows.wait()
            sink.write(piece)
            self.pieces += 1
            await sink.drain()
        raise ConnectionResetError


@contextlib.asynccontextmanager
async def tcp_proxy(upstream: Upstream) -> AsyncIterator[TcpProxy]:
    """Yield a proxy that listens; it ends with the context."""
    proxy = TcpProxy(upstream)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
