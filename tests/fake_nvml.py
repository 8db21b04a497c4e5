"""GPUs that tests script: a library built from fake_nvml.c under the real pynvml, or pynvml itself faked."""

import atexit
import shutil
from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from compiled import compile_library

GIB = 1 << 30
LOST = 15  # NVML_ERROR_GPU_IS_LOST
UNTOLD = (1 << 64) - 1  # bytes of a process that the driver keeps to itself
UNSUPPORTED = 3  # NVML_ERROR_NOT_SUPPORTED
MISSING = 6  # NVML_ERROR_NOT_FOUND
SOURCE = Path(__file__).with_name("fake_nvml.c")


@dataclass
class FakeGpu:
    """One scripted GPU: `result` is what reading its memory returns, `used` are bytes by process id, `drawn`
    those of processes that draw, `parts` what it is cut into (MIG).
    """

    uuid: str
    bus: str
    total: int
    free: int
    result: int = 0
    used: Mapping[int, int] = field(default_factory=dict)
    drawn: Mapping[int, int] = field(default_factory=dict)
    parts: tuple["FakeGpu", ...] = ()


@cache
def built_library() -> Path:
    """Compile the library and return its path; it is removed with this process."""
    folder = mkdtemp(prefix="nvml")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "libnvidia-ml.so.1"
    compile_library(SOURCE, path)
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
        named = [[("gpu", gpu), *(("mig", part) for part in gpu.parts)] for gpu in gpus]
        for kind, g in chain.from_iterable(named):
            listed = [f"{pid}:{size}" for pid, size in g.used.items()]
            listed += [f"{pid}:{size}/" for pid, size in g.drawn.items()]
            used = ",".join(listed) or "-"
            lines.append(f"{kind} {g.uuid} {g.bus} Fake {g.total} {g.free} {g.result} {used}")
        # In one piece: whoever reads meanwhile would see no GPU.
        draft = self.script.with_suffix(".draft")
        draft.write_text("\n".join(lines) + "\n")
        draft.rename(self.script)

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
            "nvmlDeviceGetMigMode": lambda gpu: [int(bool(gpu.parts))] * 2,
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._part,
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetName": lambda gpu: "Fake",
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: _processes(gpu.used),
            "nvmlDeviceGetGraphicsRunningProcesses": lambda gpu: _processes(gpu.drawn),
        }
        for name, function in functions.items():
            monkeypatch.setattr(pynvml, name, function)

    def _count(self) -> int:
        self._check(self.init)
        return len(self.gpus)

    def _part(self, gpu: FakeGpu, index: int) -> FakeGpu:
        self._check(0 if index < len(gpu.parts) else MISSING)
        return gpu.parts[index]

    def _memory(self, gpu: FakeGpu) -> SimpleNamespace:
        self._check(gpu.result)
        return SimpleNamespace(total=gpu.total, free=gpu.free)

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise pynvml.NVMLError(code)


def _processes(used: Mapping[int, int]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=None if size == UNTOLD else size) for pid, size in used.items()
    ]
