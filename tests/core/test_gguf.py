"""What a GGUF's header tells without loading it."""

import os
import struct
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model, tiny_model_bytes

from llamastead.shared.estimate import estimate, read_use
from llamastead.shared.gguf import GgufError, GgufMetadata, read_metadata, read_values
from llamastead.supervisor.selftest import smallest_model


def write(path, architecture="llama", tensors=1, **values):
    """Write a GGUF with these values (`__` stands for a dot) and small tensors."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in values.items():
        name = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for number in range(tensors):
        writer.add_tensor(f"t{number}", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_real_model_is_read(tmp_path):
    """Read the tiny model whose numbers are known."""
    model = tiny_model(tmp_path / "m.gguf", 1)
    assert read_metadata(model) == GgufMetadata(
        architecture="llama",
        name="tiny-1",
        size_bytes=model.stat().st_size,
        shards=1,
        n_params=112064,
        n_ctx_train=2048,
        n_embd=64,
        n_layer=2,
        n_vocab=297,
        pooling="",
        chat_template=False,
        input_modalities=("text",),
        output_modalities=("text",),
    )


def test_template_pooling_and_projector_show(tmp_path):
    """Read an embedding model with a chat template and a projector for images and sound."""
    values = {"bert__pooling_type": 1, "tokenizer__chat_template": "{{ x }}"}
    model = write(tmp_path / "e.gguf", "bert", **values)
    encoders = {"clip__has_vision_encoder": True, "clip__has_audio_encoder": True}
    projector = write(tmp_path / "mmproj.gguf", "clip", **encoders)
    metadata = read_metadata(model, projector)
    assert (metadata.pooling, metadata.chat_template) == ("mean", True)
    assert metadata.input_modalities == ("text", "image", "audio")
    assert (metadata.n_ctx_train, metadata.n_vocab) == (None, None)


def test_shards_count_together_and_a_missing_one_is_named(tmp_path):
    """Read a split model whole, then with its second shard gone."""
    first = write(tmp_path / "m-00001-of-00002.gguf", tensors=1)
    second = write(tmp_path / "m-00002-of-00002.gguf", tensors=2)
    metadata = read_metadata(first)
    assert (metadata.shards, metadata.n_params) == (2, 3 * 64)
    assert metadata.size_bytes == first.stat().st_size + second.stat().st_size
    second.unlink()
    with pytest.raises(GgufError, match=r"m-00002-of-00002\.gguf not found in"):
        read_metadata(first)


def test_of_many_missing_shards_a_few_are_named(tmp_path: Path) -> None:
    """The first of 99 999 shards is there: four of the others are named, and the rest counted."""
    with pytest.raises(GgufError, match=r"00005-of-99999\.gguf and 99994 more not found in"):
        read_metadata(tiny_model(tmp_path / "m-00001-of-99999.gguf", 1))


@contextmanager
def little_memory():
    """Expect no more than a megabyte to be taken meanwhile: nothing is built of what is only counted."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_big_vocabulary_is_skipped(tmp_path):
    """Read a model with half a million tokens: they are counted, not read."""
    tokens = [f"token-{number}" for number in range(500_000)]
    model = write(tmp_path / "big.gguf", tokenizer__ggml__tokens=tokens, llama__context_length=7)
    with little_memory():
        metadata = read_metadata(model)
    assert (metadata.n_vocab, metadata.n_ctx_train, metadata.n_params) == (500_000, 7, 64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "isn't a whole GGUF file"),
        (b"GG", "isn't a whole GGUF file"),
        (b"PK\x03\x04" + bytes(40), "isn't a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "has GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + bytes(8) + struct.pack("<I", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "names no architecture"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "isn't a whole GGUF file"),
        (tiny_model_bytes(1)[:300], "isn't a whole GGUF file"),
    ],
)
def test_what_is_no_gguf_is_refused_in_words(tmp_path, content, message):
    """Read files that are empty, cut, foreign or too old."""
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=f"^{path} .*{message}"):
        read_metadata(path)


@given(st.data())
def test_a_damaged_header_is_refused_or_read_but_never_breaks_the_reader(tmp_path_factory, data):
    """Overwrite bytes of a small model's header and read it."""
    content = bytearray(smallest_model())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 6000))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        content[at : at + len(patch)] = patch
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        read_metadata(path)
    except GgufError as error:
        assert str(path) in str(error)  # noqa: PT017 - damage may also go unnoticed
    finally:
        path.unlink()


def test_the_self_test_model_is_a_gguf(tmp_path):
    """Read the model that the engine's self-test loads."""
    path = tmp_path / "s.gguf"
    path.write_bytes(smallest_model())
    metadata = read_metadata(path)
    assert (metadata.architecture, metadata.n_ctx_train, metadata.n_vocab) == ("llama", 256, 288)


@pytest.mark.parametrize(
    "values",
    [
        {"llama__block_count": 2**32 - 1},
        {"llama__block_count": 2**31, "llama__attention__head_count_kv": 2},
        {"llama__block_count": 4, "llama__attention__head_count_kv": "many"},
        {"llama__block_count": 4, "llama__attention__head_count_kv": [-3, -3, -3, -3]},
        {"llama__block_count": 4, "llama__attention__head_count_kv": [float("inf")] * 4},
        {"llama__block_count": "four"},
    ],
)
def test_a_header_that_says_what_cannot_be_costs_neither_memory_nor_an_error(tmp_path, values):
    """Estimate what a broken file takes: at least its size."""
    path = write(tmp_path / "m.gguf", llama__embedding_length=64, llama__attention__head_count=4, **values)
    with little_memory():
        found = estimate(path, read_use({"ctx-size": "512"}))
    assert found.parts.total >= path.stat().st_size
    assert found.parts.context >= 0


def test_a_tensor_with_a_number_beyond_all_is_of_no_layer(tmp_path):
    """Name a tensor after a layer of five thousand digits, and have layers on the host."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for key in ("block_count", "embedding_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 4)
    writer.add_tensor(f"blk.{'9' * 5000}.ffn_up.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert estimate(path, read_use({"n-gpu-layers": "2"})).on_host.model == 0


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    """Read a pipe that nobody writes to, a device and a folder."""
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(GgufError, match=f"{path} isn't a file"):
            read_values(path)
        assert estimate(path, read_use({})).source == "file size"
