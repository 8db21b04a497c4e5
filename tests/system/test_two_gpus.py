"""Two unequal GPUs, end to end: which one a model goes to, and what becomes of failing ones."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fake_nvml import GIB, LOST, FakeGpu
from gpu_herd import BIG, CHAT, NEEDS_COMPILER, SMALL, GpuHerd, gpu_herd
from herd import KEYS, until
from inside import kill, leader, next_leader

pytestmark = [pytest.mark.asyncio(loop_scope="module"), NEEDS_COMPILER]

MIB = 1 << 20
# Everything that the routing processes ask of the driver: to be counted and read, nothing else.
READS = {
    *("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo"),
    *("nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"),
    *("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"),
    *("nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"),
}
OPENS_A_CONTEXT = ("libcuda", "libnvcuda", "libcudart", "libvulkan", "libOpenCL", "libamdhip", "libggml")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gpus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GpuHerd]:
    """A GPU of 12 GiB and one of 24, which NVML lists in the other order than the bus."""
    async with gpu_herd(tmp_path_factory.mktemp("gpus"), BIG, SMALL) as made:
        made.add("middle", 10)
        made.add("small", 5)
        made.add("wide", 9, 17)
        made.add("kept", 2)
        refusal = "alloc_tensor_range: failed to allocate CUDA0 buffer of size 9663676416"
        made.add("liar", 4, crash="loading", crash_text=f"{refusal}\ncudaMalloc failed: out of memory")
        made.add("vast", 20, 20)
        made.add("greedy", 3, untold_mib=700, load_gate=str(made.herd.models / "greedy-gate"))
        preset = made.herd.models.parent / "presets.ini"
        preset.write_text("[kept]\ndevice = gpu0\nenv = GGML_KEPT=yes\n")
        await made.up("--models-preset", str(preset), "--models-max", "0")
        await made.measured("middle", "small", "wide", "kept", "liar", "vast", "greedy")
        yield made


async def held(gpus: GpuHerd) -> dict[str, dict[str, int]]:
    """Return what models hold by GPU, in GiB."""
    accounts = await gpus.accounts()
    return {
        name: {model: round(size / GIB) for model, size in account["held"].items()}
        for name, account in accounts.items()
        if name != "host"
    }


async def test_c76_a_model_goes_whole_to_the_gpu_with_most_room_and_sees_no_other(gpus: GpuHerd) -> None:
    """10 GiB to the 24, 5 to what then has more left; each engine sees the one GPU, by UUID."""
    await gpus.chat("middle")
    await until(lambda: _holds(gpus, "gpu1", "middle"), "middle on gpu1")
    await gpus.chat("small")
    await until(lambda: _holds(gpus, "gpu1", "small"), "small on gpu1")
    assert gpus.starts("middle")[-1]["visible"] == "GPU-bbbb"

    async def told() -> bool:
        # Booked with what its arguments let it take, until it says a moment after it is ready what it took.
        return await held(gpus) == {"gpu0": {}, "gpu1": {"middle": 10, "small": 5}}

    await until(told, "both to be held with what they took")

    async def nobody_else() -> bool:
        # A reading may be from between what an engine took and what is known of it.
        accounts = await gpus.accounts()
        return bool(accounts["gpu0"]["external"] == accounts["gpu1"]["external"] == 0)

    await until(nobody_else, "nothing to be used by others")


async def _holds(gpus: GpuHerd, device: str, model: str) -> bool:
    return model in (await gpus.accounts())[device]["held"]


async def test_places_and_what_is_held_there_outlive_the_supervisor(gpus: GpuHerd) -> None:
    """KILL the supervisor: the next one finds the same models on the same GPU, with the same bytes."""
    expected = {"middle": 10 * GIB, "small": 5 * GIB}

    async def told() -> dict[str, dict[str, Any]]:
        # A load says what it took a moment after it is ready; the next leader knows what stands in Redis.
        accounts = await gpus.accounts()
        needs = {model: (await gpus.herd.instance(model)).get("needs", "{}") for model in expected}
        written = {model: json.loads(text).get("gpu1") for model, text in needs.items()}
        return accounts if accounts["gpu1"]["held"] == written == expected else {}

    before = await until(told, "both to be held with what they took")
    old = await leader(gpus.herd)
    kill(int(old["pid"]))
    await next_leader(gpus.herd, old["number"])
    await gpus.chat("small")

    async def same() -> bool:
        # Found before adopted: until the next look what is shown is reckoned.
        return (await gpus.accounts())["gpu1"]["held"] == before["gpu1"]["held"]

    await until(same, "the same to be held on gpu1")
    assert (await gpus.herd.status("small"))["place"] == "gpu1"
    assert len(gpus.starts("small")) == 1


async def test_a_preset_names_its_device_and_variables(gpus: GpuHerd) -> None:
    """device = gpu0 goes there although the other has more room; env reaches the engine."""
    await gpus.chat("kept")
    await until(lambda: _holds(gpus, "gpu0", "kept"), "kept on gpu0")
    start = gpus.starts("kept")[-1]
    assert start["visible"] == "GPU-aaaa"
    assert "GGML_KEPT" in start["environ"]
    assert "--device" not in start["argv"]


async def test_a_model_too_big_for_each_gpu_is_split_and_booked_on_both(gpus: GpuHerd) -> None:
    """26 GiB: measured whole, then split; it sees both, and both accounts hold its part."""
    memory = await gpus.memory("wide")
    assert set(memory["min"]) == {"gpu0", "gpu1", "host"}
    await gpus.chat("wide")

    async def both() -> bool:
        return await _holds(gpus, "gpu0", "wide") and await _holds(gpus, "gpu1", "wide")

    await until(both, "wide on both")
    assert gpus.starts("wide")[-1]["visible"] == "GPU-aaaa,GPU-bbbb"


async def test_c57_no_process_of_ours_opens_a_gpu(gpus: GpuHerd) -> None:
    """Look at what our processes have mapped and what was asked of the driver: reading only."""
    await gpus.chat("small")
    mapped = []
    for pid in _all_of(gpus):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # jobs come and go
            command, maps = _command(pid), Path(f"/proc/{pid}/maps").read_text()
            if command and not _is_engine(command):
                mapped.append((command, maps))
    assert len(mapped) >= 4, "up, gateway, supervisor, worker"
    for command, maps in mapped:
        assert not [word for word in OPENS_A_CONTEXT if word in maps], command
    readers = [command for command, maps in mapped if "libnvidia-ml" in maps]
    assert [True for command in readers if "supervisor" in command], readers
    asked = set(gpus.calls.read_text().split())
    assert "nvmlDeviceGetMemoryInfo" in asked
    assert asked <= READS


def _all_of(gpus: GpuHerd) -> list[int]:
    up = gpus.herd.roles["up"].pid
    found, new = [up], [up]
    while new:
        new = [pid for parent in new for pid in _children(parent)]
        found += new
    return found


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _is_engine(command: str) -> bool:
    return "stub-llama-server" in command and "--host" in command


async def test_a_load_that_ran_out_of_memory_corrects_its_figure_and_says_so(gpus: GpuHerd) -> None:
    """Measured 4 GiB, and refused 9 more at its load: tried once more, then the numbers, 13 from then on."""
    await gpus.chat("small")
    async with gpus.herd.client() as client:
        asked = {"model": "liar", **CHAT}
        answer = await client.post("/v1/chat/completions", json=asked, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["reason"]) == (503, "out_of_memory")
    assert "it was given" in error["message"]
    assert len(gpus.starts("liar")) == 2

    async def corrected() -> bool:
        return bool((await gpus.memory("liar")).get("ran_out"))

    await until(corrected, "the correction to show")
    assert (await gpus.memory("liar"))["ran_out"] == {"gpu": 13 * GIB}


async def test_what_a_process_takes_beyond_its_engine_s_word_is_booked_at_its_next_start(
    gpus: GpuHerd,
) -> None:
    """The GPU shows 700 MiB more than the engine tells of its 3 GiB: so much is held, shown as `untold`, and
    booked for the next load before its engine has taken a byte, by the next supervisor too.
    """
    gate = gpus.herd.models / "greedy-gate"
    gate.touch()
    await gpus.chat("greedy")

    async def all_held() -> list[int]:
        accounts = await gpus.accounts()
        found = [accounts[gpu]["held"].get("greedy", 0) for gpu in ("gpu0", "gpu1")]
        return found if sum(found) == 3 * GIB + 700 * MIB else []

    await until(all_held, "all that its process uses to be held")

    async def untold() -> bool:
        return (await gpus.memory("greedy")).get("untold") == {"gpu": 700 * MIB}

    await until(untold, "what the engine did not tell to be shown")
    await gpus.herd.unload("greedy")

    async def let_go() -> bool:
        # The account of before shows what is looked for below.
        return not any("greedy" in models for models in (await held(gpus)).values())

    await until(let_go, "nothing to be held for it")
    gate.unlink()
    old = await leader(gpus.herd)
    kill(int(old["pid"]))
    await next_leader(gpus.herd, old["number"])
    asked = asyncio.create_task(gpus.chat("greedy"))

    async def loading() -> bool:
        # Accounts and states come to the gateway on two ways.
        return bool((await gpus.herd.status("greedy"))["value"] == "loading")

    await until(loading, "its load, which the gate holds up")
    await until(all_held, "the same to be booked for the next load")
    assert await loading()
    gate.touch()
    await asked
    await gpus.herd.unload("greedy")


async def test_a_model_too_big_for_all_gpus_is_tried_once_with_a_warning(gpus: GpuHerd) -> None:
    """40 of 34 GiB: with nobody in the way it is started all the same; log, event and status say so."""
    for model in ("middle", "small", "wide", "kept"):
        await gpus.herd.unload(model)
    await gpus.chat("vast")

    async def warning() -> str:
        async with gpus.herd.client() as client:
            return str((await client.get("/v1/models/vast")).json()["status"].get("warning", ""))

    assert "more than there is" in await until(warning, "the warning to show")
    async with gpus.herd.redis() as redis:
        events = await redis.xrevrange(KEYS.events, count=500)
    assert [fields["model"] for _, fields in events if fields["kind"] == "too_big"] == ["vast"]
    assert "too big for its devices" in gpus.herd.roles["up"].output()
    await gpus.herd.unload("vast")


async def test_one_gpu_that_fails_leaves_the_other_in_use(gpus: GpuHerd) -> None:
    """Lose the small one: its account says so and keeps its figures, and models go to the other, also one
    that would find more room on the lost one, until that is back.
    """
    lost = FakeGpu(SMALL.uuid, SMALL.bus, SMALL.total, SMALL.free, result=LOST)
    gpus.nvml.show(BIG, lost)

    async def marked() -> bool:
        accounts = await gpus.accounts()
        return bool(accounts["gpu0"]["problem"]) and not accounts["gpu1"]["problem"]

    await until(marked, "gpu0 to be marked")
    (gpus.herd.models / "greedy-gate").touch()
    for model in ("middle", "small", "greedy"):
        await gpus.chat(model)
        await until(lambda model=model: _holds(gpus, "gpu1", model), f"{model} on gpu1")
    assert (await gpus.accounts())["gpu0"]["total"] == SMALL.total
    gpus.nvml.show(BIG, SMALL)

    async def whole() -> bool:
        return not (await gpus.accounts())["gpu0"]["problem"]

    await until(whole, "gpu0 to be read again")
    await until(lambda: _is_whole_on(gpus, "greedy", "gpu0"), "gpu0 to be used again")
    for model in ("middle", "small", "greedy"):
        await gpus.herd.unload(model)


async def _is_whole_on(gpus: GpuHerd, model: str, device: str) -> bool:
    """Load a model afresh and return whether it lies there."""
    await gpus.herd.unload(model)
    await gpus.chat(model)
    return (await gpus.herd.status(model)).get("place") == device


async def test_a_driver_lost_at_run_time_leaves_the_last_figures(gpus: GpuHerd) -> None:
    """Unload the driver: both are marked, requests are served; once it is back, both are read afresh."""
    gpus.nvml.show(init=9)

    async def problems() -> list[str]:
        accounts = await gpus.accounts()
        return [accounts[name]["problem"] for name in ("gpu0", "gpu1")]

    async def all_marked() -> bool:
        return all(await problems())

    async def none_marked() -> bool:
        return not any(await problems())

    await until(all_marked, "both to be marked")
    await gpus.chat("small")
    gpus.nvml.show(BIG, SMALL)
    await until(none_marked, "both to be read again")


async def test_an_emptied_redis_costs_no_model_its_place_or_its_bytes(gpus: GpuHerd) -> None:
    """Empty Redis with a model on the GPU it was put on: its holder still knows where it lies and what was
    booked for it, so the new accounts hold it there, once, and nowhere else.
    """
    await gpus.chat("middle")
    await until(lambda: _holds(gpus, "gpu1", "middle"), "middle on gpu1")
    before, starts = await held(gpus), len(gpus.starts("middle"))
    old = await leader(gpus.herd)
    async with gpus.herd.redis() as redis:
        await redis.flushall()
    await next_leader(gpus.herd, old["number"])
    await gpus.chat("middle")

    async def same() -> bool:
        return {n: set(m) for n, m in (await held(gpus)).items()} == {n: set(m) for n, m in before.items()}

    await until(same, "all to be held again where they were")
    after = await held(gpus)
    # What its load really took is lost, so it may hold what the driver was reckoned to take on top.
    assert all(0 <= size - before["gpu1"][model] <= 1 for model, size in after["gpu1"].items())

    async def shown() -> bool:
        return bool((await gpus.herd.status("middle")).get("place") == "gpu1")

    await until(shown, "the list to say where it lies")
    assert len(gpus.starts("middle")) == starts
