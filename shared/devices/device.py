"""The reading of one device's memory, and the check that it makes sense."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MIB = 1 << 20

HOST = "host"
"""The name of the host's own memory among the devices."""


@dataclass(frozen=True)
class Device:
    """Memory as a device showed it, in bytes.

    `name` is `gpu0`, `gpu1`, … in the order of the PCI bus, or `host`; `processes` are bytes by process id,
    None where they can't be read; `problem` says why this is not a fresh reading, "" if it is. `unified` says
    that its memory is the host's, `slice` that it is a part of a GPU (MIG); a process sees only one of those.
    `lost` says that nothing can be started there for now.
    """

    name: str
    total: int
    free: int
    description: str = ""
    uuid: str = ""
    bus_id: str = ""
    processes: Mapping[int, int] | None = field(default=None, compare=False)
    problem: str = ""
    unified: bool = False
    slice: bool = False
    lost: bool = False


def sensible(fresh: Device, last_good: Device | None) -> Device:
    """Return a reading that can be used: `fresh` if it makes sense, else the last good one, marked.

    Without a last good one, what is impossible is cut to what is possible, and marked as well.
    """
    problem = _nonsense(fresh)
    if not problem:
        return fresh
    if last_good is not None:
        return replace(last_good, problem=problem)
    total = max(0, fresh.total)
    return replace(fresh, total=total, free=min(max(0, fresh.free), total), problem=problem)


def _nonsense(reading: Device) -> str:
    if reading.unified:
        return ""
    if reading.total <= 0:
        return f"it reports a total of {reading.total} bytes"
    if not 0 <= reading.free <= reading.total:
        return f"it reports {reading.free} bytes free of {reading.total}"
    return ""
