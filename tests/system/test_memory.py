"""Models by memory, end to end: measured by the worker, admitted by the ledger, shown to the operator."""

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from compiled import NEEDS_COMPILER
from fake_nvml import GIB, FakeGpu, FakeNvml, built_library
from herd import KEYS, QUICK, Herd, herd, processes_naming, until
from tiny import stub_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
MIB = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[Herd]:
    """A herd of real engines on the host's memory."""
    async with herd(QUICK) as made:
        made.add_models("a", "b")
        await made.up("--models-dir", str(made.models), "--no-warmup", "-t", "1")
        yield made


class Gpus:
    """A herd of stub engines on one scripted GPU of 24 GiB, whose free bytes follow what a test says."""

    def __init__(self, made: Herd, nvml: FakeNvml) -> None:
        self.herd, self.nvml = made, nvml

    def show(self, free_gib: float, used: Mapping[int, int] = {}) -> None:
        """Let the GPU show so much as free, and these bytes as used by processes."""
        self.nvml.show(FakeGpu("GPU-aaaa", "00000000:01:00.0", 24 * GIB, int(free_gib * GIB), used=used))

    async def account(self) -> dict[str, Any]:
        """Return the GPU's account as Redis has it."""
        async with self.herd.redis() as redis:
            (key,) = await redis.keys("llamastead:devices:*")
            return dict(json.loads(await redis.hget(key, "gpu0") or "{}"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gpus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gpus]:
    """Two models of 16 GiB each and one of 4, on the scripted GPU."""
    script = tmp_path_factory.mktemp("gpus") / "gpus"
    listed = "CUDA0: Fake (24576 MiB, 24576 MiB free)"
    env = {**QUICK, "FAKE_NVML": str(script), "LD_LIBRARY_PATH": str(built_library().parent)}
    env["GGML_STUB_DEVICES"] = listed
    async with herd(env) as made:
        found = Gpus(made, FakeNvml(script))
        found.show(24)
        made.add_models("big", "huge", "small")
        for name, mib in (("big", 16384), ("huge", 16000), ("small", 4096)):
            sizes = {"CUDA0": [mib - 200, 100, 100], "Host": [10, 0, 10]}
            (made.models / f"{name}.gguf.json").write_text(json.dumps({"memory_mib": sizes}))
        engine = str(stub_engine(made.models.parent))
        await made.up("--models-dir", str(made.models), "--engine", engine)
        yield found


async def memory_of(made: Herd, model: str, source: str = "measured") -> dict[str, Any]:
    """Return a model's memory object once it is from this source."""

    async def look() -> dict[str, Any] | None:
        async with made.client() as client:
            entry = (await client.get(f"/v1/models/{model}")).json()
            found: dict[str, Any] = entry.get("memory") or {}
            return found if found.get("source") == source else None

    found: dict[str, Any] = await until(look, f"{model} to be {source}")
    return found


async def chat(made: Herd, model: str) -> None:
    """Have a model answer."""
    async with made.client() as client:
        answer = await client.post("/v1/chat/completions", json={"model": model, **CHAT}, timeout=60)
        assert answer.status_code == 200, answer.text


async def test_models_are_measured_in_the_background_and_corrected_by_a_load(real: Herd) -> None:
    """Wait for the worker's figures, load, and compare: min, max and effective stand side by side."""
    before = await memory_of(real, "a")
    assert before["contexts"] == [2048, 2048]
    assert before["min"]["host"]["compute"] > MIB
    await chat(real, "a")

    async def look() -> dict[str, Any] | None:
        found = await memory_of(real, "a")
        return found if "effective" in found else None

    loaded = await until(look, "what the load took")
    assert loaded["effective_context"] == 2048
    for part in ("context", "compute"):
        assert abs(loaded["effective"]["host"][part] - loaded["min"]["host"][part]) <= MIB
    code, out, _ = await real.command("measure", "a")
    assert code == 0
    assert "effective" in out
    assert "min and max: measured" in out


async def test_the_host_is_shown_with_what_each_model_holds(real: Herd) -> None:
    """Load a model: Redis, /props and the command name what it holds, and the sum is the host's memory."""
    await chat(real, "a")
    async with real.redis() as redis:

        async def held() -> int:
            keys = await redis.keys("llamastead:held:*:host")
            return sum([int(await redis.hget(key, "a") or 0) for key in keys])

        assert await until(held, "a to be held") > 64 * MIB
    async with real.client() as client:
        account = (await client.get("/props")).json()["llamastead"]["devices"]["host"]
    parts = sum(sum(account[part].values()) for part in ("held", "releasing", "measuring"))
    total = account["margin"] + account["external"] + parts + account["free"] - account["debt"]
    assert total == account["total"]
    code, out, _ = await real.command("devices")
    assert code == 0
    assert "held" in out
    assert "free" in out


async def test_a_measurement_is_kept_for_the_next_supervisor(real: Herd) -> None:
    """Look at the hash of a measurement: it names its model, its figures, and when it was made."""
    await memory_of(real, "b")
    async with real.redis() as redis:
        found = [await redis.hgetall(key) for key in await redis.keys("llamastead:measurement:*")]
    (kept,) = [hash_ for hash_ in found if hash_["model"] == "b"]
    assert kept["state"] == "measured"
    assert json.loads(kept["min"])["host"]["compute"] > MIB
    assert int(kept["measured_ms"]) > 0


@NEEDS_COMPILER
async def test_c09_c55_one_goes_for_its_memory_and_the_load_waits_until_the_gpu_shows_it(gpus: Gpus) -> None:
    """Two of 16 GiB on 24: the second waits for the first to go and for its bytes to show, then loads."""
    await memory_of(gpus.herd, "big")
    await memory_of(gpus.herd, "huge")
    await chat(gpus.herd, "big")
    gpus.show(8)

    async def held() -> bool:
        return int((await gpus.account())["held"].get("big", 0)) > 16000 * MIB

    await until(held, "big to be held")
    async with gpus.herd.client() as client:
        waiting = client.build_request("POST", "/v1/chat/completions", json={"model": "huge", **CHAT})
        answer = asyncio.create_task(client.send(waiting))

        async def released() -> bool:
            return "big" in (await gpus.account())["releasing"]

        await until(released, "the bytes of big to be awaited")
        async with gpus.herd.redis() as redis:
            assert await redis.hget(KEYS.model("huge"), "status") == "unloaded"
        gpus.show(24)
        assert (await answer).status_code == 200

    async def paid() -> bool:
        account = await gpus.account()
        return "huge" in account["held"] and "big" not in account["held"] and account["debt"] == 0

    await until(paid, "huge to be held, big not, and nothing owed")


@NEEDS_COMPILER
async def test_c54_a_refusal_names_what_strangers_hold(gpus: Gpus) -> None:
    """A stranger takes 20 of 24 GiB while nothing of ours runs: a model of 16 is refused with the
    numbers, and with the stranger's pid and size.
    """
    for model in ("big", "huge", "small"):
        await gpus.herd.unload(model)
    knobs = gpus.herd.models / "big.gguf.json"
    crash = {"crash": "loading", "crash_text": "ggml_cuda: cudaMalloc failed: out of memory"}
    knobs.write_text(json.dumps({**json.loads(knobs.read_text()), **crash}))
    stranger = await asyncio.create_subprocess_exec("sleep", "600")
    gpus.show(4, {stranger.pid: 20 * GIB})

    async def taken() -> bool:
        account = await gpus.account()
        return not account["held"] and not account["releasing"] and account["external"] >= 19 * GIB

    await until(taken, "the stranger to be seen")
    async with gpus.herd.client() as client:
        # Alone it is tried once all the same: the engine may find room where the figures do not.
        first = await client.post("/v1/chat/completions", json={"model": "big", **CHAT}, timeout=60)
        answer = await client.post("/v1/chat/completions", json={"model": "big", **CHAT}, timeout=60)
    assert (first.status_code, first.json()["error"]["reason"]) == (503, "out_of_memory")
    error = answer.json()["error"]
    assert error["reason"] == "too_big"
    assert "gpu0, which has 24576 MiB" in error["message"]
    assert error["memory"]["gpu0"]["total"] == 24 * GIB
    assert f"pid {stranger.pid} sleep 20480 MiB" in error["message"]
    assert error["memory"]["gpu0"]["strangers"] == {f"pid {stranger.pid} sleep": 20 * GIB}
    gpus.show(24)
    stranger.kill()
    await stranger.wait()


@NEEDS_COMPILER
async def test_the_devices_command_draws_a_gpu(gpus: Gpus) -> None:
    """Show the GPU: its name, its UUID and a bar."""
    code, out, _ = await gpus.herd.command("devices")
    assert code == 0
    assert "gpu0 Fake GPU-aaaa: 24576 MiB" in out
    assert "[" in out


async def test_measure_tells_how_far_it_is_and_loads_for_what_is_effective(real: Herd) -> None:
    """Run `measure --load` on a model: lines of progress on standard error, then min, max, effective, their
    sources and ages; with --json the same facts and no other word.
    """
    await real.unload("b")
    code, out, err = await real.command("measure", "b", "--load")
    assert code == 0, err
    assert [word in out for word in ("DEVICE", "FIGURE", "min", "max", "effective")] == [True] * 5
    assert re.search(r"^min and max: measured .* ago, contexts 2048 and 2048$", out, re.MULTILINE)
    assert re.search(r"^effective: a load .* ago with context 2048$", out, re.MULTILINE)

    async def loaded() -> bool:
        return bool((await real.status("b"))["value"] == "loaded")

    await until(loaded, "b to be listed as loaded")
    code, out, err = await real.command("measure", "b", "--json")
    assert (code, err) == (0, "")
    memory = json.loads(out)
    assert memory["source"] == "measured"
    assert 0 <= memory["effective_age_s"] <= memory["age_s"] < 600
    assert memory["effective"]["host"]["model"] > 0


async def test_the_most_a_process_was_seen_to_use_is_kept(real: Herd) -> None:
    """Have a model answer: the peak of its process stands beside what it allocated, and in Redis."""
    await chat(real, "a")

    async def look() -> dict[str, int] | None:
        async with real.client() as client:
            memory = (await client.get("/v1/models/a")).json()["memory"]
        found: dict[str, int] | None = memory.get("peak")
        return found

    peak = await until(look, "a peak")
    assert peak["host"] > MIB
    async with real.redis() as redis:
        kept = [await redis.hget(key, "peak") for key in await redis.keys("llamastead:measurement:*")]
    assert any(json.loads(each)["host"] >= peak["host"] for each in kept if each)


async def test_progress_of_a_measurement_is_shown_and_shutdown_calls_it_off(tmp_path: Path) -> None:
    """Hold a measurement back: `measure` says how far it is; ending the herd calls it off within seconds."""
    async with herd(QUICK) as made:
        made.add_models("a")
        knobs = {"memory_mib": {"Host": [9, 5, 2]}, "measure_gate": str(tmp_path / "gate")}
        (made.models / "a.gguf.json").write_text(json.dumps(knobs))
        up = await made.up("--models-dir", str(made.models), "--engine", str(stub_engine(tmp_path)))

        async def begun() -> bool:
            async with made.client() as client:
                return "measuring" in (await client.get("/v1/models/a")).json().get("memory", {})

        await until(begun, "the measurement")
        code, out, err = await made.command("measure", "a", "--wait", "4")
        assert code == 0
        assert "a: measuring 1 of 1\n" in err
        assert "still not over after 4 s" in err
        assert "min and max: estimate" in out

        def engines() -> list[int]:
            found = []
            for pid in processes_naming(made.run_dir):
                with contextlib.suppress(OSError):  # another one has just gone
                    found += [pid] if b"--fit" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
            return found

        assert len(engines()) == 1
        assert await up.signal(signal.SIGTERM) == 0
        assert engines() == []
        assert "Traceback" not in up.output()
