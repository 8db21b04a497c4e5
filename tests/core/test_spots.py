"""How a model is kept to a device: what an engine is shown, and by which names it then speaks."""

import pytest
from help_text import TABLE

from llamastead.shared.devices.listed import parse_listing
from llamastead.supervisor.placement import PlacementError, Seen, Spots, find_spots

CUDA = (Seen("CUDA0", "gpu0", "GPU-aaaa"), Seen("CUDA1", "gpu1", "GPU-bbbb"))
ROCM = (Seen("ROCm0", "ROCm0"), Seen("ROCm1", "ROCm1"))
VULKAN = (Seen("Vulkan0", "gpu0", "GPU-aaaa"), Seen("Vulkan1", "Vulkan1"))


def spots(seen: tuple[Seen, ...], env: dict[str, str] | None = None, **options: str) -> Spots:
    """Return where a model with these options may lie."""
    said = {name.replace("_", "-"): value for name, value in options.items()}
    return find_spots(said, env or {}, seen, TABLE, {})


def test_c76_a_cuda_engine_is_shown_one_gpu_by_its_uuid() -> None:
    """Two GPUs: two places, each with the one GPU visible, which the engine then calls CUDA0."""
    found = spots(CUDA)
    assert [spot.place for spot in found.whole] == ["gpu0", "gpu1"]
    second = found.of("gpu1")
    assert second.variables == {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}
    assert second.names == {"CUDA0": "gpu1"}
    assert found.other.variables == {"CUDA_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb"}
    assert found.lies_on == ("gpu0", "gpu1")


def test_rocm_counts_within_what_the_supervisor_sees_and_others_are_named() -> None:
    """HIP counts devices; Vulkan and the rest are given the engine's own name."""
    found = find_spots({}, {}, ROCM, TABLE, {"HIP_VISIBLE_DEVICES": "3,5"})
    assert found.of("ROCm1").variables == {"HIP_VISIBLE_DEVICES": "5"}
    assert found.of("ROCm1").names == {"ROCm0": "ROCm1"}
    assert spots(VULKAN).of("Vulkan1").placed({"ctx-size": "1"})["device"] == "Vulkan1"


@pytest.mark.parametrize("name", ["gpu1", "CUDA1", "GPU-b"])
def test_a_preset_names_a_device_as_it_likes(name: str) -> None:
    """Our name, the engine's, the beginning of a UUID: the same device, and no choice is left."""
    found = spots(CUDA, device=name)
    assert (found.whole, found.lies_on) == ((), ("gpu1",))
    assert found.other.placed({"device": name, "main-gpu": "0"}) == {"main-gpu": "0"}
    assert found.other.variables == {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}


def test_a_preset_that_names_no_device_of_ours_says_which_there_are() -> None:
    """Name a third GPU."""
    with pytest.raises(PlacementError, match=r"device = gpu2: there is no .* gpu0 \(CUDA0\), gpu1 \(CUDA1\)"):
        spots(CUDA, device="gpu2")


@pytest.mark.parametrize("said", ["n_gpu_layers", "device"])
def test_a_model_kept_off_gpus_lies_on_the_host(said: str) -> None:
    """No layers, or no device: there is nothing to choose."""
    found = spots(CUDA, **{said: "0" if said == "n_gpu_layers" else "none"})
    assert (found.whole, found.lies_on, dict(found.other.variables)) == ((), ("host",), {})


def test_c69_who_says_how_a_model_lies_is_obeyed() -> None:
    """tensor-split and main-gpu: nothing is chosen, and CUDA's numbers are made to be the ledger's."""
    found = spots(CUDA, main_gpu="1", tensor_split="3,1")
    assert (found.whole, found.lies_on) == ((), ("gpu0", "gpu1"))
    assert found.other.names == {"CUDA0": "gpu0", "CUDA1": "gpu1"}
    assert spots(CUDA, main_gpu="1", split_mode="none").lies_on == ("gpu1",)


def test_a_model_that_is_not_to_be_split_still_goes_where_there_is_room() -> None:
    """split-mode none: one GPU or the other, and what is too big for each goes to the first."""
    found = spots(CUDA, split_mode="none")
    assert [spot.place for spot in found.whole] == ["gpu0", "gpu1"]
    assert found.lies_on == ("gpu0",)
    assert spots(CUDA, split_mode="row").whole == ()


def test_a_model_s_own_variables_win() -> None:
    """env says which devices are visible, in what order: names follow, nothing is set over it."""
    found = spots(CUDA, env={"CUDA_VISIBLE_DEVICES": "1,0"})
    assert found.other.names == {"CUDA0": "gpu1", "CUDA1": "gpu0"}
    assert (found.whole, dict(found.other.variables)) == ((), {})


def test_numbers_of_a_model_s_own_variables_count_gpus_that_the_supervisor_is_not_shown() -> None:
    """The supervisor is shown gpu1 and gpu2 of three: 2 is gpu2; what follows a hidden one is not there."""
    seen = (Seen("CUDA0", "gpu1", "GPU-bbbb"), Seen("CUDA1", "gpu2", "GPU-cccc"))
    wanted = {"2,1": ["gpu2", "gpu1"], "1": ["gpu1"], "1,0,2": ["gpu1"], "GPU-c": ["gpu2"]}
    for value, names in wanted.items():
        found = spots(seen, env={"CUDA_VISIBLE_DEVICES": value})
        assert list(found.other.names.values()) == names
    assert spots(seen, env={"CUDA_VISIBLE_DEVICES": "0"}).lies_on == ("host",)


def test_parts_of_a_gpu_are_places_but_never_split_over() -> None:
    """MIG: each part is a place; what fits none goes to one all the same."""
    parts = tuple(Seen(f"CUDA{k}", f"gpu0.{k}", f"MIG-{k}", alone=True) for k in range(2))
    found = spots(parts)
    assert [spot.place for spot in found.whole] == ["gpu0.0", "gpu0.1"]
    assert found.other.variables == {"CUDA_VISIBLE_DEVICES": "MIG-0"}


def test_a_device_that_shares_the_host_s_memory_is_used_only_where_it_is_the_only_one() -> None:
    """An integrated GPU beside a card is left out; alone it is where models lie, on the host's account."""
    shared = Seen("Vulkan1", "host")
    assert spots((VULKAN[0], shared)).lies_on == ("gpu0",)
    assert spots((shared,)).lies_on == ("host",)


def test_a_listing_is_read_with_what_it_says_of_memory() -> None:
    """Read a list with a log before it: names, sizes, and what shares the host's memory."""
    text = (
        "ggml_vulkan: 0 = Big Card (big) | uma: 0 | fp16: 1\n"
        "ggml_vulkan: 1 = Radeon (radv) (x) | uma: 1 | fp16: 1\n"
        "Available devices:\n"
        "  Vulkan0: Big Card (24564 MiB, 23000 MiB free)\n"
        "  Vulkan1: Radeon (radv) (112640 MiB, 110000 MiB free)\n"
        "  BLAS0: none (0 MiB, 0 MiB free)\n"
    )
    first, second = parse_listing(text) or ()
    assert (first.name, first.description, first.total >> 20, first.unified) == (
        *("Vulkan0", "Big Card", 24564),
        False,
    )
    assert (second.free >> 20, second.unified) == (110000, True)
    assert parse_listing("error: what?") is None
    assert parse_listing("Available devices:\n") == ()
