"""What loads show of memory, on its way into the book."""

from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from llamastead.shared.devices.device import HOST, MIB
from llamastead.supervisor.learning import Learning
from llamastead.supervisor.running import Running

TOLD = (
    "srv    load_model: loading model '/m.gguf'",
    "load_tensors:   CPU_Mapped model buffer size =   900.00 MiB",
    "llama_kv_cache:        CPU KV buffer size =   100.00 MiB",
)
REFUSED = "ggml_aligned_malloc: insufficient memory (attempted to allocate 500.00 MB)"


@pytest.mark.parametrize(("lines", "mib"), [(TOLD, 1000), ((*TOLD, REFUSED), 1500), ((), 0)])
async def test_a_load_that_ran_out_wants_what_it_had_told_of_at_least(
    lines: tuple[str, ...], mib: int
) -> None:
    """The kernel kills a load amid it, or a piece is refused to it: the next one is reckoned with what it had
    and that piece; one that had said nothing teaches nothing.
    """
    noted: list[tuple[str, Mapping[str, int], str]] = []
    shown: list[str] = []

    async def put_model(model: str, *_: Any) -> None:
        shown.append(model)

    tasks: list[Coroutine[Any, Any, None]] = []
    note = Running("m", "", "nonce", "gpu0")
    for line in lines:
        note.effective.take(line)
    book: Any = SimpleNamespace(
        ran_out=lambda *words: noted.append(words), specs=dict, show=lambda _: {"source": "estimate"}
    )
    devices: Any = SimpleNamespace(look=lambda: None)
    store: Any = SimpleNamespace(put_model=put_model)
    unused: Any = None
    learning = Learning(book, devices, unused, unused, store, {"i": note}, lambda event: None, tasks.append)
    learning.on_ran_out("i")
    for task in tasks:
        await task
    assert noted == ([("m", {HOST: mib * MIB}, "gpu0")] if mib else [])
    assert shown == ["m"] * bool(mib)
