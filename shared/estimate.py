"""What a model takes, reckoned from its GGUF header: instant, and less exact than a measurement.

The formula follows llama.cpp's own allocations: weights, one cache per layer, recurrent states, and the
compute buffers of one micro-batch. It is made for a model that lies on one device whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamastead.shared.figures import MIB, Parts
from llamastead.shared.gguf import GgufError, read_values, shard_files

FIT_CONTEXT = 4096
"""The smallest context that the engine's --fit chooses by default."""
# Bytes of 32 values in a cache of this type.
_BLOCK = {
    "f32": 128,
    "f16": 64,
    "bf16": 64,
    "q8_0": 34,
    "q5_1": 24,
    "q5_0": 22,
    "q4_1": 20,
    "q4_0": 18,
    "iq4_nl": 18,
}
# One in so many layers attends to everything, where the file does not say so itself.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2}
# Architectures whose figures were compared with real loads.
_KNOWN = frozenset({"llama", "qwen2", "qwen3", "gemma3", "mamba"})
# On top of what is not known better: a file of unknown kind, its caches and buffers.
_ALLOWANCE, _ALLOWANCE_MIB = 1.2, 512


@dataclass(frozen=True)
class Use:
    """The options that matter, as an instance gets them. `context` 0 means the model's own."""

    context: int = 0
    sequences: int = 4
    unified: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    batch: int = 512
    flash: bool = True
    full_swa: bool = False
    mapped: bool = True


@dataclass(frozen=True)
class Estimate:
    """Parts at the context asked for; `context` is that context as the engine would round it, None when
    nothing but the size of the file is known. `source` says how far to trust it: `estimate` for architectures
    that were compared with real loads, `rough` for others, `file size` where the header tells nothing.
    """

    parts: Parts
    context: int | None
    source: str


def read_use(options: Mapping[str, str]) -> Use:
    """Return what an instance's options say; a value that the engine would refuse counts as unsaid."""
    sequences = _number(options, "parallel", -1)
    flag = {"1", "true", "on", "enabled"}
    return Use(
        context=max(0, _number(options, "ctx-size", 0)),
        sequences=sequences if sequences > 0 else 4,
        unified=options.get("kv-unified", "1" if sequences <= 0 else "0") in flag,
        type_k=options.get("cache-type-k", "f16"),
        type_v=options.get("cache-type-v", "f16"),
        batch=_number(options, "ubatch-size", 512),
        flash=options.get("flash-attn", "auto") not in {"off", "0", "false"},
        full_swa=options.get("swa-full", "0") in flag,
        mapped=options.get("mmap", "1") in flag and options.get("load-mode", "auto") not in {"none", "dio"},
    )


def training_context(path: Path) -> int | None:
    """Return the context a model was trained for, None where its header does not tell."""
    try:
        shape = _Shape(read_values(path))
    except (GgufError, KeyError):
        return None
    return shape.get("context_length") or None


def estimate(path: Path, use: Use) -> Estimate:
    """Return what the model at `path` (its first shard) takes. Raises OSError when its files aren't there."""
    size = sum(file.stat().st_size for file in shard_files(path))
    try:
        shape = _Shape(read_values(path))
    except (GgufError, KeyError):
        return Estimate(_by_size(size, use), None, "file size")
    context = use.context or shape.get("context_length") or FIT_CONTEXT
    if shape.layers <= 0 or shape.embedding <= 0:
        return Estimate(_by_size(size, use), None, "file size")
    cells = _cells(context, use)
    parts = Parts(
        model=size,
        mapped=size if use.mapped else 0,
        context=_caches(shape, cells, use) + _recurrent(shape, use),
        compute=_compute(shape, cells, use),
    )
    source = "estimate" if shape.architecture in _KNOWN else "rough"
    return Estimate(parts, context, source)


def projector_parts(path: Path) -> Parts:
    """Return what a projector takes: its weights and about as much again to work on an image."""
    return Parts(projector=2 * path.stat().st_size + 64 * MIB)


class _Shape:
    """The numbers of a header that count. Raises KeyError when it names no architecture."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.architecture = str(values["general.architecture"])
        self.layers = self.get("block_count")
        self.embedding = self.get("embedding_length")
        self.heads = self.get("attention.head_count")

    def get(self, name: str, default: int = 0) -> int:
        """Return a number; the largest one if it is given by layer."""
        value = self._values.get(f"{self.architecture}.{name}", default)
        numbers = value if isinstance(value, tuple) else (value,)
        return max((int(number) for number in numbers if isinstance(number, int)), default=default)

    def by_layer(self, name: str, default: int) -> list[int]:
        """Return a number for each layer."""
        value = self._values.get(f"{self.architecture}.{name}", default)
        if isinstance(value, tuple):
            return [int(v) for v in value[: self.layers]] + [default] * (self.layers - len(value))
        return [int(value)] * self.layers

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer attends to a sliding window only."""
        if not self.get("attention.sliding_window"):
            return False
        pattern = self._values.get(f"{self.architecture}.attention.sliding_window_pattern")
        if isinstance(pattern, tuple):
            return bool(pattern[layer]) if layer < len(pattern) else False
        every = pattern if isinstance(pattern, int) else _FULL_EVERY.get(self.architecture, 1)
        return every > 1 and (layer + 1) % every != 0


def _by_size(size: int, use: Use) -> Parts:
    more = round(size * (_ALLOWANCE - 1)) + _ALLOWANCE_MIB * MIB
    return Parts(model=size, mapped=size if use.mapped else 0, compute=more)


def _cells(context: int, use: Use) -> int:
    if use.unified:
        return _padded(context)
    return _padded(-(-context // use.sequences)) * use.sequences


def _caches(shape: _Shape, cells: int, use: Use) -> int:
    heads = shape.by_layer("attention.head_count_kv", shape.heads)
    width = shape.embedding // shape.heads if shape.heads else 0
    latent = shape.get("attention.kv_lora_rank")
    if latent:
        # One latent vector for all heads; what is read from it as V is not kept a second time.
        per_cell = [_row(latent + shape.get("rope.dimension_count"), use.type_k)] * shape.layers
    else:
        keys = shape.get("attention.key_length", width)
        values = shape.get("attention.value_length", width)
        per_cell = [_row(n * keys, use.type_k) + _row(n * values, use.type_v) for n in heads]
    return sum(
        size * (_window(shape, cells, use) if shape.is_windowed(layer) else cells)
        for layer, size in enumerate(per_cell)
    )


def _window(shape: _Shape, cells: int, use: Use) -> int:
    """Return the cells of a layer that attends to a window: that of each sequence and one micro-batch."""
    if use.full_swa:
        return cells
    per_stream = cells if use.unified else cells // use.sequences
    together = use.sequences if use.unified else 1
    window = _padded(shape.get("attention.sliding_window") * together + use.batch)
    return min(per_stream, window) * (1 if use.unified else use.sequences)


def _recurrent(shape: _Shape, use: Use) -> int:
    inner, state = shape.get("ssm.inner_size"), shape.get("ssm.state_size")
    if not inner:
        return 0
    groups, kernel = shape.get("ssm.group_count"), shape.get("ssm.conv_kernel")
    recurrent = sum(1 for n in shape.by_layer("attention.head_count_kv", 0) if n == 0)
    per_layer = (kernel - 1) * (inner + 2 * groups * state) + state * inner
    return 4 * use.sequences * recurrent * per_layer


def _compute(shape: _Shape, cells: int, use: Use) -> int:
    batch = use.batch
    feed_forward = shape.get("feed_forward_length") or shape.get("expert_feed_forward_length")
    masked = cells if use.unified else cells // use.sequences
    size = 4 * batch * (2 * feed_forward + 8 * shape.embedding) + 2 * batch * masked
    if shape.get("attention.sliding_window"):
        size += 2 * batch * _window(shape, cells, use) // (1 if use.unified else use.sequences)
    if not use.flash:
        size += round(4 * batch * shape.heads * cells * 0.95)
    return size


def _row(values: int, kind: str) -> int:
    return values * _BLOCK.get(kind, _BLOCK["f16"]) // 32


def _padded(cells: int) -> int:
    return -(-cells // 256) * 256


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(options.get(name, default))
    except ValueError:
        return default
