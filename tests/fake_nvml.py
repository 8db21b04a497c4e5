"""GPUs that tests script: a library built from fake_nvml.c under the real pynvml, or pynvml itself faked."""

import shutil
import subprocess
from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

GIB = 1 << 30
LOST = 15  # NVML_ERROR_GPU_IS_LOST
SOURCE = Path(__file__).with_name("fake_nvml.c")
COMPILER = shutil.which("cc")


@dataclass
class FakeGpu:
    """One scripted GPU: `result` is what reading its memory returns, `used` are bytes by process id."""

    uuid: str
    bus: str
    total: int
    free: int
    result: int = 0
    used: Mapping[int, int] = field(default_factory=dict)


@cache
def built_library() -> Path:
    """Compile the library and return its path."""
    assert COMPILER
    path = Path(mkdtemp(prefix="nvml")) / "libnvidia-ml.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    return path


class FakeNvml:
    """What NVML shows; `show` changes it at any time."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self.gpus: list[FakeGpu] = []
        self.init = 0

    def show(self, *gpus: FakeGpu, init: int = 0) -> None:
        """Let these GPUs be there, in the order that NVML numbers them."""
        self.gpus, self.init = list(gpus), init
        lines = [f"init {init}"]
        for g in gpus:
            used = ",".join(f"{pid}:{size}" for pid, size in g.used.items()) or "-"
            lines.append(f"gpu {g.uuid} {g.bus} Fake {g.total} {g.free} {g.result} {used}")
        self.script.write_text("\n".join(lines) + "\n")

    def install_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the compiled library under pynvml."""
        monkeypatch.setenv("FAKE_NVML", str(self.script))
        monkeypatch.setattr(pynvml, "nvmlLib", CDLL(str(built_library())))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def install_functions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the functions of pynvml that are used."""
        functions: dict[str, Any] = {
            "nvmlInit": lambda: self._check(self.init),
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": self._count,
            "nvmlDeviceGetHandleByIndex": lambda index: self.gpus[index],
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=gpu.bus),
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetName": lambda gpu: "Fake",
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.used.items()
            ],
        }
        for name, function in functions.items():
            monkeypatch.setattr(pynvml, name, function)

    def _count(self) -> int:
        self._check(self.init)
        return len(self.gpus)

    def _memory(self, gpu: FakeGpu) -> SimpleNamespace:
        self._check(gpu.result)
        return SimpleNamespace(total=gpu.total, free=gpu.free)

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise pynvml.NVMLError(code)
