"""Single keys that Redis loses, as a policy that evicts has it: they are missed and written again."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from herd import KEYS, Herd, until
from inside import DONE, QUICK, apart, ask, ready, started, stubbed, waits

pytestmark = pytest.mark.asyncio(loop_scope="module")

# As docs/redis.md names them, with the instance, gateway and host at hand.
LASTING = (
    "herd",
    "leadership",
    "models",
    "aliases",
    "model:a",
    "model:b",
    "instances",
    "instance:ID",
    "gateways",
)
PASSING = (
    "leader",
    "leases:ID",
    "queue",
    "tickets:b",
    "gateway:G",
    "inbox:G",
    "commands",
    "events",
    "devices:H",
)
OF_REGISTRY = {"source", "args", "preset", "path", "revision", "timeouts", "aliases"}


@dataclass
class Stage:
    """A leader and a gateway. Streams of `a`, which is also `other`, and loads of `b` wait at `gate`."""

    made: Herd
    client: httpx.AsyncClient
    gate: Path

    async def key(self, name: str) -> str:
        """Return a key by its name above."""
        instance = await self.made.instance("a")
        async with self.made.redis() as redis:
            (gateway,) = await redis.zrange(KEYS.gateways, 0, -1)
        named = {"ID": instance["id"], "G": gateway, "H": instance["host"]}
        kind, _, what = name.partition(":")
        return f"llamastead:{kind}:{named.get(what, what)}" if what else f"llamastead:{kind}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def staged() -> AsyncIterator[Stage]:
    """A herd that lives through all the tests below."""
    async with apart(QUICK | {"LLAMASTEAD_LINGER": "0.05"}) as made:
        gate = made.models / "gate"
        words = stubbed(made, "a", token_gate=str(gate))
        stubbed(made, "b", load_gate=str(gate))
        preset = made.run_dir.parent / "models.ini"
        preset.write_text("[a]\nalias = other\nctx-size = 256\n")
        await made.role("s1", "supervisor", *words, "--models-preset", str(preset))
        await made.gateway("g1")
        async with made.client() as client:
            yield Stage(made, client, gate)


async def asked(staged: Stage, model: str) -> httpx.Response:
    """Ask a model for a short answer."""
    return await staged.client.post("/v1/completions", json=ask(model))


@pytest.mark.parametrize("name", [*LASTING, *PASSING])
async def test_c177_a_key_that_redis_lost_is_missed_and_written_again(staged: Stage, name: str) -> None:
    """Delete one key while A streams and a request waits for B: the stream ends whole, the request is served,
    and so are all names afterwards, by the engines that ran; what lasts is there again, whole.
    """
    made = staged.made
    staged.gate.touch()
    assert (await asked(staged, "a")).status_code == 200
    await made.unload("b")
    await made.nothing_counted()
    staged.gate.unlink()
    before = await ready(made, "a")
    listed = (await staged.client.get("/models")).json()["data"]
    async with staged.client.stream("POST", "/v1/completions", json=ask("a", stream=True)) as answer:
        assert answer.status_code == 200, await answer.aread()
        pieces = answer.aiter_raw()
        whole = await anext(pieces)
        waiting = asyncio.create_task(asked(staged, "b"))
        await until(lambda: waits(made, "b"), "a ticket for b")
        key = await staged.key(name)
        async with made.redis() as redis:
            kind = await redis.type(key)
            fields = set(await redis.hkeys(key)) if kind == "hash" else set()
            assert await redis.delete(key) == 1
        if name in LASTING:

            async def back() -> bool:
                # What is said of a model meanwhile makes a record of it, which is none of the registry yet.
                async with made.redis() as redis:
                    there = set(await redis.hkeys(key)) if kind == "hash" else set()
                    return bool(await redis.exists(key)) and OF_REGISTRY & fields <= there

            await until(back, f"{name} to be there again")

            async def shown() -> bool:
                entries = (await staged.client.get("/models")).json()["data"]
                return [entry["id"] for entry in entries] == [entry["id"] for entry in listed]

            await until(shown, "the gateway to list all models again")
        staged.gate.touch()
        whole += b"".join([piece async for piece in pieces])
        assert whole.endswith(DONE)
        told = await asyncio.wait_for(waiting, 30)
        assert told.status_code == 200, told.text
    for model in ("a", "other", "b"):
        told = await asked(staged, model)
        assert told.status_code == 200, told.text
    after = await ready(made, "a")
    assert (after["id"], after["pid"]) == (before["id"], before["pid"])
    assert started(made, "a") == [int(before["pid"])]
    await made.nothing_counted()
    assert made.roles["g1"].process.returncode is None

    async def as_before() -> bool:
        # While a record is written again, a gateway may have read the part that others wrote of it.
        again = (await staged.client.get("/models")).json()["data"]
        return said(again) == said(listed)

    await until(as_before, "all models to be listed as before")


def said(entries: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what a list of models says that no load changes."""
    return [(entry["id"], entry["aliases"], entry["path"]) for entry in entries]
