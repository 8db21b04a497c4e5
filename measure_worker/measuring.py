"""One measurement: an engine is started to say what it would take, and ended before it takes it."""

import ctypes
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from llamastead.shared.figures import Breakdown, Parts

STALL_S = 30.0  # without a word from the engine
TAIL_LINES = 20
_READY = '"state":"ready"'
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl
# What the worker's own environment gives an engine: how to run and where the devices are, nothing of options.
_PASSED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")


class MeasureError(Exception):
    """The engine did not tell; the message says why."""


def measure(argv: Sequence[str], variables: Mapping[str, str]) -> dict[str, Parts]:
    """Return what the engine says it would take per device, by its own names of them.

    `argv` is its command line without `--host`, with `--fit on` and a log of verbosity 4; `variables` are set
    for it. It ends with this process, however that ends. Raises MeasureError.
    """
    environ = {name: os.environ[name] for name in _PASSED if name in os.environ}
    environ |= {**variables, "LLAMA_SERVER_ROUTER_PORT": "0", "GGML_NO_BACKTRACE": "1"}
    with TemporaryDirectory(prefix="lsm", dir="/tmp") as folder:
        environ["XDG_CONFIG_HOME"] = folder
        try:
            engine = subprocess.Popen(
                [*argv, "--host", str(Path(folder) / "m.sock")],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise MeasureError(f"{argv[0]} can't be run: {error.strerror}") from None
        try:
            return _listen(engine)
        finally:
            engine.kill()
            engine.communicate()


def _listen(engine: subprocess.Popen[bytes]) -> dict[str, Parts]:
    breakdown, tail = Breakdown(), deque[str](maxlen=TAIL_LINES)
    for line in _lines(engine):
        tail.append(line)
        breakdown.take(line)
        if (breakdown.over and breakdown.figures) or _READY in line:
            break
    found = breakdown.figures
    if found is not None:
        return found
    code = engine.poll()
    if code is None and tail and _READY not in tail[-1]:
        raise MeasureError(f"no figures, and not a word for {STALL_S:.0f} s")
    if code is None:
        raise MeasureError("this engine loads without telling what it will take")
    if code == -signal.SIGKILL:
        raise MeasureError(f"killed by signal 9 (pid {engine.pid}), likely by the kernel for lack of memory")
    raise MeasureError(f"ended with code {code}: {tail[-1] if tail else 'without a word'}")


def _lines(engine: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the engine's lines until its end, or until it says nothing for the stall time."""
    assert engine.stdout is not None
    rest, heard_at = b"", time.monotonic()
    while time.monotonic() - heard_at < STALL_S:
        if not select.select([engine.stdout], [], [], 1.0)[0]:
            continue
        got = os.read(engine.stdout.fileno(), 65536)
        heard_at = time.monotonic()
        if not got:
            engine.wait()
            return
        *lines, rest = (rest + got).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
