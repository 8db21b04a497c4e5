"""The scripted GPUs themselves: whose bytes they show."""

import ctypes
import os
from pathlib import Path

import pytest
from compiled import NEEDS_COMPILER
from fake_nvml import GIB, FakeGpu, FakeNvml, built_library


class Memory(ctypes.Structure):
    """`nvmlMemory_t`: bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def free_bytes() -> int:
    """Return what the only GPU shows as free."""
    library, memory, device = ctypes.CDLL(str(built_library())), Memory(), ctypes.c_void_p()
    assert library.nvmlInit_v2() == 0
    assert library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    assert library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    return int(memory.free)


@NEEDS_COMPILER
def test_a_number_that_goes_to_another_process_brings_no_bytes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a process be seen dead and its number live again: its bytes stay free, until it takes some."""
    script, usage = tmp_path / "gpus", tmp_path / "usage"
    usage.mkdir()
    FakeNvml(script).show(FakeGpu("GPU-a", "00000000:01:00.0", 8 * GIB, 8 * GIB))
    monkeypatch.setenv("FAKE_NVML", str(script))
    monkeypatch.setenv("FAKE_NVML_USAGE", str(usage))
    taken, dead = usage / f"GPU-a,{os.getpid()}", usage / f"dead,{os.getpid()}"
    taken.write_text(str(GIB))
    assert free_bytes() == 7 * GIB
    dead.touch()
    os.utime(taken, ns=(0, 0))
    assert free_bytes() == 8 * GIB
    os.utime(taken)
    os.utime(dead, ns=(0, 0))
    assert free_bytes() == 7 * GIB
