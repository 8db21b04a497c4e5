"""CPU time and memory of processes, from /proc."""

import os
from collections.abc import Iterable
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time that these processes used so far, in user and kernel; ended ones count as 0."""
    return sum(_ticks(pid) for pid in pids) * _TICK_S


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of these processes; pages that several share count for each."""
    return sum(int(pages[1]) * _PAGE_BYTES for pid in pids if (pages := _read(pid, "statm").split()))


def command_line(pid: int) -> list[str]:
    """Return a process's words, empty when it has ended."""
    return _read(pid, "cmdline").split("\0")[:-1]


def machine() -> str:
    """Return one line about this machine: processor, cores, memory, kernel."""
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    model = next((value.strip() for name, value in facts.items() if name.strip() == "model name"), "unknown")
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES >> 30
    return f"{model}, {os.cpu_count()} cores, {memory} GiB, Linux {os.uname().release}"


def _ticks(pid: int) -> int:
    # Behind the command in parentheses, which may hold anything, fields 14 and 15 are user and kernel time.
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if fields else 0


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
