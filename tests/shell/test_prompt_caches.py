"""Prompt caches on the host: what an instance may take is what is booked for it."""

from pathlib import Path

import pytest
from tiny import tiny_model

from llamastead.shared.addresses import UnixAddress
from llamastead.shared.devices.device import HOST, MIB, Device
from llamastead.shared.settings import Settings
from llamastead.supervisor import configuration as module
from llamastead.supervisor.book import Book
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.devices import Devices
from llamastead.supervisor.launch import instance_options

GIB = 1 << 30


@pytest.mark.parametrize(("host_gib", "cache_mib"), [(1, 128), (16, 512), (256, 1024)])
async def test_c70_each_instance_s_cache_is_limited_and_booked_at_its_limit(
    host_gib: int, cache_mib: int, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three models on a host of so much: one says nothing, one names its limit, one has none. Each is started
    with the limit that is booked for it; an unlimited one is booked with the engine's own.
    """
    monkeypatch.setattr(module, "read_host", lambda: Device(HOST, host_gib * GIB, host_gib * GIB))
    (tmp_path / "models").mkdir()
    for name in ("plain", "named", "endless"):
        tiny_model(tmp_path / "models" / f"{name}.gguf", 1)
    preset = tmp_path / "m.ini"
    preset.write_text("[named]\ncache-ram = 64\n[endless]\ncache-ram = -1\n")
    settings = Settings(
        run_dir=tmp_path / "run", models_dir=tmp_path / "models", models_preset=preset, engine=stub
    )
    made = Configuration(settings)
    devices = Devices({}, None, 5.0, {}, lambda _: ())
    await devices.read({})
    book = Book(made, devices)
    book.refresh()
    book.take(book.reckon(list(book.stale)))
    least = {name: spec.needs["host"] for name, spec in book.specs().items()}
    for name, limit, booked in (("plain", cache_mib, cache_mib), ("named", 64, 64), ("endless", -1, 8192)):
        entry = made.registry.entries[name]
        options = instance_options(entry, made.engine.options, UnixAddress("/e.sock"), {}, made.cache_ram_mib)
        assert options["cache-ram"] == str(limit)
        assert least[name] - least["named"] == (booked - 64) * MIB
