"""A herd of stub engines on scripted GPUs, which show as used what those engines say they take."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from compiled import NEEDS_COMPILER as NEEDS_COMPILER
from fake_nvml import GIB, FakeGpu, FakeNvml, built_library
from herd import QUICK, Herd, herd, until
from looks import whole_lines
from tiny import stub_engine

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
# NVML lists the later slot first, as it may.
BIG = FakeGpu("GPU-bbbb", "00000000:41:00.0", 24 * GIB, 24 * GIB)
SMALL = FakeGpu("GPU-aaaa", "00000000:01:00.0", 12 * GIB, 12 * GIB)


class GpuHerd:
    """`nvml` says what GPUs there are, `usage` is where engines keep what they take."""

    def __init__(self, made: Herd, nvml: FakeNvml, folder: Path) -> None:
        self.herd, self.nvml = made, nvml
        self.usage, self.calls = folder / "usage", folder / "calls"

    def add(self, name: str, *gib: float, **knobs: object) -> None:
        """Add a model that takes so many GiB of each GPU; on one alone it takes the sum."""
        self.herd.add_models(name)
        sizes = {f"CUDA{k}": [int(size * 1024) - 100, 50, 50] for k, size in enumerate(gib)}
        sizes["Host"] = [10, 0, 10]
        (self.herd.models / f"{name}.gguf.json").write_text(json.dumps({"memory_mib": sizes, **knobs}))

    async def up(self, *args: str) -> None:
        """Start the herd with all models added, and wait until they are measured."""
        engine = str(stub_engine(self.herd.models.parent))
        await self.herd.up("--models-dir", str(self.herd.models), "--engine", engine, *args)

    async def measured(self, *models: str) -> None:
        """Wait until these models are measured."""
        for model in models:
            await until(lambda model=model: self._is_measured(model), f"{model} to be measured")

    async def _is_measured(self, model: str) -> bool:
        return bool((await self.memory(model)).get("source") == "measured")

    async def memory(self, model: str) -> dict[str, Any]:
        """Return a model's memory object."""
        async with self.herd.client() as client:
            return dict((await client.get(f"/v1/models/{model}")).json().get("memory") or {})

    async def accounts(self) -> dict[str, dict[str, Any]]:
        """Return the accounts of all devices as /props has them."""
        async with self.herd.client() as client:
            return dict((await client.get("/props")).json()["llamastead"]["devices"])

    async def chat(self, model: str) -> None:
        """Have a model answer."""
        async with self.herd.client() as client:
            answer = await client.post("/v1/chat/completions", json={"model": model, **CHAT}, timeout=60)
            assert answer.status_code == 200, answer.text

    def starts(self, model: str) -> list[dict[str, Any]]:
        """Return the journal's entries of a model's starts."""
        lines = whole_lines(self.herd.models / f"{model}.gguf.journal")
        return [entry for entry in map(json.loads, lines) if entry["event"] == "start"]


@asynccontextmanager
async def gpu_herd(folder: Path, *gpus: FakeGpu, **env: str) -> AsyncIterator[GpuHerd]:
    """Yield a herd, not yet started, on these GPUs."""
    (folder / "usage").mkdir()
    variables: Mapping[str, str] = {
        **QUICK,
        "FAKE_NVML": str(folder / "gpus"),
        "FAKE_NVML_USAGE": str(folder / "usage"),
        "FAKE_NVML_CALLS": str(folder / "calls"),
        "GGML_STUB_USAGE": str(folder / "usage"),
        "GGML_STUB_DEVICES": ";".join(f"CUDA{k}: Fake (9 MiB, 9 MiB free)" for k in range(len(gpus))),
        "LD_LIBRARY_PATH": str(built_library().parent),
        **env,
    }
    async with herd(variables) as made:
        nvml = FakeNvml(folder / "gpus")
        nvml.show(*gpus)
        yield GpuHerd(made, nvml, folder)
