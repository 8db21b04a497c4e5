"""Parts of a GPU (MIG), and GPUs that the supervisor itself is not to see."""

from pathlib import Path

import pytest
from fake_nvml import GIB, FakeGpu
from gpu_herd import BIG, NEEDS_COMPILER, SMALL, gpu_herd

pytestmark = [pytest.mark.asyncio, NEEDS_COMPILER]


async def test_each_part_of_a_gpu_is_a_place_of_its_own(tmp_path: Path) -> None:
    """Two parts of 10 GiB: two models of 7 lie one on each, seen by the part's UUID; a third has one go."""
    parts = tuple(FakeGpu(f"MIG-{k}", BIG.bus, 10 * GIB, 10 * GIB) for k in range(2))
    cut = FakeGpu(BIG.uuid, BIG.bus, BIG.total, BIG.free, parts=parts)
    async with gpu_herd(tmp_path, cut) as gpus:
        for name in "abc":
            gpus.add(name, 7)
        await gpus.up("--models-max", "0")
        await gpus.measured("a", "b", "c")
        await gpus.chat("a")
        await gpus.chat("b")
        assert {gpus.starts(name)[-1]["visible"] for name in "ab"} == {"MIG-0", "MIG-1"}
        accounts = await gpus.accounts()
        assert {"gpu0.0", "gpu0.1"} < accounts.keys()
        await gpus.chat("c")
        assert gpus.starts("c")[-1]["visible"] == gpus.starts("a")[-1]["visible"]


async def test_a_gpu_that_is_hidden_from_the_supervisor_is_not_used(tmp_path: Path) -> None:
    """Show it the later of two: that one keeps its name, and every model goes there."""
    async with gpu_herd(tmp_path, BIG, SMALL, CUDA_VISIBLE_DEVICES="1") as gpus:
        gpus.add("a", 7)
        await gpus.up()
        await gpus.measured("a")
        await gpus.chat("a")
        assert gpus.starts("a")[-1]["visible"] == BIG.uuid
        assert {"gpu1", "host"} == (await gpus.accounts()).keys()
