"""A day at the limit: more models than two GPUs hold, asked for as people do, with everything watched.

CAPACITY_SECONDS sets how long; `make soak-capacity` takes minutes.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import GIB, FakeGpu
from gpu_herd import CHAT, NEEDS_COMPILER, GpuHerd, gpu_herd
from herd import KEYS, until

from llamastead.shared.clock import wall_ms

pytestmark = [pytest.mark.asyncio, NEEDS_COMPILER, pytest.mark.timeout(0)]

SECONDS = float(os.environ.get("CAPACITY_SECONDS", "15"))
SEED = int(os.environ.get("CAPACITY_SEED", "0")) or random.randrange(1, 1 << 30)
SIZES = {"a": (4,), "b": (10,), "c": (6,), "d": (20,), "e": (3,), "f": (8,), "g": (12,), "h": (13, 13)}
CLIENTS = 6
LAG_MS = 300  # until the driver shows the bytes of a dead process as free
ONE_LOOK_S = 0.1  # as a load takes: a longer one adds up what never was there at once
GPUS = tuple(FakeGpu(f"GPU-{k}", f"00000000:0{k}:00.0", 24 * GIB, 24 * GIB) for k in range(1, 3))
MARGIN = 1 << 30


class Watch:
    """Looks at the accounts after every event, and all the time at what engines really take."""

    def __init__(self, gpus: GpuHerd) -> None:
        self.gpus = gpus
        self.events: Counter[str] = Counter()
        self.looked = 0
        self.most = dict.fromkeys((gpu.uuid for gpu in GPUS), 0)
        self.faults: list[str] = []

    async def follow_events(self) -> None:
        """Read the accounts whenever anything happens."""
        last = "$"
        async with self.gpus.herd.redis() as redis:
            (name,) = await redis.keys("llamastead:devices:*")
            while True:
                for _, entries in _streams(await redis.xread({KEYS.events: last}, block=200)):
                    for last, fields in entries:  # noqa: B007 - read on from there
                        self.events[fields.get("kind", "")] += 1
                accounts = await redis.hgetall(name)
                self.looked += 1
                for device, text in accounts.items():
                    account = json.loads(text)
                    if device != "host" and account["debt"]:
                        self.faults.append(f"{device}: {account}")

    async def follow_usage(self) -> None:
        """Add up what engines take of each GPU: those that live, and dead ones as long as they show."""
        while True:
            taken, began = dict.fromkeys(self.most, 0), time.monotonic()
            for file in self.gpus.usage.iterdir():
                uuid, _, pid = file.name.partition(",")
                with suppress(OSError, ValueError):
                    if uuid in taken and self._counts(pid):
                        taken[uuid] += int(file.read_text())
            if time.monotonic() - began < ONE_LOOK_S:
                self.most = {uuid: max(size, taken[uuid]) for uuid, size in self.most.items()}
            await asyncio.sleep(0.01)

    def _counts(self, pid: str) -> bool:
        seen_dead = self.gpus.usage / f"dead,{pid}"
        if Path(f"/proc/{pid}").exists() or not seen_dead.exists():
            return True
        return wall_ms() - seen_dead.stat().st_mtime_ns // 1_000_000 < LAG_MS


def _streams(answer: Any) -> list[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """Return what XREAD answered, in the one shape or the other."""
    if isinstance(answer, dict):
        return [(name, entry) for name, entries in answer.items() for entry in entries]
    return list(answer or ())


async def ask_for_models(gpus: GpuHerd, chance: random.Random, ends_at: float, answers: Counter[int]) -> None:
    """Ask one model after the other, a few of them most of the time (Zipf), with pauses now and then."""
    names = list(SIZES)
    weights = [1 / (rank + 1) for rank in range(len(names))]
    async with gpus.herd.client() as client:
        while time.monotonic() < ends_at:
            (model,) = chance.choices(names, weights)
            asked = {"model": model, **CHAT, "max_tokens": chance.choice([1, 4, 20])}
            answer = await client.post("/v1/chat/completions", json=asked, timeout=120)
            answers[answer.status_code] += 1
            if answer.status_code != 200:
                answers[0] += 1
                print(answer.text)
            await asyncio.sleep(chance.choice([0, 0, 0.02, 0.3]))


async def test_c09_c12_never_beyond_the_margin_never_a_busy_one_and_every_request_ends(
    tmp_path: Path,
) -> None:
    """Eight models of 3 to 26 GiB on two GPUs of 24 that free late, under Zipf traffic, its seed printed."""
    print(f"seed {SEED}, {SECONDS} s")
    chance = random.Random(SEED)
    async with gpu_herd(tmp_path, *GPUS, LLAMASTEAD_MAX_WAIT="2", FAKE_NVML_LAG=str(LAG_MS)) as gpus:
        for name, sizes in SIZES.items():
            gpus.add(name, *sizes, load_seconds=0.1, token_seconds=0.005)
        await gpus.up("--models-max", "0")
        await gpus.measured(*SIZES)
        watch = Watch(gpus)
        watching = [asyncio.create_task(each()) for each in (watch.follow_events, watch.follow_usage)]
        answers: Counter[int] = Counter()
        ends_at = time.monotonic() + SECONDS
        clients = [
            ask_for_models(gpus, random.Random(chance.random()), ends_at, answers) for _ in range(CLIENTS)
        ]
        await asyncio.gather(*clients)
        for task in watching:
            assert not task.done(), task
            task.cancel()
        print(dict(answers), dict(watch.events), {k: v >> 20 for k, v in watch.most.items()}, watch.looked)
        assert set(answers) == {200}
        assert watch.faults == []
        assert all(size <= 24 * GIB - MARGIN for size in watch.most.values())
        assert max(watch.most.values()) > 12 * GIB, "the GPUs were never in need"
        assert watch.events["decision"] > 3, "nobody had to go"
        # A stub takes its mark away after its last byte; one that was stopped while it served leaves it.
        marks = gpus.herd.models
        await until(lambda: not list(marks.glob("*.serving.*")), "no engine to be stopped while it served")
