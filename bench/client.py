"""The load generator: raw HTTP/1.1 connections on asyncio, which do as little per byte as Python can."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, cast

HOST = "127.0.0.1"
PATIENCE_S = 60.0
_DATA = b"data: "


def post(path: str, document: object, *, close: bool = False) -> bytes:
    """Return a whole POST request with a JSON body."""
    body = json.dumps(document, separators=(",", ":")).encode()
    ending = b"Connection: close\r\n" if close else b""
    return (
        b"POST %s HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s"
        % (path.encode(), ending, len(body), body)
    )


def get(path: str) -> bytes:
    """Return a whole GET request, the last one on its connection."""
    return b"GET %s HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n" % path.encode()


@dataclass
class Answer:
    """One answer read to its end; times in seconds since the request began."""

    status: int
    head: bytes
    body: bytes
    first_byte_s: float
    total_s: float

    def json(self) -> object:
        """Return the body as JSON; for answers with Content-Length."""
        return json.loads(self.body)

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of a list, which llama-server keeps in `data`."""
        document = self.json()
        assert isinstance(document, dict)
        found: list[dict[str, Any]] = document["data"]
        return found


async def ask(port: int, request: bytes) -> Answer:
    """Send one request that asks for Connection: close, and return its answer."""
    began = time.perf_counter()
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(request)
            first = await reader.read(65536)
            first_byte_s = time.perf_counter() - began
            raw = first + await reader.read(-1)
        finally:
            writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionError("the connection closed without an answer")
    return Answer(int(head[9:12]), head, body, first_byte_s, time.perf_counter() - began)


@dataclass(frozen=True)
class Load:
    """What one run of short requests came to; times in seconds, `busy` is the generator's own CPU time."""

    done: int
    errors: int
    seconds: float
    p50: float
    p99: float
    busy: float


def quantile(values: list[float], share: float) -> float:
    """Return the value that `share` of the values don't exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def repeat(port: int, request: bytes, connections: int, seconds: float) -> Load:
    """Ask the same over and over on kept connections, each as soon as it was answered."""
    times, failed = list[float](), list[bytes]()
    began, busy = time.perf_counter(), time.process_time()
    askers = [_Asker(port, request, began + seconds, times, failed) for _ in range(connections)]
    async with asyncio.timeout(seconds + PATIENCE_S):
        await asyncio.gather(*(asker.run() for asker in askers))
    took, busy = time.perf_counter() - began, time.process_time() - busy
    return Load(len(times), len(failed), took, quantile(times, 0.5), quantile(times, 0.99), busy)


class _Asker(asyncio.Protocol):
    """One client of `repeat`. A server that closes between two requests is connected to again."""

    def __init__(
        self, port: int, request: bytes, until: float, times: list[float], failed: list[bytes]
    ) -> None:
        self._port, self._request, self._until = port, request, until
        self._times, self._failed = times, failed
        self._held = b""
        self._began = 0.0
        self._asked = False
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()

    async def run(self) -> None:
        """Ask until the time is up."""
        loop = asyncio.get_running_loop()
        while self._asked or time.perf_counter() < self._until:
            self._lost.clear()
            await loop.create_connection(lambda: self, HOST, self._port)
            await self._lost.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask, or ask again what the last connection left unanswered."""
        self._transport = cast("asyncio.Transport", transport)
        self._held = b""
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        if not self._asked:
            self._asked = True
            self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Take a piece of an answer; when it is whole, ask again."""
        self._held = held = self._held + data if self._held else data
        end = held.find(b"\r\n\r\n")
        if end < 0:
            return
        head = held[:end].lower()
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            whole = len(held) >= end + 4 + int(head[at + 17 :].split(b"\r\n", 1)[0])
        else:
            whole = held.endswith(b"\r\n0\r\n\r\n")
        if not whole:
            return
        now = time.perf_counter()
        self._held = b""
        self._times.append(now - self._began)
        if not head.startswith(b"http/1.1 200"):
            self._failed.append(head)
        assert self._transport is not None
        self._asked = False
        if now >= self._until or b"\r\nconnection: close" in head:
            self._transport.close()
        else:
            self._ask()

    def connection_lost(self, _: Exception | None) -> None:
        """Let `run` connect again, or end."""
        self._lost.set()


@dataclass
class Streams:
    """What one run of streamed answers came to; times in seconds."""

    seconds: float = 0.0
    events: int = 0
    cut: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


async def stream(port: int, request: bytes, at_once: int, seconds: float) -> Streams:
    """Keep `at_once` streams of events open, each begun anew on its own connection when it ended."""
    found = Streams()
    began = time.perf_counter()

    async def one() -> None:
        while time.perf_counter() < began + seconds:
            await _read_stream(port, request, found)

    async with asyncio.timeout(seconds + PATIENCE_S):
        await asyncio.gather(*(one() for _ in range(at_once)))
    found.seconds = time.perf_counter() - began
    return found


async def _read_stream(port: int, request: bytes, found: Streams) -> None:
    last = began = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    tail, seen = b"", 0
    try:
        writer.write(request)
        while data := await reader.read(65536):
            # An event's beginning may be cut between two pieces; what was counted is not counted twice.
            joined = tail + data
            events = joined.count(_DATA)
            tail = joined[-len(_DATA) + 1 :]
            if events:
                now = time.perf_counter()
                (found.gaps if seen else found.first).append(now - (last if seen else began))
                last = now
                seen += events
            if joined.endswith(b"0\r\n\r\n"):
                break
        else:
            found.cut += 1
    finally:
        writer.close()
    found.events += seen
