"""Whether the engine runs on this processor: it is made to load a model of a few kilobytes once.

Builds for other processors answer --help and --version and die of an illegal instruction only when they load
tensors, so nothing less tells.
"""

import contextlib
import hashlib
import json
import math
import os
import select
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamastead.supervisor.ends import explain_death
from llamastead.supervisor.engine import Engine, EngineError
from llamastead.supervisor.launch import instance_environment
from llamastead.supervisor.registry.render import command_words

LOAD_SECONDS = 60.0  # 30 ms when the engine's libraries are cached
EXIT_SECONDS = 5.0
_PASSED_FILE = "engine-test.json"
_READY = b'"state":"ready"'

_WIDTH, _CONTEXT = 64, 256
_U32, _I32, _F32, _STRING, _ARRAY = 4, 5, 6, 8, 9  # types of GGUF values
_TENSOR_F32, _TENSOR_Q4_0 = 0, 2
_Q4_0_VALUES, _Q4_0_BYTES = 32, 18  # of one block
_ALIGNMENT = 32


def self_test(engine: Engine, run_dir: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Raise EngineError if the engine can't load a model here, saying why; takes well under a second.

    A pass is remembered in `run_dir` for as long as the engine's files and the processor stay the same.
    """
    mark = run_dir / _PASSED_FILE
    identity = _identity(engine.path)
    if _passed_before(mark, identity):
        return
    with tempfile.TemporaryDirectory(prefix="selftest-", dir=run_dir) as folder:
        _load_model(engine, Path(folder), environ)
    mark.write_text(json.dumps({"engine": str(engine.path), "identity": identity}) + "\n")


def _passed_before(mark: Path, identity: str) -> bool:
    try:
        return bool(json.loads(mark.read_text())["identity"] == identity)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _identity(engine: Path) -> str:
    """Hash what the result depends on: the engine, the libraries beside it, the processor's features."""
    binary = engine.resolve()
    libraries = [file for stem in ("ggml", "llama", "mtmd") for file in binary.parent.glob(f"lib{stem}*")]
    facts = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in (binary, *sorted(libraries))
    ]
    processor = Path("/proc/cpuinfo").read_text(errors="replace")
    features = next((line for line in processor.splitlines() if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(json.dumps([facts, features]).encode()).hexdigest()


def _load_model(engine: Engine, folder: Path, environ: Mapping[str, str]) -> None:
    model = folder / "model.gguf"
    model.write_bytes(smallest_model())
    asked = {
        "model": str(model),
        "host": str(folder / "t.sock"),
        "ctx-size": str(_CONTEXT),
        "parallel": "1",
        "threads": "1",
        "device": "none",
        "fit": "off",
        "cache-ram": "0",
        "log-colors": "off",
    }
    options = {name: value for name, value in asked.items() if name in engine.options}
    # A wrong LLAMA_ARG_… of the operator's is no fault of the engine.
    environ = {name: value for name, value in environ.items() if not name.startswith("LLAMA_")}
    stderr = folder / "stderr"
    with (
        stderr.open("wb") as log,
        subprocess.Popen(
            [engine.path, *command_words(options, engine.options)],
            env=instance_environment(environ, engine.options) | {"XDG_CONFIG_HOME": str(folder / "config")},
            stdin=subprocess.PIPE,  # its end would tell the engine to leave
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        ready = _await_ready(process)
        if not ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)  # the end of its output comes a moment before its exit can be told
        process.kill()
    if ready:
        return
    tail = stderr.read_text(errors="replace").splitlines()[-50:]
    raise EngineError(f"{engine.path} can't serve on this machine: {_why(process.returncode, tail)}")


def _why(status: int, tail: Sequence[str]) -> str:
    if status == -signal.SIGKILL:
        return f"it loads no model of a few kilobytes within {LOAD_SECONDS:.0f} s"
    return explain_death(None, -status, tail) if status < 0 else explain_death(status, None, tail)


def _await_ready(process: subprocess.Popen[bytes]) -> bool:
    """Read state lines until `ready` (True), or the end of output or the time limit (False)."""
    assert process.stdout is not None
    deadline = time.monotonic() + LOAD_SECONDS
    output = b""
    while _READY not in output:
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 65536) if readable else b""
        if not piece:
            return False
        output += piece
    return True


def smallest_model() -> bytes:
    """Return a GGUF that every build loads: one layer of zeros, quantised so that tensors get repacked."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{code:02X}>" for code in range(256)),
        *(f"t{n}" for n in range(29)),
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 29]
    values = [
        _value("general.architecture", _STRING, "llama"),
        *(
            _value(f"llama.{name}", _U32, number)
            for name, number in (
                ("context_length", _CONTEXT),
                ("embedding_length", _WIDTH),
                ("block_count", 1),
                ("feed_forward_length", _WIDTH),
                ("attention.head_count", 1),
                ("rope.dimension_count", _WIDTH),
            )
        ),
        _value("llama.attention.layer_norm_rms_epsilon", _F32, 1e-5),
        _value("tokenizer.ggml.model", _STRING, "llama"),
        _array("tokenizer.ggml.tokens", _STRING, tokens),
        _array("tokenizer.ggml.scores", _F32, [0.0] * len(tokens)),
        _array("tokenizer.ggml.token_type", _I32, kinds),
    ]
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {
        "token_embd.weight": (_WIDTH, len(tokens)),
        "output_norm.weight": (_WIDTH,),
        **{f"blk.0.{name}.weight": (_WIDTH, _WIDTH) for name in matrices},
        **{f"blk.0.{name}.weight": (_WIDTH,) for name in ("attn_norm", "ffn_norm")},
    }
    infos, size = b"", 0
    for name, shape in shapes.items():
        kind = _TENSOR_Q4_0 if len(shape) > 1 else _TENSOR_F32
        infos += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, size)
        count = math.prod(shape)
        size += _padded(count // _Q4_0_VALUES * _Q4_0_BYTES if kind == _TENSOR_Q4_0 else count * 4)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values)) + b"".join(values) + infos
    return header + bytes(_padded(len(header)) - len(header) + size)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _scalar(kind: int, value: Any) -> bytes:
    return _text(value) if kind == _STRING else struct.pack({_U32: "<I", _I32: "<i", _F32: "<f"}[kind], value)


def _value(key: str, kind: int, value: Any) -> bytes:
    return _text(key) + struct.pack("<I", kind) + _scalar(kind, value)


def _array(key: str, kind: int, values: Sequence[Any]) -> bytes:
    items = b"".join(_scalar(kind, value) for value in values)
    return _text(key) + struct.pack("<IIQ", _ARRAY, kind, len(values)) + items
