"""A herd of stub engines behind two gateways, and what the tests of scheduling do with it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from herd import KEYS, QUICK, Herd, herd, until
from looks import whole_lines
from tiny import stub_engine
from valkey_server import start_valkey

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
DONE = b"data: [DONE]\n\n"


@dataclass
class Pair:
    """Two gateways, a supervisor and their Redis, with a client for each gateway; `two` is the second."""

    made: Herd
    one: httpx.AsyncClient
    two: httpx.AsyncClient
    journals: dict[str, int] = field(default_factory=dict)

    # What engines do

    def knobs(self, model: str, **values: Any) -> None:
        """Set what a model's stub does from its next start on."""
        self.file(model, "json").write_text(json.dumps(values))

    def file(self, model: str, suffix: str) -> Path:
        """Return a file that belongs to a model's stub, or a gate's path."""
        return self.made.models / f"{model}.gguf.{suffix}"

    def journal(self, model: str) -> list[dict[str, Any]]:
        """Return what the model's stubs wrote since `forget_journal`."""
        path = self.file(model, "journal")
        lines = whole_lines(path) if path.exists() else []
        return [json.loads(line) for line in lines][self.journals.get(model, 0) :]

    def forget_journal(self, model: str) -> None:
        """Leave out what was written so far."""
        self.journals[model] = self.journals.get(model, 0) + len(self.journal(model))

    def events(self, model: str) -> list[str]:
        """Return the names of what happened to the model's stubs."""
        return [entry["event"] for entry in self.journal(model)]

    def cut(self) -> list[Path]:
        """Return the marks of engines that were stopped while they served."""
        return list(self.made.models.glob("*.serving.*"))

    # What clients do

    def gateways(self) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
        """Return both clients."""
        return self.one, self.two

    async def ask(self, model: str, gateway: int = 0, tokens: int = 2, **more: Any) -> httpx.Response:
        """Send a chat and return its answer, whatever it is."""
        headers = more.pop("headers", {})
        body = {"model": model, **CHAT, "max_tokens": tokens, **more}
        return await self.gateways()[gateway].post("/v1/chat/completions", json=body, headers=headers)

    async def chat(self, model: str, gateway: int = 0, tokens: int = 2, **more: Any) -> httpx.Response:
        """Send a chat that must be answered."""
        answer = await self.ask(model, gateway, tokens, **more)
        assert answer.status_code == 200, answer.text
        return answer

    @contextlib.asynccontextmanager
    async def stream(self, model: str, gateway: int = 0) -> AsyncIterator["Stream"]:
        """Yield a stream that has begun; a stub with a `token_gate` goes on with it once that is there."""
        body = {"model": model, **CHAT, "max_tokens": 4, "stream": True}
        async with self.gateways()[gateway].stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            pieces = answer.aiter_raw()
            yield Stream(pieces, await anext(pieces))

    # What there is to see

    async def queue(self, gateway: int = 0) -> list[dict[str, Any]]:
        """Return the entries of GET /queue."""
        return list((await self.gateways()[gateway].get("/queue")).json()["queue"])

    async def entry(self, model: str, gateway: int = 0) -> dict[str, Any]:
        """Return a model's entry of the queue, {} while it has none or nobody knows why it waits."""
        found = (e for e in await self.queue(gateway) if e["model"] == model)
        entry = next(found, {})
        return entry if entry.get("reason") else {}

    async def waiting(self, model: str, *reasons: str) -> dict[str, Any]:
        """Wait until the model is waited for, for one of these reasons if some are given."""

        async def look() -> dict[str, Any]:
            entry = await self.entry(model)
            return entry if not reasons or entry.get("reason") in reasons else {}

        return dict(await until(look, f"{model} to wait for {reasons}"))

    async def tickets(self, model: str) -> int:
        """Return how many requests wait for a model."""
        async with self.made.redis() as redis:
            return int(await redis.hlen(KEYS.tickets(model)))

    async def tickets_are(self, model: str, count: int) -> None:
        """Wait until so many requests wait for a model."""

        async def look() -> bool:
            return await self.tickets(model) == count

        await until(look, f"{count} tickets for {model}")

    async def status(self, model: str, gateway: int = 0) -> dict[str, Any]:
        """Return the `status` of a model."""
        return dict((await self.gateways()[gateway].get(f"/v1/models/{model}")).json()["status"])

    async def state(self, model: str, *states: str, patience_s: float = 30.0) -> dict[str, Any]:
        """Wait until the model is in one of these states and both gateways show it so; return the status.

        Gateways' copies alone may both be of an earlier time, in which it was in that state, too.
        """

        async def look() -> dict[str, Any]:
            async with self.made.redis() as redis:
                if (await redis.hget(KEYS.model(model), "state") or "") not in states:
                    return {}
            shown = [await self.status(model, gateway) for gateway in (0, 1)]
            return shown[0] if all(status["state"] in states for status in shown) else {}

        return dict(await until(look, f"{model} to be {states}", patience_s))

    async def loads(self, model: str) -> int:
        """Return how often a model was loaded."""
        async with self.made.redis() as redis:
            return int(await redis.hget(KEYS.model(model), "loads") or 0)

    async def told(self, kind: str, **fields: str) -> list[dict[str, str]]:
        """Return the events of a kind that have these fields."""
        async with self.made.redis() as redis:
            events = [fields for _, fields in await redis.xrange(KEYS.events)]
        return [e for e in events if e["kind"] == kind and fields.items() <= e.items()]

    async def clear(self, *models: str) -> None:
        """Have these models unloaded."""
        for model in models:
            await self.one.post("/models/unload", json={"model": model})
        for model in models:
            await self.state(model, "stopped", "failed", "")

    async def settled(self) -> None:
        """Check that nothing is counted any more and that nobody was cut."""
        await self.made.nothing_counted()
        # A stub takes its mark away after its last byte; one that was stopped while it served leaves it.
        await until(lambda: not self.cut(), "no stub to be cut while it served")


@dataclass
class Stream:
    """The pieces of an answer that is being read."""

    pieces: AsyncIterator[bytes]
    got: bytes

    async def rest(self) -> bytes:
        """Read it to its end and return all of it."""
        async for piece in self.pieces:
            self.got += piece
        return self.got


@contextlib.asynccontextmanager
async def pair(
    preset: str, *args: str, env: Mapping[str, str] = {}, files: tuple[str, ...] = ()
) -> AsyncIterator[Pair]:
    """Yield two gateways and a supervisor of stub engines, for these presets and supervisor arguments.

    In the text of the presets `{models}` is the folder of the model files; each section has a file of its own
    name there, and `files` are more.
    """
    names = [line.strip("[]\n") for line in preset.splitlines() if line.startswith("[") and line != "[*]"]
    async with herd({**QUICK, **env}) as made:
        folder = made.run_dir.parent
        server = start_valkey(folder, "--save", "")
        try:
            made.redis_url = made.env["LLAMASTEAD_REDIS_URL"] = f"unix://{folder}/valkey.sock"
            made.add_models(*names, *files)
            (folder / "models.ini").write_text(preset.replace("{models}", str(made.models)))
            words = ("--models-preset", str(folder / "models.ini"), "--engine", str(stub_engine(folder)))
            await asyncio.gather(made.gateway("gateway-1"), made.gateway("gateway-2"))
            await made.role("supervisor", "supervisor", *words, *args)
            many = httpx.Limits(max_connections=None)
            async with made.client(0, limits=many) as one, made.client(1, limits=many) as two:
                both = Pair(made, one, two)
                await until(lambda: _knows(both, len(names)), "the models at both gateways")
                yield both
        finally:
            await made.stop()
            server.terminate()
            server.wait(10)


async def _knows(both: Pair, count: int) -> bool:
    lists = [(await client.get("/models")).json()["data"] for client in both.gateways()]
    return all(len(models) == count for models in lists)


def sections(*names: str, **options: str) -> str:
    """Return presets for these names, each with its own file and these options."""
    lines = [f"{name.replace('_', '-')} = {value}" for name, value in options.items()]
    return "".join(
        "\n".join([f"[{name}]", f"model = {{models}}/{name}.gguf", *lines]) + "\n" for name in names
    )
