"""The host's memory: what the machine has, or what the cgroup allows if that is less."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from llamastead.shared.devices.device import HOST, Device
from llamastead.shared.disk import raise_shortage

ROOT = Path("/")


def read_host(root: Path = ROOT) -> Device:
    """Return total and free bytes of the host. `root` is where /proc and /sys are.

    Free is what can be had without swapping: pages of files that could be dropped count as free. Raises
    OSError where no more files can be opened, which is no word about the memory.
    """
    known = _table(root / "proc/meminfo", unit=1024)
    total, free = known.get("MemTotal", 0), known.get("MemAvailable", 0)
    description = "memory of the machine"
    for limit, used, where in _limits(root):
        if limit < total:
            total, description = limit, f"limit of {where}"
        free = min(free, max(0, limit - used))
    return Device(HOST, total, min(free, total), description)


def process_memory(pid: int, root: Path = ROOT) -> tuple[int, int] | None:
    """Return a process's share of the host's memory in bytes: what can't be dropped, and pages of files that
    can.

    Pages shared with others count in proportion. None if the process is gone or not ours to look at. Raises
    OSError where no more files can be opened.
    """
    known = _table(root / f"proc/{pid}/smaps_rollup", unit=1024)
    if "Pss" not in known:
        return None
    # Locked pages of a file (mlock) are no more available to others than pages of its own.
    mapped = max(0, known.get("Pss_File", 0) - known.get("Locked", 0))
    return known["Pss"] - mapped, mapped


def read_oom_kills(root: Path = ROOT) -> int:
    """Return how many processes the kernel has ended for lack of memory, 0 where it does not tell."""
    try:
        return _table(root / "proc/vmstat").get("oom_kill", 0)
    except OSError:
        return 0


def _limits(root: Path) -> Iterator[tuple[int, int, str]]:
    """Yield limit, bytes in use that can't be dropped, and the name, for each cgroup above this process."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _v2(root / "sys/fs/cgroup", path)
        elif "memory" in controllers.split(","):
            yield from _v1(root / "sys/fs/cgroup/memory", path)


def _v2(mount: Path, path: str) -> Iterator[tuple[int, int, str]]:
    for folder in _upwards(mount, path):
        limit = _number(folder / "memory.max")
        used = _number(folder / "memory.current")
        if limit is not None and used is not None:
            stat = _table(folder / "memory.stat")
            droppable = stat.get("active_file", 0) + stat.get("inactive_file", 0)
            yield limit, max(0, used - droppable), f"cgroup {path}"


def _v1(mount: Path, path: str) -> Iterator[tuple[int, int, str]]:
    for folder in _upwards(mount, path):
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            stat = _table(folder / "memory.stat")
            droppable = stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
            yield limit, max(0, used - droppable), f"cgroup {path}"


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield the folder of a cgroup and those above it; in a container the outer path isn't there, the
    mount itself is.
    """
    folder = mount / path.strip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _table(file: Path, unit: int = 1) -> Mapping[str, int]:
    """Read lines of `name value`, a colon behind the name or not; nothing from a file that can't be read."""
    words = (line.split() for line in _lines(file))
    return {
        parts[0].rstrip(":"): int(parts[1]) * unit
        for parts in words
        if len(parts) > 1 and parts[1].isdecimal()
    }


def _lines(file: Path) -> list[str]:
    """Return the lines of a file, none of one that can't be read. Raises OSError for want of files."""
    try:
        return file.read_text().splitlines()
    except OSError as error:
        raise_shortage(error)
        return []
