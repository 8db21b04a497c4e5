"""Tiny real models and a quick stub for the tests."""

import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np

TESTS = Path(__file__).resolve().parent
CONTEXT, EMBEDDING, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 2048, 64, 2, 4, 2, 128
CONTROL_TOKENS = 3
BYTE_TOKENS = 256


def vocabulary() -> tuple[list[str], list[int]]:
    """Return tokens and their kinds: control, all bytes, then pieces of plain ASCII text."""
    pieces = [f"▁{letter}" for letter in "etaoinshrdlu"] + [
        chr(code) for code in range(ord("a"), ord("z") + 1)
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{code:02X}>" for code in range(BYTE_TOKENS)), *pieces]
    kinds = [
        gguf.TokenType.UNKNOWN,
        gguf.TokenType.CONTROL,
        gguf.TokenType.CONTROL,
        *[gguf.TokenType.BYTE] * BYTE_TOKENS,
        *[gguf.TokenType.NORMAL] * len(pieces),
    ]
    return tokens, kinds


@cache
def tiny_model_bytes(seed: int) -> bytes:
    """Return a random llama GGUF of half a megabyte; a seed always gives the same weights.

    Text is plain ASCII and always runs to `max_tokens`: the first dimension of every hidden state is large
    and positive, and the output weights of control and byte tokens are strongly negative there, so neither
    end-of-text nor a stray byte is ever chosen.
    """
    tokens, kinds = vocabulary()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        write_header(writer, f"tiny-{seed}", tokens, kinds)
        write_weights(writer, np.random.default_rng(seed), len(tokens))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def tiny_model(path: Path, seed: int) -> Path:
    """Write the tiny model of `seed` to `path` and return it; llama-server loads it in about 0.2 s."""
    path.write_bytes(tiny_model_bytes(seed))
    return path


def write_header(writer: gguf.GGUFWriter, name: str, tokens: list[str], kinds: list[int]) -> None:
    """Add the metadata of a llama model with this vocabulary."""
    writer.add_name(name)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(EMBEDDING // HEADS)
    write_vocabulary(writer, tokens, kinds)


def write_vocabulary(writer: gguf.GGUFWriter, tokens: list[str], kinds: list[int]) -> None:
    """Add a vocabulary whose first three tokens are unknown, begin and end."""
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_weights(writer: gguf.GGUFWriter, source: np.random.Generator, tokens: int) -> None:
    """Add all tensors of a llama model, drawn from `source`."""

    def weights(*shape: int) -> np.ndarray:
        return (source.standard_normal(shape) * 0.05).astype(np.float32)

    embedding, output = weights(tokens, EMBEDDING), weights(tokens, EMBEDDING)
    embedding[:, 0] = 4.0
    output[:, 0] = 0.0
    output[: CONTROL_TOKENS + BYTE_TOKENS, 0] = -20.0
    ones = np.ones(EMBEDDING, np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", output)
    writer.add_tensor("output_norm.weight", ones)
    keys = EMBEDDING // HEADS * KV_HEADS
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (EMBEDDING, EMBEDDING),
            "attn_k": (keys, EMBEDDING),
            "attn_v": (keys, EMBEDDING),
            "attn_output": (EMBEDDING, EMBEDDING),
            "ffn_gate": (FEED_FORWARD, EMBEDDING),
            "ffn_up": (FEED_FORWARD, EMBEDDING),
            "ffn_down": (EMBEDDING, FEED_FORWARD),
        }
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", weights(*shape))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)


def stub_engine(folder: Path) -> Path:
    """Write an executable to `folder` that is `stub_engine.py` without site packages, for quick starts."""
    path = folder / "stub-llama-server"
    interpreter = getattr(sys, "_base_executable", sys.executable)
    program = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom stub_engine import main\nmain()\n"
    path.write_text(f"#!{interpreter} -ES\n{program}")
    path.chmod(0o755)
    return path
