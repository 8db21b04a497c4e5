"""NVIDIA GPUs through NVML, which opens no context on any of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pynvml

from llamastead.shared.devices.device import Device, sensible

T = TypeVar("T")


class Gpus:
    """Reads all GPUs that instances may use; keeps what each showed last.

    `visible` is the value of CUDA_VISIBLE_DEVICES (None: all): numbers count in PCI order, since instances
    get CUDA_DEVICE_ORDER=PCI_BUS_ID. `problem` says why there is none, "" when that is no surprise: the
    library is absent, or sees no GPU.
    """

    def __init__(self, visible: str | None = None) -> None:
        self._visible = visible
        self._running = False
        self._last: dict[str, Device] = {}
        self.problem = ""

    def read(self) -> tuple[Device, ...]:
        """Return every visible GPU in PCI order. One that fails shows its last good reading, marked."""
        self.problem = ""
        try:
            found = self._read_all()
        except pynvml.NVMLError as error:
            # The driver may have been reloaded: the next reading starts the library anew.
            self.close()
            if isinstance(error, pynvml.NVMLError_LibraryNotFound):
                return ()
            self.problem = f"NVML: {error}"
            return tuple(replace(device, problem=self.problem) for device in self._last.values())
        shown = [sensible(device, self._last.get(device.uuid)) for device in found]
        lost = [
            replace(device, problem="it is not listed any more")
            for uuid, device in self._last.items()
            if uuid not in {fresh.uuid for fresh in shown}
        ]
        self._last |= {device.uuid: device for device in shown if not device.problem}
        return tuple(sorted((*shown, *lost), key=lambda device: device.bus_id))

    def close(self) -> None:
        """Let go of the library."""
        if self._running:
            self._running = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                self.problem = f"NVML: {error}"

    def _read_all(self) -> list[Device]:
        if not self._running:
            pynvml.nvmlInit()
            self._running = True
        named = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                bus_id = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)
                named.append((bus_id, _text(pynvml.nvmlDeviceGetUUID(handle)), handle))
            except pynvml.NVMLError as error:
                # Not the others' fault; if it was read before, it shows up as lost.
                self.problem = f"GPU {index}: {error}"
        if self._last and not named:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        ordered = sorted(named, key=lambda known: known[:2])
        seen = visible_devices(self._visible, [uuid for _, uuid, _ in ordered])
        return [
            device
            for position, (bus_id, uuid, handle) in enumerate(ordered)
            if uuid in seen
            for device in self._read_one(f"gpu{position}", bus_id, uuid, handle)
        ]

    def _read_one(self, name: str, bus_id: str, uuid: str, handle: Any) -> list[Device]:
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            last = self._last.get(uuid)
            self.problem = f"{name}: {error}"
            return [replace(last, problem=str(error))] if last else []
        description = _or_none(lambda: _text(pynvml.nvmlDeviceGetName(handle))) or ""
        return [
            Device(
                name=name,
                total=int(memory.total),
                free=int(memory.free),
                description=description,
                uuid=uuid,
                bus_id=bus_id,
                processes=_or_none(lambda: _processes(handle)),
            )
        ]


def visible_devices(visible: str | None, uuids: Sequence[str]) -> list[str]:
    """Return the UUIDs that CUDA would show, in its order: names and numbers up to the first that is none."""
    if visible is None:
        return list(uuids)
    shown: list[str] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdecimal() and int(word) < len(uuids):
            shown.append(uuids[int(word)])
        elif len(matching := [u for u in uuids if word and u.startswith(word)]) == 1:
            shown += matching
        else:
            break
    return shown


def _processes(handle: Any) -> Mapping[int, int] | None:
    """Return bytes by process id; None when the driver keeps them to itself (WSL, missing rights)."""
    found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    if any(process.usedGpuMemory is None for process in found):
        return None
    return {int(process.pid): int(process.usedGpuMemory) for process in found}


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
