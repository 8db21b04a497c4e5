"""Readings of devices: GPUs as a scripted NVML shows them, host memory from files."""

import ctypes
import mmap
import os
from pathlib import Path

import pynvml
import pytest
from compiled import NEEDS_COMPILER
from fake_nvml import GIB, LOST, UNSUPPORTED, UNTOLD, FakeGpu, FakeNvml

from llamastead.shared.devices.device import Device, sensible
from llamastead.shared.devices.gpus import Gpus, visible_devices
from llamastead.shared.devices.host import process_memory, read_host, read_oom_kills

BIG = FakeGpu("GPU-bbbb", "00000000:41:00.0", 24 * GIB, 20 * GIB)
SMALL = FakeGpu("GPU-aaaa", "00000000:01:00.0", 8 * GIB, 7 * GIB, used={77: GIB})


@pytest.fixture(params=[pytest.param("library", marks=NEEDS_COMPILER), "functions"])
def nvml(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Scripted GPUs, under the real pynvml and in its place."""
    fake = FakeNvml(tmp_path / "gpus")
    if request.param == "library":
        fake.install_library(monkeypatch)
    else:
        fake.install_functions(monkeypatch)
    return fake


def test_two_unequal_gpus_are_named_in_pci_order_whatever_nvml_s_is(nvml: FakeNvml) -> None:
    """List the later slot first: names follow the bus, figures and processes stay with their UUID."""
    nvml.show(BIG, SMALL)
    first, second = Gpus().read()
    assert (first.name, first.uuid, first.total, first.processes) == ("gpu0", "GPU-aaaa", 8 * GIB, {77: GIB})
    assert (second.name, second.uuid, second.free, second.processes) == ("gpu1", "GPU-bbbb", 20 * GIB, {})


def test_processes_that_draw_are_known_too_and_those_that_do_both_once(nvml: FakeNvml) -> None:
    """A desktop, as an engine on Vulkan, is listed apart from what computes; one process is in both lists."""
    drawn = {77: 2 * GIB, 812: 600 << 20}
    nvml.show(FakeGpu(SMALL.uuid, SMALL.bus, SMALL.total, 5 * GIB, used={77: 2 * GIB, 78: GIB}, drawn=drawn))
    (device,) = Gpus().read()
    assert device.processes == {77: 2 * GIB, 78: GIB, 812: 600 << 20}


def test_what_the_driver_keeps_to_itself_is_not_guessed(nvml: FakeNvml) -> None:
    """It tells no bytes of a process that draws: the others are known; of one that computes: none is."""
    figures = (SMALL.uuid, SMALL.bus, SMALL.total, 5 * GIB)
    nvml.show(FakeGpu(*figures, used={77: GIB}, drawn={812: UNTOLD}))
    assert [device.processes for device in Gpus().read()] == [{77: GIB}]
    nvml.show(FakeGpu(*figures, used={77: GIB, 78: UNTOLD}))
    assert [device.processes for device in Gpus().read()] == [None]


def test_hidden_gpus_are_not_shown_and_the_others_keep_their_names(nvml: FakeNvml) -> None:
    """Hide one by number, by UUID and all: what is left has the same name as before."""
    nvml.show(BIG, SMALL)
    for visible, expected in (("1", ["gpu1"]), ("GPU-a", ["gpu0"]), ("", []), ("-1", [])):
        assert [device.name for device in Gpus(visible).read()] == expected


def test_a_gpu_that_fails_shows_its_last_good_reading_and_the_other_goes_on(nvml: FakeNvml) -> None:
    """Lose one of two: its last reading stays, marked; the other's is fresh; it recovers by itself."""
    nvml.show(BIG, SMALL)
    gpus = Gpus()
    gpus.read()
    lost = FakeGpu(BIG.uuid, BIG.bus, BIG.total, 1, result=LOST)
    nvml.show(lost, FakeGpu(SMALL.uuid, SMALL.bus, SMALL.total, GIB))
    first, second = gpus.read()
    assert (first.free, first.problem) == (GIB, "")
    assert (second.free, second.lost, first.lost) == (20 * GIB, True, False)
    assert "lost" in second.problem.lower()
    nvml.show(BIG, SMALL)
    assert [device.problem for device in gpus.read()] == ["", ""]


def test_a_library_lost_at_run_time_keeps_the_last_readings(nvml: FakeNvml) -> None:
    """Unload the driver under us: last readings, marked; once it is back they are fresh again."""
    nvml.show(SMALL)
    gpus = Gpus()
    gpus.read()
    nvml.show(init=9)
    (kept,) = gpus.read()
    assert kept.free == 7 * GIB
    assert kept.problem
    assert not kept.lost, "engines may get on without this library"
    nvml.show(SMALL)
    assert [device.problem for device in gpus.read()] == [""]


def test_a_gpu_that_fell_off_the_bus_keeps_its_place(nvml: FakeNvml) -> None:
    """Let NVML list one less: the missing one is still shown, marked as not listed."""
    nvml.show(BIG, SMALL)
    gpus = Gpus()
    gpus.read()
    nvml.show(SMALL)
    first, second = gpus.read()
    assert first.problem == ""
    assert (second.uuid, second.problem, second.lost) == (BIG.uuid, "it is not listed any more", True)


def test_a_gpu_keeps_its_name_when_the_one_before_it_is_gone(nvml: FakeNvml) -> None:
    """Let the first slot's GPU fall off the bus: the other is still gpu1, not a second gpu0."""
    nvml.show(SMALL, BIG)
    gpus = Gpus()
    gpus.read()
    nvml.show(BIG)
    first, second = gpus.read()
    assert (first.name, first.uuid, first.problem) == ("gpu0", SMALL.uuid, "it is not listed any more")
    assert (second.name, second.uuid, second.problem) == ("gpu1", BIG.uuid, "")


def test_parts_of_a_gpu_are_devices_of_their_own(nvml: FakeNvml) -> None:
    """Cut one of two into parts: each has a name, a UUID and figures, the whole is not shown beside them."""
    parts = tuple(FakeGpu(f"MIG-{k}", BIG.bus, 10 * GIB, k * GIB, used={k: GIB}) for k in (1, 2))
    nvml.show(SMALL, FakeGpu(BIG.uuid, BIG.bus, BIG.total, BIG.free, parts=parts))
    assert [(d.name, d.uuid, d.free, d.slice) for d in Gpus().read()] == [
        ("gpu0", SMALL.uuid, 7 * GIB, False),
        ("gpu1.0", "MIG-1", GIB, True),
        ("gpu1.1", "MIG-2", 2 * GIB, True),
    ]
    assert [d.name for d in Gpus("MIG-2").read()] == ["gpu1.1"]
    assert [d.name for d in Gpus("1").read()] == ["gpu1.0", "gpu1.1"]


def test_c73_a_gpu_without_memory_of_its_own_says_so(nvml: FakeNvml) -> None:
    """Let NVML have no figures for a chip with one memory for all: it is no trouble, and marked."""
    nvml.show(FakeGpu(SMALL.uuid, SMALL.bus, 0, 0, result=UNSUPPORTED))
    (device,) = Gpus().read()
    assert (device.unified, device.problem, device.total) == (True, "", 0)


def test_no_gpus_and_no_library_are_no_trouble(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show no GPU, then take the library away: nothing is shown and nothing is complained of."""
    nvml.show()
    gpus = Gpus()
    assert (gpus.read(), gpus.problem) == ((), "")

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    gpus = Gpus()
    assert (gpus.read(), gpus.problem) == ((), "")


def test_c72_a_reading_that_makes_no_sense_is_rejected(nvml: FakeNvml) -> None:
    """Report more free than there is: the last good reading stays, marked; without one free is capped."""
    nonsense = FakeGpu(SMALL.uuid, SMALL.bus, SMALL.total, 9 * GIB)
    nvml.show(nonsense)
    (capped,) = Gpus().read()
    assert (capped.free, bool(capped.problem)) == (8 * GIB, True)
    nvml.show(SMALL)
    gpus = Gpus()
    gpus.read()
    nvml.show(nonsense)
    (kept,) = gpus.read()
    assert kept.free == 7 * GIB
    assert "9663676416 bytes free of 8589934592" in kept.problem


def test_a_total_of_nothing_is_rejected() -> None:
    """Report a device of no bytes: nothing can be had from it, and it says so."""
    odd = sensible(Device("gpu0", 0, 5), None)
    assert (odd.total, odd.free, bool(odd.problem)) == (0, 0, True)


def test_visible_devices_end_at_the_first_that_is_none() -> None:
    """Mix numbers, beginnings of UUIDs and nonsense: CUDA's rule decides."""
    uuids = ["GPU-aa", "GPU-ab"]
    assert visible_devices(None, uuids) == uuids
    assert visible_devices("1,0", uuids) == ["GPU-ab", "GPU-aa"]
    assert visible_devices("GPU-ab,7,0", uuids) == ["GPU-ab"]
    assert visible_devices("GPU-a", uuids) == []


def write_host(root: Path, files: dict[str, str]) -> Path:
    """Write files below a root and return it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\n"


def test_the_host_has_what_meminfo_says_when_nothing_limits_it(tmp_path: Path) -> None:
    """Give no cgroup: total and available of the machine."""
    host = read_host(write_host(tmp_path, {"proc/meminfo": MEMINFO}))
    assert (host.total, host.free) == (16 * GIB, 8 * GIB)


def test_c70_a_cgroup_s_limit_is_the_host_s_size(tmp_path: Path) -> None:
    """Limit by cgroup v2, by its parent, and by v1: the smallest counts, dropped pages of files are free."""
    stat = f"anon 1\nactive_file {GIB}\ninactive_file {GIB}\n"
    own = {"memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": stat}
    v2 = {f"sys/fs/cgroup/a/b/{name}": text for name, text in own.items()}
    v2 |= {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n"}
    host = read_host(write_host(tmp_path / "v2", v2))
    assert (host.total, host.free, host.description) == (4 * GIB, 3 * GIB, "limit of cgroup /a/b")
    parent = {"sys/fs/cgroup/a/memory.max": f"{2 * GIB}", "sys/fs/cgroup/a/memory.current": f"{GIB}"}
    assert read_host(write_host(tmp_path / "v2", parent)).total == 2 * GIB
    v1 = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:cpu,memory:/outside\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}",
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB}\n",
    }
    host = read_host(write_host(tmp_path / "v1", v1))
    assert (host.total, host.free) == (3 * GIB, 2 * GIB)


def test_an_unlimited_cgroup_limits_nothing(tmp_path: Path) -> None:
    """Give `max` and v1's huge number: the machine's memory counts."""
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/\n1:memory:/\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    }
    host = read_host(write_host(tmp_path, files))
    assert (host.total, host.free) == (16 * GIB, 8 * GIB)


def test_kills_for_lack_of_memory_are_counted(tmp_path: Path) -> None:
    """Read the kernel's count; where there is none it is 0."""
    assert read_oom_kills(write_host(tmp_path, {"proc/vmstat": "nr_free_pages 7\noom_kill 3\n"})) == 3
    assert read_oom_kills(tmp_path / "none") == 0


def test_this_machine_and_this_process_can_be_read() -> None:
    """Read the real ones: sums are plausible, a process that is not there has none."""
    host = read_host()
    assert 0 < host.free <= host.total
    own = process_memory(os.getpid())
    assert own is not None
    assert own[0] > 1 << 20
    assert process_memory(2**30) is None


ROLLUP = "Rss: 3000 kB\nPss: 2500 kB\nPss_Anon: 500 kB\nPss_File: 2000 kB\nLocked: {locked} kB\n"


@pytest.mark.parametrize(("locked", "own", "mapped"), [(0, 500, 2000), (1900, 2400, 100), (2600, 2500, 0)])
def test_locked_pages_of_a_file_are_no_pages_that_can_be_dropped(
    tmp_path: Path, locked: int, own: int, mapped: int
) -> None:
    """Lock none of a process's mapped file, nearly all of it, or the process's own pages as well."""
    root = write_host(tmp_path, {"proc/7/smaps_rollup": ROLLUP.format(locked=locked)})
    assert process_memory(7, root) == (own << 10, mapped << 10)


def test_what_this_process_locks_of_a_file_it_cannot_drop(tmp_path: Path) -> None:
    """Map a file for real, touch it, and lock it: its bytes move from those that can be dropped."""
    file, size = tmp_path / "weights", 8 << 20
    file.write_bytes(b"x" * size)
    libc = ctypes.CDLL(None, use_errno=True)
    with file.open("rb+") as opened, mmap.mmap(opened.fileno(), size) as weights:
        assert weights[:].count(b"x") == size
        before = process_memory(os.getpid())
        place = ctypes.addressof(ctypes.c_char.from_buffer(weights))
        if libc.mlock(ctypes.c_void_p(place), ctypes.c_size_t(size)):
            pytest.skip("this user may not lock so much")
        after = process_memory(os.getpid())
        libc.munlock(ctypes.c_void_p(place), ctypes.c_size_t(size))
    assert before is not None
    assert after is not None
    assert before[1] - after[1] > size * 0.9
