"""What a model takes, reckoned from its GGUF header: instant, and less exact than a measurement.

The formula follows llama.cpp's own allocations: weights, one cache per layer, recurrent states, and the
compute buffers of one micro-batch. It is made for a model that lies on one device whole, but for what its
options keep on the host.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamastead.shared.devices.device import MIB
from llamastead.shared.figures import Parts
from llamastead.shared.gguf import GgufError, read_values, shard_files, tensor_sizes

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
# Values of --load-mode that read the weights into pages of the process itself.
_NOT_MAPPED = frozenset({"none", "dio", "mlock"})
# A tensor of a layer, and whether it is one of experts as the engine tells them apart.
_LAYER = re.compile(r"blk\.(\d{1,9})\.(ffn_(?:up|down|gate|gate_up)_(?:ch)?exps\.)?")
_ALL = 1 << 30
# An engine takes half as many; a header that says more is broken.
_MOST_LAYERS = 1024
# On top of what is not known better: a file of unknown kind, its caches and buffers.
_ALLOWANCE, _ALLOWANCE_MIB = 1.2, 512


@dataclass(frozen=True)
class Use:
    """The options that matter, as an instance gets them. `context` 0 means the model's own.

    `host_experts` is of how many layers, from the first, the experts stay on the host; `gpu_layers` how many,
    from the last, go to a GPU, the output counted as one (None: all).
    """

    context: int = 0
    sequences: int = 4
    unified: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    batch: int = 512
    flash: bool = True
    full_swa: bool = False
    mapped: bool = True
    host_experts: int = 0
    gpu_layers: int | None = None


@dataclass(frozen=True)
class Estimate:
    """Parts at the context asked for; `context` is that context as the engine would round it, None when
    nothing but the size of the file is known. `source` says how far to trust it: `estimate` for architectures
    that were compared with real loads, `rough` for others, `file size` where the header tells nothing.
    `on_host` is what of the parts the options keep on the host where the rest goes to a GPU.
    """

    parts: Parts
    context: int | None
    source: str
    on_host: Parts = field(default_factory=Parts)


def read_use(options: Mapping[str, str]) -> Use:
    """Return what an instance's options say; a value that the engine would refuse counts as unsaid."""
    sequences = _number(options, "parallel", -1)
    flag = {"1", "true", "on", "enabled"}
    layers = _number(options, "n-gpu-layers", -1)
    every = options.get("cpu-moe", "0") in flag
    return Use(
        context=max(0, _number(options, "ctx-size", 0)),
        sequences=sequences if sequences > 0 else 4,
        unified=options.get("kv-unified", "1" if sequences <= 0 else "0") in flag,
        type_k=options.get("cache-type-k", "f16"),
        type_v=options.get("cache-type-v", "f16"),
        batch=_number(options, "ubatch-size", 512),
        flash=options.get("flash-attn", "auto") not in {"off", "0", "false"},
        full_swa=options.get("swa-full", "0") in flag,
        mapped=options.get("mmap", "1") in flag and options.get("load-mode", "auto") not in _NOT_MAPPED,
        host_experts=_ALL if every else max(0, _number(options, "n-cpu-moe", 0)),
        gpu_layers=layers if layers >= 0 else None,
    )


class Weights:
    """The files of a model, looked at once for any use of it."""

    def __init__(self, path: Path) -> None:
        """`path` is the first shard. Raises OSError when its files aren't there."""
        self._path = path
        self._size = sum(file.stat().st_size for file in shard_files(path))
        self._shape: _Shape | None = None
        with contextlib.suppress(GgufError, KeyError):
            self._shape = _Shape(read_values(path))

    @property
    def training_context(self) -> int | None:
        """Return the context the model was trained for, None where its header does not tell."""
        return (self._shape and self._shape.get("context_length")) or None

    def estimate(self, use: Use) -> Estimate:
        """Return what the model takes when used so. Raises GgufError for a shard that isn't there."""
        shape, size = self._shape, self._size
        if shape is None or not 0 < shape.layers <= _MOST_LAYERS or shape.embedding <= 0:
            return Estimate(_by_size(size, use), None, "file size")
        context = use.context or self.training_context or FIT_CONTEXT
        cells = _cells(context, use)
        parts = Parts(
            model=size,
            mapped=size if use.mapped else 0,
            context=_caches(shape, cells, use) + _recurrent(shape, use),
            compute=_compute(shape, cells, use),
        )
        source = "estimate" if shape.architecture in _KNOWN else "rough"
        return Estimate(parts, context, source, _on_host(self._path, shape, parts, use))


def estimate(path: Path, use: Use) -> Estimate:
    """Return what the model at `path` (its first shard) takes. Raises OSError when its files aren't there."""
    return Weights(path).estimate(use)


def _on_host(path: Path, shape: "_Shape", parts: Parts, use: Use) -> Parts:
    """Return what stays on the host of a model that goes to a GPU otherwise."""
    below = 0 if use.gpu_layers is None else min(shape.layers, max(0, shape.layers + 1 - use.gpu_layers))
    if not below and not use.host_experts:
        return Parts()
    size = 0
    for name, amount in tensor_sizes(path).items():
        match = _LAYER.match(name)
        if match and int(match[1]) < (max(below, use.host_experts) if match[2] else below):
            size += amount
    context = parts.context * below // shape.layers
    return Parts(model=size, mapped=size if use.mapped else 0, context=context)


def projector_parts(path: Path) -> Parts:
    """Return what a projector takes: its weights, and the buffers of one image. Raises OSError.

    Where its header does not tell the size of an image, as much again as the weights and a bit more.
    """
    size = path.stat().st_size
    try:
        values = read_values(path)
        names = ("image_size", "patch_size", "embedding_length", "feed_forward_length")
        image, patch, width, feed_forward = (int(values[f"clip.vision.{name}"]) for name in names)
        buffers = 4 * ((image // patch) ** 2 + 1) * (2 * feed_forward + 8 * width)
    except (GgufError, KeyError, TypeError, ValueError, ZeroDivisionError):
        buffers = size + 64 * MIB
    return Parts(projector=size + buffers)


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
        return max((_count(number) for number in numbers if isinstance(number, int)), default=default)

    def by_layer(self, name: str, default: int) -> list[int]:
        """Return a number for each layer."""
        value = self._values.get(f"{self.architecture}.{name}", default)
        if isinstance(value, tuple):
            return [_count(v) for v in value[: self.layers]] + [default] * (self.layers - len(value))
        return [_count(value)] * self.layers

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer attends to a sliding window only."""
        if not self.get("attention.sliding_window"):
            return False
        pattern = self._values.get(f"{self.architecture}.attention.sliding_window_pattern")
        if isinstance(pattern, tuple):
            return bool(pattern[layer]) if layer < len(pattern) else False
        every = pattern if isinstance(pattern, int) else _FULL_EVERY.get(self.architecture, 1)
        return every > 1 and (layer + 1) % every != 0


def _count(value: object) -> int:
    """Return a header's number of something; what can't be one, in a file that is broken, is none."""
    return max(0, int(value)) if isinstance(value, int) else 0


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
    """Return the buffers of one micro-batch: the widest layer's, and the masks of its attention."""
    batch = use.batch
    size = 4 * batch * _widest(shape)
    if not shape.heads:
        return size
    size += 2 * batch * (cells if use.unified else cells // use.sequences)
    if shape.get("attention.sliding_window"):
        size += 2 * batch * _window(shape, cells, use) // (1 if use.unified else use.sequences)
    if not use.flash:
        size += round(4 * batch * shape.heads * cells * 0.95)
    return size


def _widest(shape: _Shape) -> int:
    """Return how many values the layers hold per token at once; factors as engines were seen to allocate."""
    feed_forward = shape.get("feed_forward_length")
    recurrent = shape.get("ssm.inner_size") * 13 // 2
    used = shape.get("expert_used_count")
    experts = used * 3 * (shape.get("expert_feed_forward_length") or feed_forward) + 5 * shape.embedding
    dense = 2 * feed_forward + 8 * shape.embedding if shape.heads else 0
    return max(dense, recurrent, experts if used else 0)


def _row(values: int, kind: str) -> int:
    return values * _BLOCK.get(kind, _BLOCK["f16"]) // 32


def _padded(cells: int) -> int:
    return -(-cells // 256) * 256


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(options.get(name, default))
    except ValueError:
        return default
