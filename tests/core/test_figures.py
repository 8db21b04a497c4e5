"""What engine lines say of memory, and what is made of it."""

import pytest

from llamastead.shared.devices.device import HOST
from llamastead.shared.estimate import read_use
from llamastead.shared.figures import (
    MIB,
    Breakdown,
    Effective,
    Parts,
    between,
    from_json,
    place,
    to_json,
    totals,
    with_contexts,
    with_host_needs,
)

TABLE = "common_memory_breakdown_print: | memory breakdown [MiB] | total   free    self   model   context |"
MAIN = "common_params_fit_impl: getting device memory data for initial parameters:"
# What engines print, put on more lines than they do.
ON_GPU = f"""\
0.01.100.000 I {MAIN}
0.01.200.000 I {TABLE}
0.01.200.001 I common_memory_breakdown_print: |   - CUDA0 (RTX 4090)   | 24077 =  945 \
+ (19187 = 17904 +     384 +     898) +        3945 |
0.01.200.002 I common_memory_breakdown_print: |   - Host               |                  309 \
=   235 +      49 +      24                |
0.01.200.003 I common_memory_breakdown_print: |   - CPU_REPACK         |                   12 \
=    12 +       0 +       0                |
"""
LATER = ON_GPU.replace("17904", "1")
FITTED = "0.01.300.000 I common_fit_params: fitting params to free memory took 0.00 seconds"
LOAD = """\
0.01.309.009 I srv    load_model: loading model '/m.gguf'
0.01.400.000 I load_tensors:   CPU_Mapped model buffer size =   235.00 MiB
0.01.400.001 I load_tensors:        CUDA0 model buffer size =  1000.50 MiB
0.01.400.002 I llama_context:  CUDA_Host  output buffer size =     4.00 MiB
0.01.400.003 I llama_kv_cache:      CUDA0 KV buffer size =    12.00 MiB
0.01.400.004 I llama_kv_cache:      CUDA0 KV buffer size =    37.50 MiB
0.01.400.005 I llama_memory_recurrent:  CUDA0 RS buffer size =     3.00 MiB
0.01.400.006 I sched_reserve:      CUDA0 compute buffer size =    99.00 MiB
0.01.400.007 I sched_reserve:      CUDA0 compute buffer size =    24.00 MiB
"""


def read(text: str) -> Breakdown:
    """Let a breakdown take lines."""
    breakdown = Breakdown()
    for line in text.splitlines():
        breakdown.take(line)
    return breakdown


def loaded(text: str) -> Effective:
    """Let what a load tells be summed."""
    effective = Effective()
    for line in text.splitlines():
        effective.take(line)
    return effective


def test_a_table_is_read_by_device_and_each_part_is_rounded_up() -> None:
    """Read a table with a GPU, the host and a buffer type of the host's: two devices, a MiB more per part."""
    breakdown = read(ON_GPU + LATER + FITTED)
    assert breakdown.over
    assert breakdown.figures == {
        "CUDA0": Parts(model=17905 * MIB, context=385 * MIB, compute=899 * MIB),
        HOST: Parts(model=(236 + 13) * MIB, context=(50 + 1) * MIB, compute=(25 + 1) * MIB),
    }


def test_c63_the_projector_s_own_line_is_added() -> None:
    """Print the line of a projector beside the table: it counts on the first GPU."""
    line = "[mtmd] estimated worst-case memory usage of mmproj is 14.50 MiB\n"
    found = read(line + ON_GPU + FITTED).figures
    assert found
    assert found["CUDA0"].projector == round(14.5 * MIB)
    alone = read(line + "\n".join([MAIN, TABLE, *ON_GPU.splitlines()[3:]])).figures
    assert alone
    assert alone[HOST].projector == round(14.5 * MIB)


def test_c64_a_draft_s_table_is_added_wherever_it_stands() -> None:
    """Print a draft's table before the model's, or after it as an extra model's: both count apart."""
    small = (
        "\n".join(ON_GPU.splitlines()[1:3]).replace("17904", "100").replace("384", "10").replace("898", "5")
    )
    before = read(f"{small}\n{ON_GPU}{FITTED}").figures
    extra = "getting device memory data for the extra model"
    after = read(f"{ON_GPU}{extra}\n{small}\n{FITTED}").figures
    assert before == after
    assert before
    assert before["CUDA0"].draft == (101 + 11 + 6) * MIB
    assert before["CUDA0"].model == 17905 * MIB


def test_no_table_is_no_figure() -> None:
    """Read a log without a table, and one with only a draft's: nothing is known."""
    assert read(FITTED).figures is None
    assert read(ON_GPU.replace(MAIN, "")).figures is None


def test_buffers_of_a_load_are_summed_and_the_last_reserve_counts() -> None:
    """Take the lines of a load: caches add up, a second reserve replaces the first, file pages are apart."""
    found = loaded(LOAD).figures
    assert found == {
        "CUDA0": Parts(model=round(1000.5 * MIB), context=round(52.5 * MIB), compute=24 * MIB),
        HOST: Parts(model=235 * MIB, mapped=235 * MIB, compute=4 * MIB),
    }
    assert loaded(LOAD + LOAD).figures == found, "a wake begins anew"
    draft = LOAD + "0.02.000.000 I common_speculative_init_result: loading draft model '/d.gguf'\n"
    told = loaded(draft + "0.02.000.001 I load_tensors:   CUDA0 model buffer size = 10.00 MiB\n").figures
    assert told
    assert told["CUDA0"].draft == 10 * MIB


def test_an_adapter_of_a_load_counts_as_weights_that_no_file_page_holds() -> None:
    """Load a LoRA adapter beside the model: its bytes are the model's, on the device and on the host."""
    lines = "".join(
        f"0.01.400.00{k} I llama_adapter_lora_init_impl: {name} LoRA buffer size = 16.00 MiB\n"
        for k, name in enumerate(("     CUDA0", "       CPU"))
    )
    alone, found = loaded(LOAD).figures, loaded(LOAD + lines).figures
    assert alone
    assert found
    for name in ("CUDA0", HOST):
        assert found[name] == alone[name] + Parts(model=16 * MIB)


def test_a_load_whose_beginning_nobody_heard_tells_nothing() -> None:
    """Take the lines of a load from its middle on, as a supervisor that took over in it: no figures, for they
    would be too small; the next load tells all of it.
    """
    late = "".join(LOAD.splitlines(keepends=True)[3:])
    assert "KV buffer" in late
    assert loaded(late).figures is None
    assert loaded(late + LOAD).figures == loaded(LOAD).figures


REFUSALS = {
    "alloc_tensor_range: failed to allocate CUDA0 buffer of size 9663676416": ("CUDA0", 9 << 30),
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 512.00 MiB on device 1: cudaMalloc "
    "failed: out of memory": ("CUDA1", 512 * MIB),
    "ggml_aligned_malloc: insufficient memory (attempted to allocate 976.56 MB)": (HOST, round(976.56 * MIB)),
}


@pytest.mark.parametrize("line", REFUSALS)
def test_c66_a_load_that_ran_out_says_what_it_wanted(line: str) -> None:
    """Let a piece be refused: wanted is that piece and what was had before on that device."""
    device, size = REFUSALS[line]
    ran = loaded(f"{LOAD}0.03.000.000 E {line}\n")
    assert ran.wanted == {device: size + totals(ran.figures or {}).get(device, 0)}
    assert loaded(LOAD).wanted == {}


def test_c63_a_loaded_projector_counts_whether_or_not_its_worst_case_was_told() -> None:
    """Load a projector with fitting off: its weights and buffers count; with it on the larger word does."""
    told = LOAD + (
        "0.01.500.000 I load_hparams: model size:         7.25 MiB\n"
        "0.01.500.001 I reserve_compute_meta:      CUDA0 compute buffer size =     0.50 MiB\n"
        "0.01.500.002 I reserve_compute_meta:      CUDA0 compute buffer size =     0.75 MiB\n"
    )
    for text, mib in ((told, 8), ("[mtmd] estimated worst-case memory usage of mmproj is 14.00 MiB\n", 14)):
        found = loaded(text if text is told else told + text).figures
        assert found
        assert found["CUDA0"].projector == mib * MIB
        assert found["CUDA0"].compute == 24 * MIB


def test_buffers_are_placed() -> None:
    """Name buffers as engines do: those of the host are the host's, whoever pins them."""
    names = {"CPU": HOST, "CPU_Mapped": HOST, "CUDA_Host": HOST, "Host": HOST, "CPU_REPACK": HOST}
    names |= {"CUDA0": "CUDA0", "Vulkan1": "Vulkan1", "ROCm0": "ROCm0", "CUDA1_Split": "CUDA1"}
    assert {name: place(name) for name in names} == names


def test_figures_travel_as_json_and_lie_between_two_contexts() -> None:
    """Write and read figures; take a third of the way from one context to the other."""
    low, high = {"CUDA0": Parts(model=9, context=3)}, {"CUDA0": Parts(model=9, context=33, compute=30)}
    assert from_json(to_json(high)) == high
    assert between(low, high, 1 / 3) == {"CUDA0": Parts(model=9, context=13, compute=10)}


def test_what_the_driver_takes_is_reckoned_on_each_gpu_that_is_used() -> None:
    """One GPU used, one seen and not used, the host: only the used one's driver takes its part."""
    found = {"CUDA0": Parts(model=1), "CUDA1": Parts(), HOST: Parts(model=1)}
    assert totals(with_contexts(found, {})) == {"CUDA0": 1 + 512 * MIB, HOST: 1}
    assert totals(with_contexts({"Vulkan0": Parts(model=1)}, {})) == {"Vulkan0": 1 + 128 * MIB}
    assert totals(with_contexts(found, {"CUDA0": 0, "CUDA1": 7})) == {"CUDA0": 1, HOST: 1}
    assert totals(with_contexts(found, {"CUDA0": 700 * MIB})) == {"CUDA0": 1 + 700 * MIB, HOST: 1}


def test_c70_the_prompt_cache_is_booked_at_its_cap() -> None:
    """Add what the process and its prompt cache may take: the host's share grows by both."""
    assert totals(with_host_needs({"CUDA0": Parts(model=1)}, 100 * MIB)) == {"CUDA0": 1, HOST: 164 * MIB}


@pytest.mark.parametrize(
    ("name", "value", "mapped"),
    [
        *(("load-mode", value, True) for value in ("auto", "mmap", "mmap+mlock")),
        *(("load-mode", value, False) for value in ("none", "dio", "mlock")),
        *(("mmap", "false", False), ("mlock", "true", True)),
    ],
)
def test_how_a_file_is_read_says_whether_its_pages_can_be_dropped(
    name: str, value: str, mapped: bool
) -> None:
    """Read the weights in each way that an engine knows: mapped, locked, or copied."""
    assert read_use({name: value}).mapped is mapped
