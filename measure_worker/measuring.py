"""One measurement: an engine is started to say what it would take, and ended before it takes it."""

import os
import resource
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from llamastead.measure_worker.lifeline import end_with_parent
from llamastead.shared.devices.device import MIB
from llamastead.shared.figures import Breakdown, Parts

STALL_S = 30.0  # without a word from the engine
TAIL_LINES = 20
_READY = '"state":"ready"'
# What the worker's own environment gives an engine: how to run and where the devices are, nothing of options.
_PASSED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")


class MeasureError(Exception):
    """The engine did not tell; the message says why."""


def measure(
    argv: Sequence[str], variables: Mapping[str, str], folder: Path, beat: Callable[[], None]
) -> dict[str, Parts]:
    """Return what the engine says it would take per device, by its own names of them.

    `argv` is its command line without `--host`, with `--fit on` and a log of verbosity 4; `variables` are set
    for it; `folder` is its own, with a short path; `beat` is called at each piece of its log. It ends with
    this process, however that ends. Raises MeasureError, and what `beat` raises.
    """
    environ = {name: os.environ[name] for name in _PASSED if name in os.environ}
    environ |= {**variables, "LLAMA_SERVER_ROUTER_PORT": "0", "GGML_NO_BACKTRACE": "1"}
    environ["XDG_CONFIG_HOME"] = str(folder)
    try:
        engine = subprocess.Popen(
            [*argv, "--host", str(folder / "m.sock")],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )
    except OSError as error:
        raise MeasureError(f"{argv[0]} can't be run: {error.strerror}") from None
    try:
        return _listen(engine, beat)
    finally:
        engine.kill()
        engine.communicate()


def _listen(engine: subprocess.Popen[bytes], beat: Callable[[], None]) -> dict[str, Parts]:
    breakdown, tail = Breakdown(), deque[str](maxlen=TAIL_LINES)
    for line in _lines(engine):
        beat()
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
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        raise MeasureError(
            f"the engine (pid {engine.pid}) was killed by signal 9, likely by the kernel for lack of memory; "
            f"it had {most // MIB} MiB"
        )
    raise MeasureError(f"ended with code {code}: {tail[-1] if tail else 'without a word'}")


def _lines(engine: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the engine's lines until its end, or until it says nothing for the stall time."""
    assert engine.stdout is not None
    rest, heard_at = b"", time.monotonic()
    with selectors.DefaultSelector() as heard:
        heard.register(engine.stdout, selectors.EVENT_READ)
        while time.monotonic() - heard_at < STALL_S:
            if not heard.select(1.0):
                continue
            got = os.read(engine.stdout.fileno(), 65536)
            heard_at = time.monotonic()
            if not got:
                engine.wait()
                return
            *lines, rest = (rest + got).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
