"""Measuring models with real engines, and what is reckoned, against real loads."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from redis.asyncio import Redis
from tiny import LAYERS, tiny_model, vocabulary

from llamastead.measure_worker.jobs import Desk, on_measure_model
from llamastead.measure_worker.measuring import MeasureError, measure
from llamastead.shared.devices.device import HOST
from llamastead.shared.estimate import estimate, read_use
from llamastead.shared.figures import MIB, Effective, Parts
from llamastead.shared.secret import read_or_make_herd_secret, seal
from llamastead.shared.store.connect import connect_sync
from llamastead.shared.store.keys import Keys

EMBEDDING, HEADS, FEED_FORWARD = 512, 8, 1024


@pytest.fixture(scope="module")
def bigger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of some 20 MiB with 8 layers, so that rounding to whole MiB matters little."""
    path = tmp_path_factory.mktemp("models") / "bigger.gguf"
    tokens, kinds = vocabulary()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(32768)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(8)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(EMBEDDING // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def weights(*shape: int) -> np.ndarray:
        return np.full(shape, 0.01, np.float16)

    writer.add_tensor("token_embd.weight", weights(len(tokens), EMBEDDING))
    writer.add_tensor("output.weight", weights(len(tokens), EMBEDDING))
    writer.add_tensor("output_norm.weight", np.ones(EMBEDDING, np.float32))
    for layer in range(8):
        for name, rows, columns in (
            ("attn_q", EMBEDDING, EMBEDDING),
            ("attn_k", EMBEDDING // 2, EMBEDDING),
            ("attn_v", EMBEDDING // 2, EMBEDDING),
            ("attn_output", EMBEDDING, EMBEDDING),
            ("ffn_gate", FEED_FORWARD, EMBEDDING),
            ("ffn_up", FEED_FORWARD, EMBEDDING),
            ("ffn_down", EMBEDDING, FEED_FORWARD),
        ):
            writer.add_tensor(f"blk.{layer}.{name}.weight", weights(rows, columns))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(EMBEDDING, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def words(engine: Path, model: Path, *more: str) -> list[str]:
    """Return the command line of a measurement."""
    return [str(engine), "--model", str(model), "--fit", "on", "--log-verbosity", "4", *more]


def really_loaded(engine: Path, model: Path, folder: Path, *more: str) -> Parts:
    """Load a model and return what it says it allocated on the host."""
    argv = [str(engine), "--model", str(model), "--host", str(folder / "e.sock"), "-lv", "4", *more]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    effective = Effective()
    assert process.stdout is not None
    for line in process.stdout:
        effective.take(line.decode(errors="replace"))
        if b"model loaded" in line:
            break
    process.kill()
    process.communicate()
    found = effective.figures
    assert found is not None
    return found[HOST]


OPTIONS = {
    "f16": {"ctx-size": "8192"},
    "q8_0": {"ctx-size": "8192", "cache-type-k": "q8_0", "cache-type-v": "q8_0"},
    "q4_0": {"ctx-size": "8192", "cache-type-k": "q4_0", "cache-type-v": "q4_0"},
    "own context": {},
    "eight slots": {"ctx-size": "8192", "parallel": "8"},
    "no flash": {"ctx-size": "8192", "flash-attn": "off"},
    "small batch": {"ctx-size": "4096", "ubatch-size": "64"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_c67_measured_within_5_and_reckoned_within_15_per_cent_of_a_real_load(
    real_engine: Path, bigger: Path, short_tmp: Path, options: dict[str, str]
) -> None:
    """Measure, reckon and load the same preset: both figures are near what the load takes."""
    spelled = [word for name, value in options.items() for word in (f"--{name}", value)]
    real = really_loaded(real_engine, bigger, short_tmp, *spelled).total
    measured = measure(words(real_engine, bigger, *spelled), {})[HOST].total
    reckoned = estimate(bigger, read_use(options))
    assert reckoned.source == "estimate"
    assert abs(measured - real) <= max(0.05 * real, 3 * MIB)
    assert abs(reckoned.parts.total - real) <= 0.15 * real


def test_c64_a_draft_counts_in_a_measurement(real_engine: Path, bigger: Path, model: Path) -> None:
    """Measure with and without a draft model: the draft's share is there, the model's is the same."""
    alone = measure(words(real_engine, bigger, "--ctx-size", "2048"), {})[HOST]
    draft = ("--ctx-size", "2048", "--model-draft", str(model), "--spec-type", "draft-simple")
    both = measure(words(real_engine, bigger, *draft), {})[HOST]
    assert both.draft > 0 == alone.draft
    assert both.model == alone.model


def test_a_model_that_is_no_model_says_so(real_engine: Path, short_tmp: Path) -> None:
    """Measure a file that is no GGUF: the engine's last words are the reason."""
    broken = short_tmp / "m.gguf"
    broken.write_text("no")
    with pytest.raises(MeasureError, match="ended with code 1: "):
        measure(words(real_engine, broken), {})


def test_an_engine_that_cannot_be_run_says_so(short_tmp: Path) -> None:
    """Name an engine that is not there."""
    with pytest.raises(MeasureError, match="can't be run: No such file"):
        measure([str(short_tmp / "none")], {})


def test_an_engine_that_tells_nothing_is_ended(stub: Path, model: Path) -> None:
    """Let an engine come to ready without a table: no figures, and it is not left behind."""
    with pytest.raises(MeasureError, match="without telling"):
        measure([str(stub), "--model", str(model)], {})


def test_the_stub_tells_what_it_is_told_to(stub: Path, model: Path) -> None:
    """Script two devices: they come out as such."""
    (model.parent / f"{model.name}.json").write_text(json.dumps({"memory_mib": {"CUDA0": [9, 5, 2]}}))
    found = measure([str(stub), "--model", str(model), "--fit", "on"], {})
    assert found == {"CUDA0": Parts(model=10 * MIB, context=6 * MIB, compute=3 * MIB)}


def test_c190_an_engine_killed_from_outside_says_by_what(short_tmp: Path) -> None:
    """Measure with an engine that is killed by signal 9: the reason names it and its process."""
    engine = short_tmp / "engine"
    engine.write_text("#!/bin/sh\nkill -9 $$\n")
    engine.chmod(0o755)
    with pytest.raises(MeasureError, match=r"killed by signal 9 \(pid \d+\), likely .* memory"):
        measure([str(engine)], {})


def test_the_engine_dies_with_the_job(short_tmp: Path) -> None:
    """Kill the measuring process the hard way: the engine it started is gone as well."""
    engine, note = short_tmp / "engine", short_tmp / "pid"
    engine.write_text(f"#!/bin/sh\necho $$ > {note}.part; mv {note}.part {note}\nexec sleep 60\n")
    engine.chmod(0o755)
    code = f"from llamastead.measure_worker.measuring import measure; measure([{str(engine)!r}], {{}})"
    job = subprocess.Popen([sys.executable, "-c", code])
    ends_at = time.monotonic() + 20
    while not note.exists():
        assert time.monotonic() < ends_at
        assert job.poll() is None
    pid = int(note.read_text())
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    while Path(f"/proc/{pid}").exists() and not _is_zombie(pid):
        assert time.monotonic() < ends_at


def _is_zombie(pid: int) -> bool:
    try:
        return re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is not None
    except FileNotFoundError:
        return True


def test_what_is_not_known_is_reckoned_by_size_and_says_so(tmp_path: Path, model: Path) -> None:
    """Reckon a file whose header tells nothing: size and an allowance, marked as such."""
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(b"x" * MIB)
    reckoned = estimate(odd, read_use({}))
    assert (reckoned.source, reckoned.context) == ("file size", None)
    assert reckoned.parts.total > 512 * MIB
    tiny_model(tmp_path / "m.gguf", 2)
    exact = estimate(tmp_path / "m.gguf", read_use({"ctx-size": "256"})).parts.context
    assert exact == LAYERS * 2 * 32 * 2 * 256


async def test_a_worker_runs_only_what_its_own_supervisor_ordered(
    redis: Redis, redis_url: str, keys: Keys, short_tmp: Path
) -> None:
    """Order a command with a wrong seal: it does not run, and the outcome says why."""
    secret = read_or_make_herd_secret(short_tmp / "secret")
    witness = short_tmp / "ran"
    order = json.dumps({"commands": [["/usr/bin/touch", str(witness)]], "variables": {}})
    client = connect_sync(redis_url)
    try:
        desk = Desk(client, keys, short_tmp)
        on_measure_model(desk, "m", "i", "p", order, seal(secret, order + " "))
    finally:
        client.close()
    assert not witness.exists()
    found = await redis.hgetall(keys.measurement("i", "p"))
    assert (found["state"], found["failures"]) == ("failed", "1")
    assert "does not come from this herd's supervisor" in found["error"]
