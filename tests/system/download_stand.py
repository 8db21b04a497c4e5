"""A herd whose Hugging Face hub is the stand-in, for the tests of downloads."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from herd import KEYS, PATIENCE_S, QUICK, Herd, herd, until
from hub import Hub, hub
from tiny import tiny_model_bytes

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "grammar": "root ::= [a-z ]*"}


@dataclass
class Stand:
    """A herd of two gateways, its hub and its cache; `told` are the events of /models/sse at the first."""

    made: Herd
    hub: Hub
    cache: Path
    one: httpx.AsyncClient
    two: httpx.AsyncClient
    told: list[dict[str, Any]] = field(default_factory=list)
    listens: asyncio.Event = field(default_factory=asyncio.Event)

    async def pull(self, name: str, gateway: int = 0) -> httpx.Response:
        """Order a download."""
        return await (self.one, self.two)[gateway].post("/models", json={"model": name})

    async def entry(self, name: str, gateway: int = 0) -> dict[str, Any]:
        """Return a model's entry of GET /models, {} if it has none."""
        models = (await (self.one, self.two)[gateway].get("/models")).json()["data"]
        return dict(next((m for m in models if m["id"] == name), {}))

    async def value(self, name: str) -> str:
        """Return a model's `status.value`, "" if it is not listed."""
        entry = await self.entry(name)
        return str(entry["status"]["value"]) if entry else ""

    async def coming(self, name: str, gateway: int = 0) -> dict[str, Any]:
        """Wait until a gateway knows how much of a model is to come, and return its status."""

        async def look() -> dict[str, Any]:
            status = (await self.entry(name, gateway)).get("status", {})
            return dict(status) if status.get("download", {}).get("total") else {}

        return dict(await until(look, f"the size of {name}"))

    async def have(self, name: str) -> None:
        """Have a model in the cache, by this test or an earlier one."""
        if not await self.entry(name):
            assert (await self.pull(name)).status_code == 200
        await self.listed(name)

    async def listed(self, name: str, value: str = "unloaded") -> None:
        """Wait until a model is listed with this status."""

        async def look() -> bool:
            return await self.value(name) == value

        await until(look, f"{name} to be {value}")

    async def gone(self, name: str) -> None:
        """Wait until a model is not listed."""

        async def look() -> bool:
            return not await self.entry(name)

        await until(look, f"{name} to be gone")

    async def at_rest(self) -> None:
        """Wait until the worker has nothing to do, and will find nothing by itself: what the hub refuses is
        the answer to an order only within three seconds, and one measurement may take as long.
        """

        async def look() -> bool:
            models = (await self.one.get("/models", params={"hidden": "1"})).json()["data"]
            async with self.made.redis() as redis:
                at_work = await redis.zcard(KEYS.jobs)
            return not at_work and not any(_to_measure(entry.get("memory")) for entry in models)

        await until(look, "all jobs to be done", 60.0)

    def events(self, name: str) -> list[str]:
        """Return the names of what was told of a model, each run of the same once."""
        names = [str(e["event"]) for e in self.told if e["model"] == name]
        return [n for i, n in enumerate(names) if i == 0 or names[i - 1] != n]

    async def event(self, name: str, kind: str) -> dict[str, Any]:
        """Wait for an event of a model and return the last one of that kind."""
        await until(lambda: kind in self.events(name), f"{kind} of {name}, not {self.events(name)}")
        return next(e for e in reversed(self.told) if e["model"] == name and e["event"] == kind)

    async def watch(self) -> None:
        """Collect the events of the first gateway until cancelled; `listens` once none is missed any more."""
        async with self.one.stream("GET", "/models/sse", timeout=None) as answer:
            self.listens.set()
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    self.told.append(json.loads(line.removeprefix("data:")))

    async def workers(self) -> list[int]:
        """Return the pids of the living workers."""
        async with self.made.redis() as redis:
            names = await redis.zrange(KEYS.workers, 0, -1)
            return [int(pid) for name in names if (pid := await redis.hget(KEYS.worker(name), "pid"))]


def _to_measure(memory: dict[str, Any] | None) -> bool:
    """Whether a model is yet to be measured, by what is shown of its memory; no file without a header is."""
    if memory is None:
        return False
    return "contexts" in memory and memory["source"] != "measured" and "failed" not in memory


def content(seed: int, size: int = 0) -> bytes:
    """Return a model that loads, or so many bytes that are none."""
    if size:
        return bytes((seed + i) % 251 for i in range(4096)) * (size // 4096)
    return tiny_model_bytes(seed)


@contextlib.asynccontextmanager
async def stand(env: dict[str, str] | None = None, *words: str, presets: bytes = b"") -> AsyncIterator[Stand]:
    """Yield a herd whose hub is the stand-in; `presets` are what its repository org/presets holds."""
    with hub() as made_hub:
        if presets:
            made_hub.add("org/presets", {"preset.ini": presets})
        made_hub.add("org/one", {"one-Q4_K_M.gguf": content(1), "one-Q8_0.gguf": content(2)})
        made_hub.add("org/big", {"big-Q4_K_M.gguf": content(3, 3 << 20), "big-Q8_0.gguf": content(4, 3 << 20),
                                 "mmproj-big-F16.gguf": content(5, 1 << 20)})  # fmt: skip
        async with herd({**QUICK, "HF_ENDPOINT": made_hub.url, **(env or {})}) as made:
            cache = Path(made.env.setdefault("HF_HUB_CACHE", str(made.run_dir.parent / "cache")))
            made.add_models("other")
            # Threads that wait for each other in spins are fifty times slower on a busy machine.
            await made.up("--models-dir", str(made.models), "--threads", "1", *words)
            await made.gateway("second")
            async with made.client(0) as one, made.client(1) as two:
                yielded = Stand(made, made_hub, cache, one, two)
                watch = asyncio.create_task(yielded.watch())
                try:
                    await asyncio.wait_for(yielded.listens.wait(), PATIENCE_S)
                    yield yielded
                finally:
                    watch.cancel()
                    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                        await watch
