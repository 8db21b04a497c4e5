"""A scripted instance on a unix socket, stand-ins for catalog and admission, a hand-driven ASGI call."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S

from llamastead.gateway.auth import Keys
from llamastead.gateway.proxy import Proxy
from llamastead.gateway.routes import Router
from llamastead.gateway.seams import NoLoad, may_load
from llamastead.gateway.upstream import Pools
from llamastead.shared.errors import ApiError
from llamastead.shared.settings import Settings
from llamastead.shared.words import UseKind

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\nok"
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    """Frame a piece of a chunked answer."""
    return b"%x\r\n%s\r\n" % (len(data), data)


FRAMINGS: Mapping[str, tuple[bytes, bytes, list[bytes]]] = {
    "chunked": (SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b""), b"data: 1\n\n", [b"transfer-encoding"]),
    "length": (OK, b"ok", [b"content-length"]),
    "head": (OK, b"", [b"content-length"]),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", []),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", []),
}
"""An instance's answer in each framing: its bytes, its body, and the framing headers a client may get."""


@dataclass
class Received:
    """One request as an instance saw it."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: bytes) -> list[bytes]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name]


async def read_request(reader: asyncio.StreamReader) -> Received:
    """Read one request framed by Content-Length. Raises IncompleteReadError at the connection's end."""
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    headers = [(name.lower(), value) for name, _, value in (line.partition(b": ") for line in head[1:])]
    length = int(dict(headers).get(b"content-length", b"0"))
    return Received(head[0], headers, await reader.readexactly(length))


Script = Callable[["Visit"], Awaitable[None]]


@dataclass
class Visit:
    """One connection to the scripted instance, as its script sees it."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    instance: "Instance"

    async def request(self) -> Received:
        """Read the next request and note it."""
        received = await read_request(self.reader)
        self.instance.received.append(received)
        self.instance.arrived.set()
        return received

    async def send(self, data: bytes) -> None:
        """Write and let it go out."""
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Wait until the other side closes; what it still says is ignored."""
        while await self.reader.read(65536):
            pass


class Instance:
    """A server on a unix socket whose every connection runs `script`, and what it saw."""

    def __init__(self, path: Path, script: Script) -> None:
        self.address = f"unix:{path}"
        self.path = path
        self.script = script
        self.received: list[Received] = []
        self.arrived = asyncio.Event()
        self.visits = 0
        self.open = 0
        self.closed = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run the script on a new connection; its end, by whichever side, is counted."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.visits += 1
        self.open += 1
        try:
            await self.script(Visit(self.visits, reader, writer, self))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the gateway closed, or the test is over
        finally:
            writer.close()
            self.open -= 1
            self._tasks.discard(task)
            async with self.closed:
                self.closed.notify_all()

    async def all_closed(self) -> None:
        """Wait until no connection is open."""
        async with asyncio.timeout(PATIENCE_S), self.closed:
            await self.closed.wait_for(lambda: self.open == 0)

    def stop(self) -> None:
        """End every connection."""
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def instance(path: Path, script: Script, backlog: int = 100) -> AsyncIterator[Instance]:
    """Run a scripted instance listening at `path`."""
    made = Instance(path, script)
    server = await asyncio.start_unix_server(made.accept, path, backlog=backlog)
    try:
        yield made
    finally:
        server.close()
        made.stop()
        await made.all_closed()


@asynccontextmanager
async def instance_on_port(script: Script) -> AsyncIterator[Instance]:
    """Run a scripted instance on a port of loopback."""
    made = Instance(Path(), script)
    server = await asyncio.start_server(made.accept, "127.0.0.1", 0)
    made.address = f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        made.stop()
        await made.all_closed()


def breaking(*pieces: bytes) -> Script:
    """A script that sends these pieces and then closes."""

    async def script(visit: Visit) -> None:
        await visit.request()
        for piece in pieces:
            await visit.send(piece)

    return script


def answering(answer: bytes = OK) -> Script:
    """A script that gives every request the same answer and keeps the connection."""

    async def script(visit: Visit) -> None:
        while True:
            await visit.request()
            await visit.send(answer)

    return script


@dataclass
class FakeModel:
    """A catalog entry."""

    name: str
    running: bool = True
    asleep: bool = False
    leaving: bool = False
    timeouts: dict[str, float] = field(default_factory=dict)
    state: str = "ready"
    progress: dict[str, Any] = field(default_factory=dict)


@dataclass
class FakeCatalog:
    """Names known now, and names Redis knows on a second look."""

    models: dict[str, FakeModel]
    later: dict[str, FakeModel] = field(default_factory=dict)
    looked: list[str] = field(default_factory=list)

    def resolve(self, name: str) -> FakeModel | None:
        """Look it up."""
        return self.models.get(name)

    async def look_again(self, name: str) -> FakeModel | None:
        """Note the question."""
        self.looked.append(name)
        return self.later.get(name)


@dataclass
class FakeClaim:
    """A claim that knows whether it was closed."""

    instance: str
    address: str
    key: str = "instance-key"
    path: str = "hot"
    wait_ms: int = 0
    load_ms: int = 0
    closed: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    statuses: list[int] = field(default_factory=list)

    def answered(self, status: int) -> None:
        """Note it."""
        self.statuses.append(status)

    def close(self) -> None:
        """Note it."""
        self.closed = True
        self.gone.set()


class FakeAdmission:
    """Grants claims on addresses in the given order; `held` makes acquire wait until it is set."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.claims: list[FakeClaim] = []
        self.asked: list[tuple[str, UseKind, str]] = []
        self.no_loads: list[NoLoad | None] = []
        self.refusal: ApiError | None = None
        self.same_instance = False
        self.held: asyncio.Event | None = None
        self.waiting = asyncio.Event()
        self.given_back = asyncio.Event()

    async def acquire(
        self, model: str, kind: UseKind, request_id: str, no_load: Callable[[], NoLoad | None] = may_load
    ) -> FakeClaim:
        """Grant the next address."""
        self.no_loads.append(no_load())
        self.asked.append((model, kind, request_id))
        if self.held is not None:
            self.waiting.set()
            try:
                await self.held.wait()
            except asyncio.CancelledError:
                self.given_back.set()
                raise
        if self.refusal is not None:
            raise self.refusal
        return self._grant()

    async def refused(self, claim: FakeClaim, no_load: Callable[[], NoLoad | None] = may_load) -> FakeClaim:
        """Close the claim and grant the next address, if there is one."""
        claim.close()
        if not self.addresses:
            raise ApiError(503, "no instance left")
        return self._grant()

    def _grant(self) -> FakeClaim:
        address = self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]
        number = 0 if self.same_instance else len(self.claims)
        self.claims.append(FakeClaim(f"host-1-{number}", address))
        return self.claims[-1]

    @property
    def open_claims(self) -> int:
        """How many claims were not closed."""
        return sum(not claim.closed for claim in self.claims)


@dataclass
class Setting:
    """A proxy with all it stands on."""

    proxy: Proxy
    pools: Pools
    catalog: FakeCatalog
    admission: FakeAdmission


def proxy_for(
    *addresses: str, autoload: bool = True, settings: Mapping[str, Any] = {}, **more: Any
) -> Setting:
    """Build a proxy with claims on `addresses`; it knows `m` (alias `n`) and `cold`, which isn't loaded."""
    entry = FakeModel("m")
    catalog = FakeCatalog({"m": entry, "n": entry, "cold": FakeModel("cold", running=False)})
    admission = FakeAdmission(*addresses)
    pools = Pools()
    proxy = Proxy(catalog, admission, pools, Settings(models_autoload=autoload, **settings), **more)
    return Setting(proxy, pools, catalog, admission)


class Call:
    """One ASGI call driven by hand: what the client sends, when it leaves, what it gets.

    `spec` "2.4" makes `send` raise OSError after the client left, as other servers may, "2.3" makes it do
    nothing, and it has our server's `pass_on`. `take`, if made, holds every body message back until it is
    set.
    """

    def __init__(
        self,
        proxy: Proxy,
        method: str = "POST",
        target: str = "/v1/chat/completions",
        body: bytes | list[bytes] = b'{"model":"m"}',
        headers: list[tuple[bytes, bytes]] | None = None,
        spec: str = "2.3",
    ) -> None:
        pieces = body if isinstance(body, list) else [body]
        path, _, query = target.partition("?")
        found = Router().find(method, path)
        assert found is not None, target
        given = (
            headers
            if headers is not None
            else [(b"host", b"gateway"), (b"content-type", b"application/json")]
        )
        if any(pieces) and not any(name in (b"content-length", b"transfer-encoding") for name, _ in given):
            given = [*given, (b"content-length", b"%d" % sum(map(len, pieces)))]
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": given,
            "state": {"request_id": "req-1", "route": found[0], "probes": Keys(probe=("probe",)).probes},
        }
        self.messages = [
            {"type": "http.request", "body": piece, "more_body": k + 1 < len(pieces)}
            for k, piece in enumerate(pieces)
        ]
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.something_sent = asyncio.Event()
        self.take: asyncio.Event | None = None
        self._raises = spec == "2.4"
        self._proxy = proxy
        self.task: asyncio.Task[None] | None = None

    async def receive(self) -> dict[str, Any]:
        """The request's pieces, then the disconnect when it comes."""
        if self.messages:
            return self.messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Take a message, or notice that nobody is there."""
        if self.left.is_set():
            if self._raises:
                raise OSError("client left")
            return
        if self.take is not None and message["type"] == "http.response.body":
            await self.take.wait()
        self.sent.append(dict(message))
        self.something_sent.set()

    __call__ = send

    def pass_on(self, data: bytes) -> bool:
        """Take a piece of the body at once, unless it is held back or nobody is there."""
        if self.left.is_set() or (self.take is not None and not self.take.is_set()):
            return False
        self.sent.append({"type": "http.response.body", "body": data, "more_body": True})
        self.something_sent.set()
        return True

    def start(self) -> "Call":
        """Begin the call."""
        send = self.send if self._raises else self
        self.task = asyncio.create_task(self._proxy(self.scope, self.receive, send))
        return self

    async def done(self) -> "Call":
        """Wait for the call's end, and raise what it raised."""
        if self.task is None:
            self.start()
        assert self.task is not None
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        return self

    @property
    def status(self) -> int:
        """The answer's status."""
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The answer's headers."""
        return list(self.sent[0]["headers"])

    def header(self, name: bytes) -> list[bytes]:
        """All values of a header of the answer."""
        return [value for key, value in self.headers if key == name]

    @property
    def body(self) -> bytes:
        """The answer's body so far."""
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def complete(self) -> bool:
        """True when the answer was ended as if whole."""
        return len(self.sent) > 1 and not self.sent[-1]["more_body"]
