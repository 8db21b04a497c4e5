"""What lies on disk about an instance, and the end of processes whose holder is gone."""

import contextlib
import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

SPARE_PREFIX = "spare-"


@dataclass(frozen=True)
class Record:
    """Who an instance is, as its holder wrote it before the engine ran.

    Start times are clock ticks since boot: with the boot and the pid they name one process, whoever may get
    the pid later. The engine's pid is its process group too.
    """

    instance: str
    model: str
    nonce: str
    revision: str
    spec_hash: str
    address: str
    boot_id: str
    holder_pid: int
    holder_start: int
    engine_pid: int
    engine_start: int


def instance_folders(run_dir: Path) -> list[Path]:
    """Return the folders of all instances in a run folder, sorted; spares left out."""
    if not (run_dir / "i").is_dir():
        return []
    return sorted(path for path in (run_dir / "i").iterdir() if not path.name.startswith(SPARE_PREFIX))


def spare_folders(run_dir: Path) -> list[Path]:
    """Return the folders of all spares in a run folder, sorted, the dead ones included."""
    return sorted((run_dir / "i").glob(f"{SPARE_PREFIX}*"))


def read_record(folder: Path) -> Record | None:
    """Return the record in an instance's folder, None when no engine was started."""
    try:
        found = json.loads((folder / "record.json").read_bytes())
        return Record(**{name: found[name] for name in Record.__dataclass_fields__})
    except (FileNotFoundError, ValueError, KeyError):
        return None


def remove_folder(folder: Path) -> None:
    """Remove the folder of an instance that is gone; one that is gone already is fine."""
    shutil.rmtree(folder, ignore_errors=True)


def boot_id() -> str:
    """Return what tells this boot of the machine from others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def kill_recorded(record: Record) -> list[int]:
    """Send KILL to what still lives of a recorded instance, its holder included; return the pids.

    For an instance whose holder died or does not answer. Only processes that are provably ours are touched:
    holder and engine by pid, start time and boot; other members of the engine's group by the nonce in their
    environment, since the group's number may be a stranger's by now. An empty list says that nothing is
    left.
    """
    if record.boot_id != boot_id():
        return []
    known = {record.holder_pid: record.holder_start, record.engine_pid: record.engine_start}
    killed = [pid for pid, start in known.items() if _kill_if(pid, start, None, None)]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in known:
            pid = int(entry.name)
            if _kill_if(pid, None, record.engine_pid, record.nonce):
                killed.append(pid)
    return killed


def _kill_if(pid: int, start: int | None, group: int | None, nonce: str | None) -> bool:
    """Kill a live process that has all the given marks; return whether it was killed."""
    try:
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        # The handle stays with the process that it was opened for, so what we read now is true of whom we
        # kill.
        state, its_group, its_start = _stat(pid)
        if state == "Z" or start not in (None, its_start) or group not in (None, its_group):
            return False
        if nonce is not None and f"LLAMASTEAD_NONCE={nonce}" not in _environment(pid):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)


def _stat(pid: int) -> tuple[str, int, int]:
    """Return state, process group and start time of a process."""
    # The name in parentheses may hold anything, also spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[2]), int(fields[19])


def _environment(pid: int) -> list[str]:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return []
