"""What engines list, matched with what NVML knows, and what the operator says of either."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml import GIB, LOST, UNSUPPORTED, FakeGpu, FakeNvml
from few_files import no_more_files
from help_text import TABLE

from llamastead.shared.devices.device import HOST
from llamastead.shared.devices.listed import Listed
from llamastead.shared.margins import parse_sizes
from llamastead.supervisor import devices as module
from llamastead.supervisor.core.state import Device as Booked
from llamastead.supervisor.devices import Devices
from llamastead.supervisor.engine import Engine
from llamastead.supervisor.running import Running

pytestmark = pytest.mark.asyncio

ENGINE = Engine(Path("/opt/llama-server"), "1", TABLE)
CARD = FakeGpu("GPU-bbbb", "00000000:41:00.0", 24 * GIB, 20 * GIB)
OTHER = FakeGpu("GPU-aaaa", "00000000:01:00.0", 8 * GIB, 7 * GIB)


def listed(name: str, gib: int, free: int | None = None, **fields: object) -> Listed:
    """Return a line of an engine's list; the fake NVML calls all its GPUs Fake."""
    fields.setdefault("description", "Radeon")
    return Listed(name, total=gib * GIB, free=(gib if free is None else free) * GIB, **fields)  # type: ignore[arg-type]


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """GPUs as a test shows them."""
    fake = FakeNvml(tmp_path / "gpus")
    fake.install_functions(monkeypatch)
    fake.show()
    return fake


def devices_of(*found: Listed, sizes: str = "", visible: str | None = None, say: bool = True) -> Devices:
    """Return devices whose engine lists these."""
    return Devices({}, visible, 5.0, parse_sizes(sizes), lambda _: found if say else None)


async def read(devices: Devices) -> dict[str, Booked]:
    """Read all devices, as a reign does it: the engine is asked once what is there is known."""
    await devices.read({})
    devices.seen_by(ENGINE)
    return dict((await devices.read({})).devices)


async def test_cuda_s_names_follow_the_ledger_whatever_order_the_supervisor_was_given(nvml: FakeNvml) -> None:
    """Show two unequal cards in NVML's order, visible in the other: CUDA0 is the first of the ledger."""
    nvml.show(CARD, OTHER)
    devices = devices_of(listed("CUDA0", 24), listed("CUDA1", 8), visible="1,0")
    await read(devices)
    assert [(s.engine, s.ledger, s.uuid) for s in devices.seen_by(ENGINE)] == [
        ("CUDA0", "gpu0", "GPU-aaaa"),
        ("CUDA1", "gpu1", "GPU-bbbb"),
    ]


async def test_a_lost_gpu_is_none_where_models_can_start_and_keeps_its_account(nvml: FakeNvml) -> None:
    """Lose one of two: no model is put there, its account stays; it comes back, and may be used again."""
    nvml.show(CARD, OTHER)
    devices = devices_of(listed("CUDA0", 24), listed("CUDA1", 8))
    await read(devices)
    nvml.show(CARD, replace(OTHER, result=LOST))
    assert set(await read(devices)) == {"gpu0", "gpu1", HOST}
    assert [(s.engine, s.ledger) for s in devices.seen_by(ENGINE)] == [("CUDA0", "gpu1")]
    assert devices.usable == {"gpu1", HOST}
    nvml.show(CARD, OTHER)
    await read(devices)
    assert [s.ledger for s in devices.seen_by(ENGINE)] == ["gpu0", "gpu1"]
    assert devices.usable == {"gpu0", "gpu1", HOST}


async def test_another_backend_s_names_are_matched_with_cards_that_nvml_knows(nvml: FakeNvml) -> None:
    """A Vulkan engine lists a card that NVML knows and one that it does not: one account each."""
    nvml.show(CARD)
    devices = devices_of(listed("Vulkan0", 16), listed("Vulkan1", 24, description="NVIDIA Fake"))
    found = await read(devices)
    assert [(s.engine, s.ledger) for s in devices.seen_by(ENGINE)] == [
        ("Vulkan0", "Vulkan0"),
        ("Vulkan1", "gpu0"),
    ]
    assert set(found) == {"gpu0", "Vulkan0", HOST}


async def test_a_card_that_two_backends_of_an_engine_list_is_counted_once(nvml: FakeNvml) -> None:
    """CUDA and Vulkan in one build: the card is there once."""
    nvml.show(CARD)
    devices = devices_of(listed("CUDA0", 24), listed("Vulkan0", 24, description="NVIDIA Fake"))
    await read(devices)
    assert [s.engine for s in devices.seen_by(ENGINE)] == ["CUDA0"]


async def test_an_engine_without_devices_uses_the_host_and_one_that_lists_none_is_taken_for_cuda(
    nvml: FakeNvml,
) -> None:
    """A build for the processor sees none of NVML's GPUs; one that can't list sees them all."""
    nvml.show(CARD)
    deaf, silent = devices_of(), devices_of(say=False)
    await read(deaf)
    await read(silent)
    assert deaf.seen_by(ENGINE) == ()
    assert [s.engine for s in silent.seen_by(ENGINE)] == ["CUDA0"]


async def test_a_device_that_only_the_engine_tells_of_has_an_account_and_a_warning(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its free bytes are a reading only when it was listed afresh; then again after a while."""
    devices = devices_of(listed("ROCm0", 16, 12))
    found = await read(devices)
    assert (found["ROCm0"].total, found["ROCm0"].free, found["ROCm0"].margin) == (16 * GIB, 12 * GIB, GIB)
    assert not found["ROCm0"].frees_late
    assert "only the engine" in devices.devices["ROCm0"].problem
    assert (await devices.read({})).devices["ROCm0"].free is None
    monkeypatch.setattr(module, "LISTED_AGAIN_S", -1.0)
    assert (await devices.read({})).devices["ROCm0"].free == 12 * GIB


async def test_a_device_that_nobody_tells_of_can_be_given_a_size(nvml: FakeNvml) -> None:
    """Configure one that is in no list: it has that much, and is marked."""
    devices = devices_of(sizes="SYCL0=16384")
    found = await read(devices)
    assert (found["SYCL0"].total, found["SYCL0"].free) == (16 * GIB, 16 * GIB)
    assert "--device-memory" in devices.devices["SYCL0"].problem
    assert (await devices.read({})).devices["SYCL0"].free is None


async def test_a_device_of_unknown_size_is_warned_of_once(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    """A load books on a device that is in no account: one warning, however many loads follow."""
    devices = devices_of()
    await read(devices)
    for _ in range(2):
        devices.warn_of_unknown({"host": 1, "SYCL0": 1})
    assert [getattr(record, "device", "") for record in caplog.records] == ["SYCL0"]


async def test_c73_a_unified_device_has_no_account_beside_the_host_s(nvml: FakeNvml) -> None:
    """By the engine's word, by NVML's, by the operator's: it shares the host's memory, one pool."""
    for devices in (
        devices_of(listed("Vulkan0", 110, unified=True)),
        devices_of(listed("ROCm0", 2), sizes="ROCm0=host"),
    ):
        assert set(await read(devices)) == {HOST}
        assert [s.ledger for s in devices.seen_by(ENGINE)] == [HOST]
    nvml.show(FakeGpu(CARD.uuid, CARD.bus, 0, 0, result=UNSUPPORTED))
    chip = devices_of(listed("CUDA0", 110))
    assert set(await read(chip)) == {HOST}
    assert [s.ledger for s in chip.seen_by(ENGINE)] == [HOST]


async def test_c73_what_the_operator_says_of_a_device_wins(nvml: FakeNvml) -> None:
    """2 GiB by its own word, 110 by the operator's; and a card of which less may be used than there is."""
    nvml.show(CARD)
    devices = devices_of(
        listed("CUDA0", 24), listed("Vulkan0", 2, 1, unified=True), sizes="Vulkan0=112640,gpu0=10240"
    )
    found = await read(devices)
    assert (found["Vulkan0"].total, found["Vulkan0"].free) == (110 * GIB, 109 * GIB)
    assert (found["gpu0"].total, found["gpu0"].free) == (10 * GIB, 6 * GIB)


async def test_a_reading_for_which_there_are_no_files_leaves_the_one_before(nvml: FakeNvml) -> None:
    """Read all devices, and again without files: the same, with a word about the host, no room of 0 bytes."""
    nvml.show(CARD)
    devices = devices_of()
    running = {"h-1-1": Running("m", "", "", pid=os.getpid())}
    before = (await devices.read(running)).devices
    with no_more_files(os.getpid()):
        read = await devices.read(running)
    assert (read.devices, read.seen) == (before, {"h-1-1": {}})
    assert "ulimit -n" in devices.devices[HOST].problem
    after = await devices.read(running)
    assert after.seen["h-1-1"][HOST] > 0
    assert not devices.devices[HOST].problem
