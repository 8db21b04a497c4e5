"""Measurements in a herd of stub engines: their order, how long they are waited for, what is tried again."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from compiled import NEEDS_COMPILER
from fake_nvml import GIB, FakeGpu
from gpu_herd import gpu_herd
from herd import KEYS, QUICK, Herd, herd, processes_naming, until
from tiny import stub_engine

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
TOLD = {"Host": [9, 5, 2]}


@asynccontextmanager
async def measured_herd(folder: Path, **knobs: dict[str, Any]) -> AsyncIterator[Herd]:
    """Yield a herd of stub models with these knobs, ready for requests."""
    async with herd(QUICK) as made:
        made.add_models(*knobs)
        for name, each in knobs.items():
            (made.models / f"{name}.gguf.json").write_text(json.dumps(each))
        await made.up("--models-dir", str(made.models), "--engine", str(stub_engine(folder)))
        yield made


async def memory(made: Herd, model: str) -> dict[str, Any]:
    """Return what GET /v1/models says of a model's memory."""
    async with made.client() as client:
        found: dict[str, Any] = (await client.get(f"/v1/models/{model}")).json().get("memory") or {}
        return found


async def begun(made: Herd, model: str) -> bool:
    """Return whether a model is being measured."""
    return bool((await memory(made, model)).get("measuring"))


async def settled(made: Herd, model: str, failures: int = 0) -> dict[str, Any]:
    """Wait until a model is measured, or its measurement failed so many times."""

    async def look() -> dict[str, Any] | None:
        found = await memory(made, model)
        if not failures:
            return found if found.get("source") == "measured" else None
        return found if found.get("failed") and await tries(made, model) >= failures else None

    found: dict[str, Any] = await until(look, f"{model} to be measured", 90)
    return found


async def tries(made: Herd, model: str) -> int:
    """Return how often a model's measurement failed."""
    async with made.redis() as redis:
        for key in await redis.keys("llamastead:measurement:*"):
            if await redis.hget(key, "model") == model:
                return int(await redis.hget(key, "failures") or 0)
    return 0


async def chat(made: Herd, model: str) -> int:
    """Have a model answer; return how long the request waited for it, in ms."""
    async with made.client() as client:
        answer = await client.post("/v1/chat/completions", json={"model": model, **CHAT}, timeout=90)
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-llamastead-wait-ms"])


async def test_a_demand_is_measured_next_and_waits_for_it(tmp_path: Path) -> None:
    """Hold a's measurement back and ask for c: it waits as `measuring`; after a it is next, before b."""
    gate = tmp_path / "gate"
    held = {"memory_mib": TOLD, "measure_gate": str(gate)}
    async with measured_herd(tmp_path, a=held, b={"memory_mib": TOLD}, c={"memory_mib": TOLD}) as made:
        await until(lambda: begun(made, "a"), "the measurement of a")
        request = asyncio.create_task(chat(made, "c"))

        async def waits() -> bool:
            async with made.redis() as redis:
                return bool(await redis.hget(KEYS.model("c"), "wait_reason") == "measuring")

        await until(waits, "c to wait for its measurement")
        gate.touch()
        await request
        at = {model: (await settled(made, model))["measured_ms"] for model in "abc"}
        assert at["a"] <= at["c"] <= at["b"]


async def test_a_demand_waits_5_s_for_a_measurement_and_no_more(tmp_path: Path) -> None:
    """Let a measurement never end: a request for that model is served after 5 s, by the estimate."""
    async with measured_herd(
        tmp_path, a={"memory_mib": TOLD, "measure_gate": str(tmp_path / "never")}
    ) as made:
        await until(lambda: begun(made, "a"), "the measurement")
        waited = await chat(made, "a")
        assert 4000 <= waited < 25_000
        assert (await memory(made, "a"))["source"] == "estimate"


async def test_a_failed_measurement_is_tried_again_after_loads_and_twice_at_most(tmp_path: Path) -> None:
    """Let a stub tell nothing when measured: each load has it tried once more, until it failed thrice."""
    async with measured_herd(tmp_path, a={}) as made:
        assert "this stub was not told" in (await settled(made, "a", 1))["failed"]
        for failures in (2, 3, 3):
            await chat(made, "a")
            await settled(made, "a", failures)
            await made.unload("a")
        async with made.redis() as redis:

            async def no_job() -> bool:
                # A failure is counted a moment before its job is over.
                return not await redis.zrange(KEYS.jobs, 0, -1)

            await until(no_job, "the last job to be over")
        # The last load changed nothing: nothing is asked for any more.
        assert await tries(made, "a") == 3


@NEEDS_COMPILER
async def test_nothing_is_measured_on_a_gpu_that_has_no_room_for_it(tmp_path: Path) -> None:
    """All but 100 MiB of the GPU are a stranger's: a request has its 5 s without a measurement being begun,
    which would fail there; once the stranger is gone the model is measured.
    """
    full = FakeGpu("GPU-aaaa", "00000000:01:00.0", 24 * GIB, 100 << 20)
    async with gpu_herd(tmp_path, full) as gpus:
        gpus.add("a", 4)
        await gpus.up()
        await gpus.chat("a")
        assert (await gpus.memory("a"))["source"] != "measured"
        async with gpus.herd.redis() as redis:
            assert await redis.keys("llamastead:job:measure-*") == []
        gpus.nvml.show(replace(full, free=24 * GIB))
        await gpus.measured("a")


async def test_c181_a_worker_killed_amid_a_measurement_costs_a_minute_and_nothing_else(
    tmp_path: Path,
) -> None:
    """KILL the herd's worker while it measures: engine gone, measured anew by the next, booking returned."""
    gate = tmp_path / "gate"
    async with measured_herd(tmp_path, a={"memory_mib": TOLD, "measure_gate": str(gate)}) as made:

        def engines() -> list[int]:
            found = []
            for pid in processes_naming(made.run_dir):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"--fit" in words and b"on" in words:
                    found.append(pid)
            return found

        async def worker() -> dict[str, str]:
            async with made.redis() as redis:
                for name in await redis.zrange(KEYS.workers, 0, -1):
                    about = await redis.hgetall(KEYS.worker(name))
                    if about.get("job", "").startswith("measure-"):
                        return dict(about)
            return {}

        async def booked() -> dict[str, int]:
            async with made.client() as client:
                shown = (await client.get("/props")).json()["llamastead"]["devices"]
                found: dict[str, int] = shown["host"]["measuring"] if shown else {}
                return found

        (first,) = await until(engines, "an engine that is measured")
        about = await until(worker, "the worker that measures")
        assert await until(booked, "a booking") == {"a": 512 << 20}
        os.kill(int(about["pid"]), signal.SIGKILL)
        (second,) = await until(
            lambda: [pid for pid in engines() if pid != first] if first not in engines() else [],
            "a second measurement",
            60,
        )
        assert second != first
        gate.touch()
        await settled(made, "a")
        await until(lambda: not engines(), "the end of the engine")

        async def unbooked() -> bool:
            return not await booked()

        await until(unbooked, "the booking to be returned")
        assert await tries(made, "a") == 0
