"""Gateways as processes, and an instance that talks when it is told to."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from gateway_kit import ScriptedLeader, until
from ports import free_port
from waiting import PATIENCE_S

NONCE = "0" * 32


class TalkingInstance:
    """An instance that begins a stream and says no more until it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finish = asyncio.Event()
        self._talking: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["TalkingInstance"]:
        """Serve; at the end every connection is finished and closed."""
        server = await asyncio.start_unix_server(self._on_connection, self.path, backlog=1024)
        async with server:
            try:
                yield self
            finally:
                self.finish.set()
                await asyncio.gather(*self._talking, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._talking.add(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"b\r\ndata: one\n\n\r\n")
        await self.finish.wait()
        writer.write(b"b\r\ndata: two\n\n\r\n0\r\n\r\n")
        writer.close()
        await writer.wait_closed()


@dataclass
class GatewayProcess:
    """`llamastead gateway` on a port of its own."""

    process: asyncio.subprocess.Process
    port: int
    log: Path

    def client(self) -> httpx.AsyncClient:
        """Return a client that keeps no connection, so that each request meets the listening socket."""
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", limits=limits, timeout=PATIENCE_S)

    async def ready(self) -> str:
        """Return the id of the gateway that answers, once one is ready."""
        async with self.client() as client:

            async def look() -> str:
                try:
                    answer = await client.get("/readyz")
                except httpx.TransportError:
                    return ""
                return str(answer.json()["gateway"]) if answer.status_code == 200 else ""

            return str(await until(look, "the gateway to be ready"))


@asynccontextmanager
async def gateway_process(
    folder: Path, *flags: str, files: int | None = None, port: int = 0
) -> AsyncIterator[GatewayProcess]:
    """Run a gateway; `files`: how many it may have open; `port`: where, if not anywhere."""
    port = port or free_port()
    log = folder / "gateway.log"
    with log.open("ab") as out:
        words = [sys.executable, "-m", "llamastead", "gateway", "--port", str(port), *flags]
        if files is not None:
            words = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *words]
        process = await asyncio.create_subprocess_exec(*words, stdout=out, stderr=out)
    try:
        yield GatewayProcess(process, port, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def load(leader: ScriptedLeader, instance: TalkingInstance) -> None:
    fields = {"state": "loading", "address": f"unix:{instance.path}", "nonce": NONCE}
    await leader.store.put_instance("h-1-1", fields, "a", {})
    await leader.store.ready("h-1-1", "a", {})


async def load_and_be_told(
    client: httpx.AsyncClient, leader: ScriptedLeader, instance: TalkingInstance
) -> None:
    """Load and return once the gateway has told its event streams of it: later ones hear nothing of that."""
    async with client.stream("GET", "/models/sse") as events:
        await load(leader, instance)
        told = b""
        async for piece in events.aiter_bytes():
            told += piece
            if b'"loaded"' in told:
                return


async def two_gateways(leader: ScriptedLeader) -> set[str]:
    """Return the ids of the gateways once there are two."""

    async def look() -> set[str]:
        found = set(await leader.redis.zrange(leader.keys.gateways, 0, -1))
        return found if len(found) == 2 else set()

    return set(await until(look, "two gateways"))
