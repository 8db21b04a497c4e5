"""NVIDIA GPUs through NVML, which opens no context on any of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pynvml

from llamastead.shared.devices.device import Device, sensible

T = TypeVar("T")


class Gpus:
    """Reads all GPUs that instances may use, parts of GPUs too; keeps what each showed last.

    `visible` is the value of CUDA_VISIBLE_DEVICES (None: all): numbers count in PCI order, since instances
    get CUDA_DEVICE_ORDER=PCI_BUS_ID. `problem` says why there is none, "" when that is no surprise: the
    library is absent, or sees no GPU.
    """

    def __init__(self, visible: str | None = None) -> None:
        self._visible = visible
        self._running = False
        self._last: dict[str, Device] = {}
        self._names: dict[str, str] = {}
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
            replace(device, problem="it is not listed any more", lost=True)
            for uuid, device in self._last.items()
            if uuid not in {fresh.uuid for fresh in shown}
        ]
        self._last |= {device.uuid: device for device in shown if not device.problem}
        return tuple(sorted((*shown, *lost), key=lambda device: (device.bus_id, device.name)))

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
            for bus_id, uuid, handle in ordered
            for name in (self._name(uuid),)
            if uuid in seen or self._names_a_slice()
            for device in self._slices(name, bus_id, uuid, handle, seen)
        ]

    def _name(self, uuid: str) -> str:
        """Return the name of a GPU: numbered in PCI order when first seen, and kept when others are lost."""
        return self._names.setdefault(uuid, f"gpu{len(self._names)}")

    def _names_a_slice(self) -> bool:
        return self._visible is not None and "MIG-" in self._visible

    def _slices(self, name: str, bus_id: str, uuid: str, handle: Any, seen: Sequence[str]) -> list[Device]:
        """Read a GPU, or its parts where it is cut into such: gpu0.0, gpu0.1, each with a UUID of its own."""
        mode = _or_none(lambda: pynvml.nvmlDeviceGetMigMode(handle))
        if mode is None or not mode[0]:
            return self._read_one(name, bus_id, uuid, handle) if uuid in seen else []
        named = [word.strip() for word in (self._visible or "").split(",") if word.strip().startswith("MIG-")]
        found: list[Device] = []
        for index in range(_or_none(lambda: int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))) or 0):
            part = _or_none(partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index))
            if part is None:  # not every place is taken
                continue
            own = _text(pynvml.nvmlDeviceGetUUID(part))
            if uuid in seen or any(own.startswith(word) for word in named):
                read = self._read_one(f"{name}.{index}", bus_id, own, part)
                found += [replace(device, slice=True) for device in read]
        return found

    def _read_one(self, name: str, bus_id: str, uuid: str, handle: Any) -> list[Device]:
        description = _or_none(lambda: _text(pynvml.nvmlDeviceGetName(handle))) or ""
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError_NotSupported:
            # A GPU of a chip that has one memory for all, as Jetson and GB10.
            return [Device(name, 0, 0, description, uuid, bus_id, unified=True)]
        except pynvml.NVMLError as error:
            last = self._last.get(uuid)
            self.problem = f"{name}: {error}"
            lost = isinstance(error, pynvml.NVMLError_GpuIsLost)
            return [replace(last, problem=str(error), lost=lost)] if last else []
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
    """Return bytes by process id; None when the driver keeps them to itself (WSL, missing rights).

    Those that draw are asked for as well: a desktop is one, and so is an engine that uses Vulkan.
    """
    found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    if any(process.usedGpuMemory is None for process in found):
        return None
    used = {int(process.pid): int(process.usedGpuMemory) for process in found}
    for process in _or_none(lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)) or ():
        if process.usedGpuMemory is not None:
            # One that does both stands in both lists with all it uses.
            used[int(process.pid)] = max(int(process.usedGpuMemory), used.get(int(process.pid), 0))
    return used


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
