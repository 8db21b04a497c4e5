"""The real router and Llamastead side by side on the same models, and what is compared of their answers."""

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from herd import PATIENCE_S, QUICK, clean_environment, herd, until

from llamastead.supervisor.engine import Engine, find_engine

ENGINE_VARIABLE = "COMPATIBILITY_ENGINE"
"""Names another llama-server to compare with than the installed one."""

# Compared by value, all other members by type alone.
TOLD = frozenset(
    {
        *("object", "role", "type", "code", "message", "value", "owned_by", "success", "status", "model"),
        *("finish_reason", "stop_reason", "source", "error", "param"),
    }
)
# What clients act on; the others (Server, Date, Keep-Alive, lengths, ids) say nothing of an answer.
HEADERS = (
    *("content-type", "content-encoding", "cache-control", "etag", "vary", "location", "retry-after"),
    *("www-authenticate", "allow", "cross-origin-opener-policy", "cross-origin-embedder-policy"),
    *("access-control-allow-origin", "access-control-allow-credentials"),
    *("access-control-allow-headers", "access-control-allow-methods"),
)
ABSENT = "-"
NO_HUB = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Ask:
    """One request for both. `state` says how `about` stands when it is sent: cold, loaded or sleeping."""

    method: str
    target: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    about: str = ""
    state: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """What the table of differences calls it."""
        state = f" [{self.about} {self.state}]" if self.state else ""
        return f"{self.method} {self.target}{state}{f' ({self.note})' if self.note else ''}"

    @property
    def content(self) -> Any:
        """The body as it is sent: text and bytes as they are, in pieces if chunked; anything else as JSON."""
        if self.body is None or isinstance(self.body, str | bytes):
            return _pieces(self.body) if "transfer-encoding" in self.headers else self.body
        return json.dumps(self.body)


async def _pieces(body: str) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 20):
        yield body[start : start + 20].encode()


def engine_under_test() -> Engine:
    """Return the engine that both use."""
    named = os.environ.get(ENGINE_VARIABLE)
    return find_engine(Path(named) if named else None)


class RealRouter:
    """`llama-server` in router mode."""

    def __init__(self, engine: Path, folder: Path, env: Mapping[str, str] = {}) -> None:
        """`env` is for what it does not have by itself: a hub and a cache."""
        self.env = dict(env)
        self.engine, self.folder = engine, folder
        self.address = ""
        self._log = folder / "router.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *args: str) -> None:
        """Start it and wait until it listens; the hub it knows is one that nobody answers at."""
        nowhere = str(self.folder / "empty")
        alone = {"LLAMA_CACHE": nowhere, "HF_HOME": nowhere, "HF_ENDPOINT": NO_HUB}
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(self.engine, *args, "--host", "127.0.0.1", "--port", "0"),
                env=clean_environment(alone | self.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        def listening() -> str:
            assert self._process is not None
            assert self._process.returncode is None, self._log.read_text()
            # With what follows it: a line may be half there.
            found = re.search(r"listening on (http://127\.0\.0\.1:\d+)\s", self._log.read_text())
            return found[1] if found else ""

        self.address = await until(listening, "the real router")

    async def stop(self) -> None:
        """End it and its children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), PATIENCE_S)
            except TimeoutError:
                self._process.kill()


class Side:
    """One of the two servers as a client sees it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        # No connection is kept: the real router closes some of them while a request is on its way.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.AsyncClient(base_url=address, timeout=PATIENCE_S, limits=limits)

    async def prepare(self, model: str, state: str, key: str) -> None:
        """Bring a model into a state: cold, loaded or sleeping."""
        word = {"cold": "unloaded"}.get(state, state)
        headers = {"authorization": f"Bearer {key}"} if key else {}

        async def there() -> bool:
            listing = (await self.http.get("/models", headers=headers)).json()["data"]
            return any(m["id"] == model and m["status"]["value"] == word for m in listing)

        if not await there():
            # A refusal says that it is there or on its way.
            order = "unload" if state == "cold" else "load"
            await self.http.post(f"/models/{order}", json={"model": model}, headers=headers)
            await until(there, f"{model} {word} on {self.name}")

    async def ask(self, request: Ask) -> dict[str, str]:
        """Send a request and return the facts of its answer."""
        plain = {"accept-encoding": "identity", "user-agent": "side-by-side", "accept": "*/*"}
        headers = plain | dict(request.headers)
        answer = await self.http.request(
            request.method, request.target, content=request.content, headers=headers
        )
        return facts(answer)


def facts(answer: httpx.Response) -> dict[str, str]:
    """Return what is compared: status, headers, and the shape of the body, one fact per member."""
    found = {"status": str(answer.status_code)}
    for name in HEADERS:
        values = [value for value in answer.headers.get_list(name) if value]  # empty: says nothing
        if values:
            found[f"header {name}"] = " | ".join(values)
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        members: dict[str, set[str]] = {}
        for event in events:
            if event != "[DONE]":
                _shape(json.loads(event), "event", members)
        found |= _worded(members) | {"last event": "[DONE]" if events and events[-1] == "[DONE]" else "data"}
    elif answer.content:
        members = {}
        try:
            _shape(answer.json(), "body", members)
        except ValueError:
            members["body"] = {"text" if kind.startswith("text/plain; version") else answer.text[:300]}
        found |= _worded(members)
    return found


def _worded(members: Mapping[str, set[str]]) -> dict[str, str]:
    return {path: " | ".join(sorted(seen)) for path, seen in members.items()}


def _shape(value: Any, path: str, into: dict[str, set[str]]) -> None:
    """Note the type of each member of a JSON value, and the value of those that clients act on."""
    if isinstance(value, dict):
        into.setdefault(path, set()).add("object")
        for name, member in value.items():
            _shape(member, f"{path}.{name}", into)
    elif isinstance(value, list):
        into.setdefault(path, set()).add("list")
        for member in value:
            _shape(member, f"{path}[]", into)
    elif path.endswith(".code") or (path.rpartition(".")[2] in TOLD and isinstance(value, str | bool | None)):
        into.setdefault(path, set()).add(json.dumps(value))
    else:
        kind = "number" if isinstance(value, int | float) and not isinstance(value, bool) else None
        into.setdefault(path, set()).add(kind or {str: "text", bool: "bool"}.get(type(value), "null"))


@dataclass(frozen=True)
class Deviation:
    """One fact that differs."""

    request: str
    fact: str
    theirs: str
    ours: str

    def __str__(self) -> str:
        return f"{self.request}: {self.fact}: router {self.theirs!r}, Llamastead {self.ours!r}"


class Listener:
    """What one side tells in /models/sse."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self.events: list[dict[str, Any]] = []
        self.seen = 0

    async def run(self, open_: asyncio.Event) -> None:
        """Listen until cancelled; `open_` is set once nothing is missed any more."""
        async with self._side.http.stream("GET", "/models/sse") as answer:
            open_.set()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))

    async def until_told(self, model: str, status: str) -> list[dict[str, Any]]:
        """Return what was told since the last call, up to this status of this model."""

        def end() -> int:
            """Return how many there are up to that one, 0 while it has not come."""
            for count, event in enumerate(self.events[self.seen :], self.seen + 1):
                told = (event["model"], event.get("data", {}).get("status"))
                if told == (model, status) and "progress" not in event["data"]:
                    return count
            return 0

        begin = self.seen
        self.seen = await until(end, f"{model} {status} told by {self._side.name}")
        return self.events[begin : self.seen]


def sequence(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the events in words, but for progress: how much of it is told depends on the moment."""
    words = [
        f"{event['event']} {event['data']['status']}"
        for event in events
        if "progress" not in event.get("data", {})
    ]
    return ", ".join(words)


class SideBySide:
    """Both servers, ready to be asked the same."""

    def __init__(self, theirs: Side, ours: Side) -> None:
        self.theirs, self.ours = theirs, ours

    async def reset(self, model: str) -> None:
        """Unload a model on both sides."""
        await asyncio.gather(*(side.prepare(model, "cold", "") for side in (self.theirs, self.ours)))

    async def compare_events(self, steps: Sequence[tuple[Ask, str, str]]) -> list[Deviation]:
        """Send both each step's request and wait for the status it leads to; compare what they tell of it.

        A step is a request, the model it is about and the status that ends it.
        """
        found: list[Deviation] = []
        shapes: list[dict[str, set[str]]] = [{}, {}]
        sides = (self.theirs, self.ours)
        listeners = [Listener(side) for side in sides]
        async with asyncio.TaskGroup() as tasks:
            opened = [asyncio.Event() for _ in sides]
            listening = [tasks.create_task(one.run(o)) for one, o in zip(listeners, opened, strict=True)]
            for one in opened:
                await one.wait()
            for request, model, status in steps:
                await asyncio.gather(*(side.ask(request) for side in sides))
                told = [await listener.until_told(model, status) for listener in listeners]
                for events, shape in zip(told, shapes, strict=True):
                    for event in events:
                        _shape(event, "event", shape)
                theirs, ours = map(sequence, told)
                if theirs != ours:
                    found.append(Deviation(f"events of {request.name}", "sequence", theirs, ours))
            for task in listening:
                task.cancel()
        return found + differences("events", _worded(shapes[0]), _worded(shapes[1]))

    async def compare(self, request: Ask, key: str = "") -> list[Deviation]:
        """Bring both into the request's state (with `key`), send it to both and return what differs."""
        if request.state:
            sides = (self.theirs, self.ours)
            await asyncio.gather(*(side.prepare(request.about, request.state, key) for side in sides))
        theirs, ours = await asyncio.gather(self.theirs.ask(request), self.ours.ask(request))
        return differences(request.name, theirs, ours)


def differences(name: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[Deviation]:
    """Return what differs between the facts of two answers."""
    found: list[Deviation] = []
    for fact in sorted(theirs.keys() | ours.keys()):
        one, other = theirs.get(fact, ABSENT), ours.get(fact, ABSENT)
        # What a member holds that the other has not at all is said with the member.
        inside = any(
            ABSENT in (d.theirs, d.ours) and fact.startswith((f"{d.fact}.", f"{d.fact}[")) for d in found
        )
        if one != other and not inside:
            found.append(Deviation(name, fact, one, other))
    return found


@contextlib.asynccontextmanager
async def side_by_side(preset: str, models: Sequence[str], *args: str) -> AsyncIterator[SideBySide]:
    """Yield both servers over the same preset and folder, started with the same words of command line."""
    engine = engine_under_test().path
    async with herd(QUICK | {"LLAMASTEAD_UI": "true", "HF_ENDPOINT": NO_HUB}) as stead:
        stead.add_models(*models)
        folder = stead.models.parent
        (folder / "models.ini").write_text(preset)
        words = ("--models-dir", str(stead.models), "--models-preset", str(folder / "models.ini"), *args)
        words = (*words, "--models-max", "8")  # which of them has to go for another is scheduling, not wire
        router = RealRouter(engine, folder)
        sides: list[Side] = []
        try:
            await asyncio.gather(router.start(*words), stead.up("--engine", str(engine), *words))
            await until(lambda: list((stead.run_dir / "web-ui").glob("*/index.json")), "the web UI's pages")
            address = f"http://127.0.0.1:{stead.ports[0]}"
            sides += [Side("the real router", router.address), Side("Llamastead", address)]
            yield SideBySide(sides[0], sides[1])
        finally:
            for side in sides:
                await side.http.aclose()
            await router.stop()
