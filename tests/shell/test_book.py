"""What the book says of models that may go to one of two GPUs, or are split over both."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml
from help_text import HELP
from model_kinds import write_kind
from tiny import tiny_model

from llamastead.shared.devices.device import MIB
from llamastead.shared.devices.listed import Listed
from llamastead.shared.figures import Figures, Parts
from llamastead.shared.gguf import tensor_sizes
from llamastead.shared.words import Source
from llamastead.supervisor.book import Book
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.core.state import ModelSpec
from llamastead.supervisor.devices import Devices
from llamastead.supervisor.engine import Engine
from llamastead.supervisor.registry.model import ModelEntry
from llamastead.supervisor.registry.options import parse_help

pytestmark = pytest.mark.asyncio

FIT = "-fit,  --fit [on|off]                   whether to adjust unset arguments to fit in device memory\n"
ENGINE = Engine(Path("/opt/llama-server"), "1", parse_help(HELP + FIT))
BIG = FakeGpu("GPU-bbbb", "00000000:41:00.0", 25 * GIB, 25 * GIB)
SMALL = FakeGpu("GPU-aaaa", "00000000:01:00.0", 13 * GIB, 13 * GIB)
OVERHEAD = 64 * MIB + 128 * MIB  # of the process, and its prompt cache


class Shelf:
    """A book of the models `m` and `n`, one file each, with options of their own; on two unequal GPUs."""

    def __init__(self, folder: Path) -> None:
        self.entries: dict[str, ModelEntry] = {}
        for name in "mn":
            tiny_model(folder / f"{name}.gguf", 1)
            path = folder / f"{name}.gguf"
            self.entries[name] = ModelEntry(
                name, Source.PRESET, {"model": str(path)}, path=path, files=(path,)
            )
        configuration = SimpleNamespace(
            registry=SimpleNamespace(entries=self.entries),
            environ={},
            cache_ram_mib=128,
            engine_of=lambda entry: ENGINE,
            options_in_force=lambda entry: dict(entry.options),
            cache_ram=lambda entry: 128,
            spec=lambda entry: ModelSpec(entry.name, "r"),
        )
        listed = tuple(Listed(f"CUDA{k}", "Fake", GIB, GIB) for k in range(2))
        self.devices = Devices({}, None, 5.0, {}, lambda engine: listed)
        self.book = Book(cast("Configuration", configuration), self.devices)

    async def open(self) -> Book:
        """Read the devices and reckon."""
        await self.devices.read({})
        self.refresh()
        return self.book

    def refresh(self) -> None:
        """Reckon all models as they are now."""
        self.book.refresh()
        self.book.take(self.book.reckon(list(self.book.stale)))

    def measured(self, gib: float, model: str = "m") -> None:
        """Let what is to be measured of a model be so big, all of it weights."""
        found = {"CUDA0": Parts(model=int(gib * GIB))}
        self.book.measured(self.book.known[model].key, found, found, 1)

    def spec(self, model: str = "m") -> ModelSpec:
        """Return what the scheduler is told."""
        return self.book.specs()[model]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Show the GPUs, the later one first."""
    nvml = FakeNvml(tmp_path / "gpus")
    nvml.install_functions(monkeypatch)
    nvml.show(BIG, SMALL)
    return Shelf(tmp_path)


def on_gpus(amounts: Mapping[str, int]) -> dict[str, int]:
    """Return whole GiB on GPUs."""
    return {name: size // GIB for name, size in amounts.items() if name != "host"}


async def test_a_measured_figure_is_the_same_for_each_place(shelf: Shelf) -> None:
    """10 GiB measured on the bigger one: so it is on each; the host's share is beside it."""
    book = await shelf.open()
    order = book.order("m")
    assert order["variables"]["CUDA_VISIBLE_DEVICES"] == "GPU-bbbb"
    shelf.measured(10)
    spec = shelf.spec()
    assert [(p.device, on_gpus(p.needs)) for p in spec.places] == [
        ("gpu0", {"gpu0": 10}),
        ("gpu1", {"gpu1": 10}),
    ]
    assert [p.needs["host"] for p in spec.places] == [OVERHEAD] * 2
    assert book.show("m")["places"] == ["gpu0", "gpu1"]
    assert set(book.show("m")["min"]) == {"gpu"}
    assert book.spot("m", "gpu1").variables == {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}


async def test_memory_max_limits_how_far_a_context_grows(shelf: Shelf) -> None:
    """4 GiB at the smallest context, 12 at the largest, memory-max 8: half of the growth and its context,
    with all the room there is; a limit below the smallest leaves that.
    """
    options = {**shelf.entries["m"].options, "fit-ctx": "512"}
    shelf.entries["m"] = ModelEntry(**{**shelf.entries["m"].__dict__, "options": options})
    book = await shelf.open()
    low, high = 512, 2048
    assert book.known["m"].contexts == (low, high)
    few, many = ({"CUDA0": Parts(model=GIB, context=size * GIB)} for size in (3, 11))
    book.measured(book.known["m"].key, few, many, 1)
    for limit, grown in ((None, 1.0), (8 * 1024, 0.5), (1024, 0.0)):
        shelf.entries["m"] = ModelEntry(**{**shelf.entries["m"].__dict__, "memory_max": limit})
        book.refresh()
        place = shelf.spec().places[1]
        assert place.needs["gpu1"] == 4 * GIB + 512 * MIB, "with what the driver takes"
        assert place.grows.get("gpu1", 0) == pytest.approx(grown * 8 * GIB, abs=GIB // 4)
        assert book.context("m", 1.0, "gpu1") == pytest.approx(low + grown * (high - low), abs=256)


async def test_what_is_measured_to_be_too_big_for_each_is_measured_split(shelf: Shelf) -> None:
    """30 GiB: in proportion to the sizes until it is measured over both, then as measured."""
    book = await shelf.open()
    whole = book.known["m"].key
    shelf.measured(30)
    assert book.is_open("m"), "it is to be measured once more"
    assert book.known["m"].key != whole
    assert book.order("m")["variables"]["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa,GPU-bbbb"
    spec = shelf.spec()
    assert (on_gpus(spec.needs), spec.measured) == ({"gpu0": 10, "gpu1": 20}, False)
    both: Figures = {"CUDA0": Parts(model=9 * GIB), "CUDA1": Parts(model=22 * GIB)}
    book.measured(book.known["m"].key, both, both, 2)
    spec = shelf.spec()
    assert (on_gpus(spec.needs), spec.measured) == ({"gpu0": 9, "gpu1": 22}, True)
    assert not book.is_open("m")
    assert set(book.show("m")["min"]) == {"gpu0", "gpu1"}


async def test_c66_what_a_load_took_corrects_the_figures_of_each_place(shelf: Shelf) -> None:
    """Measured 10, took 11 on one GPU: from then on 11 are reckoned with on either."""
    book = await shelf.open()
    shelf.measured(10)
    book.learn("m", {"CUDA0": Parts(model=11 * GIB)}, 2048, "gpu0")
    assert [on_gpus(p.needs) for p in shelf.spec().places] == [{"gpu0": 11}, {"gpu1": 11}]
    assert book.show("m")["correction"] == {"gpu": GIB}


async def test_adapters_are_reckoned_and_added_to_what_is_measured(shelf: Shelf, tmp_path: Path) -> None:
    """Name one adapter plainly and one with a scale: both lie where the model does, reckoned, measured, and
    split over both GPUs; a load that took so much more corrects nothing.
    """
    plain, scaled = tmp_path / "plain.gguf", tmp_path / "scaled.gguf"
    plain.write_bytes(b"x" * 5 * MIB)
    scaled.write_bytes(b"x" * 2 * MIB)
    before = shelf.entries["m"]
    book = await shelf.open()
    reckoned = shelf.spec().places[0].needs
    options = {**before.options, "lora": str(plain), "lora-scaled": f"{scaled}:0.5"}
    shelf.entries["m"] = ModelEntry(**{**before.__dict__, "options": options})
    shelf.refresh()
    assert shelf.spec().places[0].needs == {**reckoned, "gpu0": reckoned["gpu0"] + 7 * MIB}
    shelf.measured(10)
    assert shelf.spec().places[1].needs["gpu1"] == 10 * GIB + 512 * MIB + 7 * MIB
    book.learn("m", {"CUDA0": Parts(model=10 * GIB + 7 * MIB)}, 2048, "gpu1")
    assert book.show("m")["correction"] == {}
    shelf.measured(30)
    both: Figures = {"CUDA0": Parts(model=9 * GIB), "CUDA1": Parts(model=22 * GIB)}
    book.measured(book.known["m"].key, both, both, 2)
    assert sum(shelf.spec().needs[gpu] for gpu in ("gpu0", "gpu1")) == pytest.approx(
        32 * GIB + 7 * MIB, abs=1
    )


async def test_what_a_process_uses_beyond_what_its_engine_told_is_reckoned_with_from_then_on(
    shelf: Shelf,
) -> None:
    """Measured 10, and a process of it uses 700 MiB more than its engine told, later 300: 700 are reckoned on
    each GPU in place of the usual 512, shown, and not once more where a GPU shows it; less is never reckoned
    than the most that was seen.
    """
    book = await shelf.open()
    shelf.measured(10)
    found = {"CUDA0": Parts(model=10 * GIB)}
    told = book.told("m", found, "gpu1")
    assert told == {"gpu1": 10 * GIB}
    for used, news in ((10 * GIB, False), (10 * GIB + 700 * MIB, True), (10 * GIB + 300 * MIB, False)):
        key, beyond = book.beyond("m", "gpu1", told, {"gpu1": used, "host": GIB}) or (None, {})
        assert key == book.known["m"].key
        assert book.untold(key, beyond) is news
    for place in shelf.spec().places:
        assert place.needs[place.device] == 10 * GIB + 700 * MIB
    assert book.show("m")["untold"] == {"gpu": 700 * MIB}
    booked, _ = book.amounts("m", found, book.spot("m", "gpu1"), seen=True)
    assert booked["gpu1"] == 10 * GIB, "what it uses beyond is seen"


async def test_a_load_that_ran_out_is_reckoned_with_until_one_succeeds(shelf: Shelf) -> None:
    """Wanted 12 of 10: no less anywhere; after a load that took 9 that counts."""
    book = await shelf.open()
    shelf.measured(10)
    book.ran_out("m", {"CUDA0": 12 * GIB}, "gpu1")
    assert [on_gpus(p.needs) for p in shelf.spec().places] == [{"gpu0": 12}, {"gpu1": 12}]
    book.learn("m", {"CUDA0": Parts(model=9 * GIB)}, 2048, "gpu1")
    assert [on_gpus(p.needs) for p in shelf.spec().places] == [{"gpu0": 9}, {"gpu1": 9}]


@pytest.mark.parametrize(
    "options", [{"cache-type-k": "q8_0"}, {"spec-type": "draft-mtp"}, {"model-draft": "/d.gguf"}]
)
async def test_c64_c67_other_options_of_draft_or_cache_want_a_measurement_of_their_own(
    shelf: Shelf, options: dict[str, str], tmp_path: Path
) -> None:
    """Change the option: what was measured before is not taken for it, and is when it is changed back."""
    if "model-draft" in options:
        tiny_model(tmp_path / "d.gguf", 2)
        options = {"model-draft": str(tmp_path / "d.gguf")}
    book = await shelf.open()
    shelf.measured(10)
    before = shelf.entries["m"]
    fields: dict[str, Any] = {**before.__dict__, "options": {**before.options, **options}}
    shelf.entries["m"] = ModelEntry(**fields)
    shelf.refresh()
    assert book.known["m"].source != "measured"
    shelf.entries["m"] = before
    shelf.refresh()
    assert book.known["m"].source == "measured"


async def test_a_measurement_has_the_devices_and_libraries_of_an_instance_and_no_secret(shelf: Shelf) -> None:
    """Give the preset and the supervisor variables: those of libraries, devices and options are ordered, the
    preset's before the supervisor's; a token and what is none of the engine's are not.
    """
    ours = {"ZES_ENABLE_SYSMAN": "1", "LD_LIBRARY_PATH": "/ours", "AWS_SECRET": "x", "LLAMA_ARG_THREADS": "2"}
    env = {
        "LD_LIBRARY_PATH": "/opt/rocm",
        "ONEAPI_DEVICE_SELECTOR": "level_zero:1",
        "HF_TOKEN": "x",
        "A": "1",
    }
    shelf.entries["m"] = ModelEntry(**{**shelf.entries["m"].__dict__, "env": env})
    shelf.book.configuration.environ = ours
    book = await shelf.open()
    variables = dict(book.order("m")["variables"])
    assert variables.pop("CUDA_VISIBLE_DEVICES") == "GPU-bbbb"
    assert variables == {
        "GGML_NO_BACKTRACE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "LLAMA_ARG_THREADS": "2",
        "ZES_ENABLE_SYSMAN": "1",
        "ONEAPI_DEVICE_SELECTOR": "level_zero:1",
        "LD_LIBRARY_PATH": "/opt/rocm",
    }


async def test_a_device_that_the_preset_names_is_all_there_is_to_it(shelf: Shelf) -> None:
    """device = gpu1: one place, no choice; device = gpu7: a problem that a start will tell."""
    fields: dict[str, Any] = shelf.entries["m"].__dict__
    shelf.entries["m"] = ModelEntry(**{**fields, "options": {**fields["options"], "device": "gpu1"}})
    shelf.entries["n"] = ModelEntry(**{**shelf.entries["n"].__dict__, "options": {"device": "gpu7"}})
    book = await shelf.open()
    shelf.measured(10)
    spec = shelf.spec()
    assert (spec.places, on_gpus(spec.needs), spec.measured) == ((), {"gpu1": 10}, True)
    assert "device = gpu7: there is no such device" in book.problem("n")
    assert book.problem("m") == ""


async def test_c69_a_projector_and_a_split_are_booked_where_they_were_measured(shelf: Shelf) -> None:
    """tensor-split and main-gpu: nothing is chosen, and each GPU is booked with its own part."""
    fields: dict[str, Any] = shelf.entries["m"].__dict__
    said = {"tensor-split": "3,1", "main-gpu": "1"}
    shelf.entries["m"] = ModelEntry(**{**fields, "options": {**fields["options"], **said}})
    book = await shelf.open()
    both: Figures = {"CUDA0": Parts(model=9 * GIB), "CUDA1": Parts(model=3 * GIB, projector=2 * GIB)}
    book.measured(book.known["m"].key, both, both, 1)
    assert (shelf.spec().places, on_gpus(shelf.spec().needs)) == ((), {"gpu0": 9, "gpu1": 5})


async def test_figures_of_a_model_that_just_went_are_taken_all_the_same(shelf: Shelf) -> None:
    """Take a model out of the registry: results that are still under way for it are no mistake, and once the
    book is reckoned anew it is gone from there, too.
    """
    book = await shelf.open()
    key = book.known["m"].key
    del shelf.entries["m"]
    shelf.measured(10)
    book.learn("m", {"CUDA0": Parts(model=11 * GIB)}, 2048, "gpu0")
    book.ran_out("m", {"CUDA0": 12 * GIB}, "gpu0")
    book.fail(key, "why")
    assert book.peaked(key, {"gpu0": 12 * GIB})
    assert (list(book.specs()), list(book.shown_memory(shelf.entries))) == (["n"], ["n"])
    assert not book.is_open("m")
    assert book.show("m")["source"] == "measured"
    book.refresh()
    assert book.show("m") == {}


async def test_what_is_refreshed_while_it_is_reckoned_is_reckoned_again(shelf: Shelf) -> None:
    """Begin to reckon a model, then have all reckoned anew: the older figures serve, and it stays stale."""
    book = await shelf.open()
    book.refresh(["m"])
    begun = book.reckon(["m"])
    book.refresh()
    book.take(begun)
    assert list(book.stale) == ["m", "n"]
    book.take(book.reckon(["m", "n"]))
    assert not book.stale


async def test_c78_experts_kept_on_the_host_are_booked_there_before_anything_is_measured(
    shelf: Shelf, tmp_path: Path
) -> None:
    """Reckon a model of experts with and without n-cpu-moe: their bytes are the host's and no GPU's, shown
    apart as file pages; with mmap off they are not.
    """
    path = write_kind(tmp_path / "m.gguf", "experts")
    experts = sum(size for name, size in tensor_sizes(path).items() if "_exps" in name)
    before = shelf.entries["m"]
    await shelf.open()
    (usual, *_) = shelf.spec().places
    for more, mapped in (({}, experts), ({"mmap": "false"}, 0)):
        options = {**before.options, "n-cpu-moe": "99", **more}
        shelf.entries["m"] = ModelEntry(**{**before.__dict__, "options": options})
        shelf.refresh()
        (kept, *_) = shelf.spec().places
        assert usual.needs["gpu0"] - kept.needs["gpu0"] == experts
        assert kept.needs["host"] - usual.needs["host"] == experts
        assert shelf.book.show("m")["min"]["host"].get("mapped", 0) == mapped
