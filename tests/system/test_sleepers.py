"""Sleeping models on a scripted GPU: what they keep is held, and goes before what is awake."""

import asyncio
from pathlib import Path

import pytest
from fake_nvml import GIB, FakeGpu
from gpu_herd import NEEDS_COMPILER, gpu_herd
from herd import until

pytestmark = [pytest.mark.asyncio, NEEDS_COMPILER]

MIB = 1 << 20
KEPT_MIB = 600
SLEEPERS = ("s1", "s2", "s3", "s4")
GPU = FakeGpu("GPU-cccc", "00000000:01:00.0", 24 * GIB, 24 * GIB)


async def test_c51_sleepers_are_held_with_what_they_keep_and_go_first(tmp_path: Path) -> None:
    """Four of 4 GiB fall asleep and keep 600 MiB each, which is what is held; a large model that would fit
    but for them sends one of them away, though one that is awake was used longer ago. One that wakes is
    booked whole again.
    """
    async with gpu_herd(tmp_path, GPU) as gpus:
        gate = gpus.herd.models / "gate"
        gate.touch()
        gpus.add("awake", 2)
        gpus.add("large", 18.5)
        for name in SLEEPERS:
            gpus.add(name, 4, asleep_mib=KEPT_MIB, token_gate=str(gate))
        preset = gpus.herd.models.parent / "presets.ini"
        preset.write_text("".join(f"[{name}]\nsleep-idle-seconds = 1\n" for name in SLEEPERS))
        await gpus.up("--models-preset", str(preset), "--models-max", "0")
        await gpus.measured("awake", "large", *SLEEPERS)

        async def held() -> dict[str, int]:
            return {name: size // MIB for name, size in (await gpus.accounts())["gpu0"]["held"].items()}

        async def asleep(count: int) -> bool:
            return [(await held()).get(name) for name in SLEEPERS].count(KEPT_MIB) == count

        await gpus.chat("awake")
        for name in SLEEPERS:
            await gpus.chat(name)
        await until(lambda: asleep(4), "four to sleep and to be held with what they keep")
        assert (await held())["awake"] == 2048
        await gpus.chat("large")

        async def made_room() -> bool:
            return await asleep(3) and "large" in await held()

        await until(made_room, "one sleeper to be gone for the large one")
        assert {"awake", "large"} < set(await held())
        # A stub takes its mark away after its last byte; one that was stopped while it served leaves it.
        await until(
            lambda: not list(gpus.herd.models.glob("*.serving.*")), "no stub to be cut while it served"
        )
        await gpus.herd.unload("large")
        (kept, *_) = [name for name in SLEEPERS if name in await held()]
        gate.unlink()
        waking = asyncio.create_task(gpus.chat(kept))

        async def whole() -> bool:
            return (await held()).get(kept) == 4096

        await until(whole, "it to be held whole")
        gate.touch()
        await waking
        assert len(gpus.starts(kept)) == 1, "it woke, and was not loaded anew"
