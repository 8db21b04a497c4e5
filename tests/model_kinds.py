"""Models of several architectures, big enough that rounding to whole MiB matters little.

Their weights are all the same; nobody asks them anything.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from tiny import vocabulary, write_vocabulary

EMBEDDING, LAYERS, HEADS, KV_HEADS, FEED_FORWARD, CONTEXT = 512, 8, 8, 4, 1536, 32768
WIDTH = EMBEDDING // HEADS
EXPERTS = 8
WINDOW = 512
INNER, STATE, KERNEL, STEP_RANK = 2 * EMBEDDING, 16, 4, 32
LATENT, ROTARY, QUERY_RANK = 128, 32, 128
WORDS = 8000

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Kind:
    """How to write a model: what its header says beside the usual, and the tensors of a layer by shape."""

    architecture: str
    layer: Shapes
    header: Callable[[gguf.GGUFWriter], None] = lambda writer: None
    heads: bool = True
    tied: bool = False


def _attention(*more: str) -> Shapes:
    shapes: Shapes = {
        "attn_norm": (EMBEDDING,),
        "attn_q": (HEADS * WIDTH, EMBEDDING),
        "attn_k": (KV_HEADS * WIDTH, EMBEDDING),
        "attn_v": (KV_HEADS * WIDTH, EMBEDDING),
        "attn_output": (EMBEDDING, HEADS * WIDTH),
    }
    return shapes | dict.fromkeys(more, (WIDTH,))


DENSE: Shapes = {
    "ffn_norm": (EMBEDDING,),
    "ffn_gate": (FEED_FORWARD, EMBEDDING),
    "ffn_up": (FEED_FORWARD, EMBEDDING),
    "ffn_down": (EMBEDDING, FEED_FORWARD),
}
EXPERT_LAYER: Shapes = {
    "ffn_norm": (EMBEDDING,),
    "ffn_gate_inp": (EXPERTS, EMBEDDING),
    "ffn_gate_exps": (EXPERTS, FEED_FORWARD, EMBEDDING),
    "ffn_up_exps": (EXPERTS, FEED_FORWARD, EMBEDDING),
    "ffn_down_exps": (EXPERTS, EMBEDDING, FEED_FORWARD),
}
MAMBA: Shapes = {
    "attn_norm": (EMBEDDING,),
    "ssm_in": (2 * INNER, EMBEDDING),
    "ssm_conv1d": (INNER, KERNEL),
    "ssm_conv1d.bias": (INNER,),
    "ssm_x": (STEP_RANK + 2 * STATE, INNER),
    "ssm_dt": (INNER, STEP_RANK),
    "ssm_dt.bias": (INNER,),
    "ssm_a.": (INNER, STATE),
    "ssm_d.": (INNER,),
    "ssm_out": (EMBEDDING, INNER),
}
MLA: Shapes = {
    "attn_norm": (EMBEDDING,),
    "attn_q_a": (QUERY_RANK, EMBEDDING),
    "attn_q_a_norm": (QUERY_RANK,),
    "attn_q_b": (HEADS * (WIDTH + ROTARY), QUERY_RANK),
    "attn_kv_a_mqa": (LATENT + ROTARY, EMBEDDING),
    "attn_kv_a_norm": (LATENT,),
    "attn_k_b": (HEADS, LATENT, WIDTH),
    "attn_v_b": (HEADS, WIDTH, LATENT),
    "attn_output": (EMBEDDING, HEADS * WIDTH),
}


def _windowed(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(WINDOW)
    writer.add_key_length(WIDTH)
    writer.add_value_length(WIDTH)


def _experts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)


def _recurrent(writer: gguf.GGUFWriter) -> None:
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_time_step_rank(STEP_RANK)


def _latent(writer: gguf.GGUFWriter) -> None:
    writer.add_kv_lora_rank(LATENT)
    writer.add_q_lora_rank(QUERY_RANK)
    writer.add_key_length(LATENT + ROTARY)
    writer.add_value_length(LATENT)
    writer.add_key_length_mla(WIDTH + ROTARY)
    writer.add_value_length_mla(WIDTH)
    writer.add_leading_dense_block_count(LAYERS)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(FEED_FORWARD)
    writer.add_expert_weights_scale(1.0)


KINDS: Mapping[str, Kind] = {
    "llama": Kind("llama", _attention() | DENSE),
    "qwen2": Kind(
        "qwen2",
        _attention()
        | DENSE
        | {
            "attn_q.bias": (HEADS * WIDTH,),
            "attn_k.bias": (KV_HEADS * WIDTH,),
            "attn_v.bias": (KV_HEADS * WIDTH,),
        },
    ),
    "qwen3": Kind("qwen3", _attention("attn_q_norm", "attn_k_norm") | DENSE),
    "gemma3": Kind(
        "gemma3",
        _attention("attn_q_norm", "attn_k_norm")
        | DENSE
        | {"post_attention_norm": (EMBEDDING,), "post_ffw_norm": (EMBEDDING,)},
        _windowed,
        tied=True,
    ),
    "mamba": Kind("mamba", MAMBA, _recurrent, heads=False, tied=True),
    "experts": Kind("llama", _attention() | EXPERT_LAYER, _experts),
    "latent": Kind("deepseek2", MLA | DENSE, _latent),
}
"""By a name of our own: dense ones, one with sliding windows, a recurrent one, experts, latent attention."""


def write_kind(path: Path, name: str) -> Path:
    """Write the model of that kind to `path` and return it."""
    kind = KINDS[name]
    tokens, kinds = vocabulary()
    more = WORDS - len(tokens)
    tokens += [f"▁word{number}" for number in range(more)]
    kinds += [gguf.TokenType.NORMAL] * more
    writer = gguf.GGUFWriter(str(path), kind.architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD if kind.heads else 0)
    writer.add_head_count(HEADS if kind.heads else 0)
    if kind.heads:
        writer.add_head_count_kv(1 if name == "latent" else KV_HEADS)
        writer.add_rope_dimension_count(ROTARY if name == "latent" else WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    write_vocabulary(writer, tokens, kinds)
    kind.header(writer)
    writer.add_tensor("token_embd.weight", _weights((len(tokens), EMBEDDING)))
    writer.add_tensor("output_norm.weight", _weights((EMBEDDING,)))
    if not kind.tied:
        writer.add_tensor("output.weight", _weights((len(tokens), EMBEDDING)))
    for layer in range(LAYERS):
        for part, shape in kind.layer.items():
            # "ssm_a." is a parameter without the suffix of its own.
            full = part.rstrip(".") if part.endswith(".") else part if "." in part else f"{part}.weight"
            writer.add_tensor(f"blk.{layer}.{full}", _weights(shape, full))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(shape: tuple[int, ...], name: str = "") -> np.ndarray:
    """Return weights; those that engines want exact are of 32 bits."""
    exact = len(shape) == 1 or any(word in name for word in ("conv1d", "ssm_a", "ffn_gate_inp"))
    return np.full(shape, 0.01, np.float32 if exact else np.float16)


def write_projector(path: Path) -> Path:
    """Write a projector for images, of the plainest sort, to `path` and return it."""
    size, patch, width, layers, feed_forward = 56, 14, 256, 4, 1024
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    for name, value in {
        "image_size": size,
        "patch_size": patch,
        "embedding_length": width,
        "feed_forward_length": feed_forward,
        "block_count": layers,
        "projection_dim": EMBEDDING,
        "attention.head_count": 4,
    }.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])
    shapes: Shapes = {
        "v.class_embd": (width,),
        "v.patch_embd.weight": (width, 3, patch, patch),
        "v.position_embd.weight": ((size // patch) ** 2 + 1, width),
        "v.pre_ln.weight": (width,),
        "v.pre_ln.bias": (width,),
        "mm.0.weight": (EMBEDDING, width),
        "mm.0.bias": (EMBEDDING,),
        "mm.2.weight": (EMBEDDING, EMBEDDING),
        "mm.2.bias": (EMBEDDING,),
    }
    for layer in range(layers):
        block = f"v.blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= {f"{block}.{name}.weight": (width, width), f"{block}.{name}.bias": (width,)}
        for name in ("ln1", "ln2"):
            shapes |= {f"{block}.{name}.weight": (width,), f"{block}.{name}.bias": (width,)}
        shapes |= {
            f"{block}.ffn_up.weight": (feed_forward, width),
            f"{block}.ffn_up.bias": (feed_forward,),
            f"{block}.ffn_down.weight": (width, feed_forward),
            f"{block}.ffn_down.bias": (width,),
        }
    for name, shape in shapes.items():
        writer.add_tensor(name, _weights(shape, name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_adapter(path: Path, rank: int = 512) -> Path:
    """Write an adapter (LoRA) for the queries of the llama kind and return its path: 16 MiB."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    for layer in range(LAYERS):
        name = f"blk.{layer}.attn_q.weight"
        writer.add_tensor(f"{name}.lora_a", np.zeros((rank, EMBEDDING), np.float32))
        writer.add_tensor(f"{name}.lora_b", np.zeros((HEADS * WIDTH, rank), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
