"""A proxy under a real uvicorn, and raw clients that speak to it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from byte_path_kit import Received, Setting
from waiting import PATIENCE_S

from llamastead.gateway.answers import send_error
from llamastead.gateway.auth import Keys
from llamastead.gateway.edge import EdgeProtocol
from llamastead.gateway.routes import Router
from llamastead.shared.errors import ApiError


class Server(uvicorn.Server):
    """uvicorn without signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


@dataclass
class Client:
    """One raw client connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Write."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Received:
        """Read one answer by its framing. Raises IncompleteReadError when it is cut."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            headers = [
                (name.lower(), value) for name, _, value in (line.partition(b": ") for line in head[1:])
            ]
            fields = dict(headers)
            body = b""
            if fields.get(b"transfer-encoding") == b"chunked":
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    body += await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
                await self.reader.readexactly(2)
            else:
                body = await self.reader.readexactly(int(fields.get(b"content-length", b"0")))
            return Received(head[0], headers, body)

    async def rest(self) -> bytes:
        """Read until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read(-1)

    def reset(self) -> None:
        """Close with a reset."""
        self.writer.transport.abort()


@dataclass
class Gateway:
    """A served proxy."""

    setting: Setting
    port: int
    clients: list[Client]
    server: uvicorn.Server

    def connection(self) -> EdgeProtocol:
        """Return the server's side of the only connection."""
        (found,) = self.server.server_state.connections
        assert isinstance(found, EdgeProtocol)
        return found

    async def client(self) -> Client:
        """Connect."""
        self.clients.append(Client(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.clients[-1]


@asynccontextmanager
async def gateway(setting: Setting) -> AsyncIterator[Gateway]:
    """Serve a proxy, with the edge that answers its refusals, on a loopback port."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found = Router().find(scope["method"], scope["path"])
        assert found is not None
        scope["state"] = {"request_id": "req-1", "route": found[0], "probes": Keys().probes}
        try:
            await setting.proxy(scope, receive, send)
        except ApiError as refusal:
            await send_error(send, refusal, "req-1")

    config = uvicorn.Config(
        app, http=EdgeProtocol, ws="none", lifespan="off", log_config=None, server_header=False
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        made = Gateway(setting, listener.getsockname()[1], [], server)
        try:
            yield made
        finally:
            for client in made.clients:
                client.writer.close()
            server.should_exit = True
            await serving
            await setting.pools.close()
