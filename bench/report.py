"""A run's results for people, for machines and for docs/measured.md."""

import json

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.proc import machine
from bench.results import GENERATOR, Figure, Results

SUBJECTS = ("direct", "router", "llamastead", "nginx", "caddy", "httpx", "two gateways")
BUSY_PERCENT = 80
_VERDICTS = {True: "yes", False: "NO", None: ""}


def print_table(results: Results) -> None:
    """Print one table, what was remarked, and whether every gate was met."""
    console = Console(width=None if Console().is_terminal else 160)
    subjects = _present(results)
    table = Table("figure", "unit", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (*subjects, "ratio"):
        table.add_column(name, justify="right")
    table.add_column("gate")
    table.add_column("met")
    for figure in results.figures.values():
        table.add_row(*_cells(figure, subjects))
    console.print(table)
    for line in _remarks(results):
        console.print(line, highlight=False, markup=False)


def to_json(results: Results) -> str:
    """Return everything as JSON."""
    figures = [
        {
            "figure": figure.name,
            "unit": figure.unit,
            "medians": figure.medians,
            "values": figure.values,
            "ratio": figure.ratio,
            "gate": figure.gate.text if figure.gate else None,
            "met": figure.holds,
        }
        for figure in results.figures.values()
    ]
    return json.dumps({"machine": machine(), "remarks": results.remarks, "figures": figures}, indent=2)


def to_markdown(results: Results, day: str) -> str:
    """Return the page docs/measured.md."""
    subjects = _present(results)
    head = ["figure", "unit", *subjects, "ratio", "gate", "met"]
    rows = [head, ["---", "---", *["--:"] * (len(subjects) + 1), "---", "---"]]
    rows += [list(_cells(figure, subjects)) for figure in results.figures.values()]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    remarks = "\n".join(f"- {line}" for line in _remarks(results))
    return f"""\
# Measured

Written by `make bench REPORT=1` on {day}.

Machine: {machine()}.

Medians of all rounds; the subjects took turns in one run. `direct` is the engine alone, `router` is
llama-server's own router mode; nginx, caddy and httpx stand as plain proxies before the engine that `direct`
asks. CPU is that of everything between client and engine: for Llamastead gateway, supervisor, worker, Redis,
holders and `up` together. `ratio` is Llamastead over the router. The models are random and tiny, so that the
way to the model is measured and not the model. Absolute times depend on the machine, ratios much less.

{table}

{remarks}
"""


def added_sections(page: str) -> str:
    """Return what people added below the table of an earlier page: everything from its first section on."""
    begins = page.find("\n## ")
    return page[begins:] if begins >= 0 else ""


def _present(results: Results) -> list[str]:
    seen = {subject for figure in results.figures.values() for subject in figure.values}
    return [name for name in SUBJECTS if name in seen]


def _cells(figure: Figure, subjects: list[str]) -> list[str]:
    medians = figure.medians
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    shown = [_number(medians[name]) if name in medians else "" for name in subjects]
    gate = figure.gate.text if figure.gate else ""
    return [figure.name, figure.unit, *shown, ratio, gate, _VERDICTS[figure.holds]]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _remarks(results: Results) -> list[str]:
    gates = [figure for figure in results.figures.values() if figure.holds is not None]
    verdict = f"gates met: {len(gates) - len(results.failed)} of {len(gates)}"
    cut = [
        f"{name}: {number} streams ended before their end" for name, number in results.cut.items() if number
    ]
    return [
        *results.remarks,
        *cut,
        *_generator(results),
        verdict,
        *(f"not met: {f.name}" for f in results.failed),
    ]


def _generator(results: Results) -> list[str]:
    """Say how busy the load generator was at most: near 100 % of its core it would be what is measured."""
    shares = [
        (share, subject)
        for figure in results.figures.values()
        if figure.name.endswith(GENERATOR)
        for subject, share in figure.medians.items()
        if subject in ("router", "llamastead")
    ]
    if not shares:
        return []
    share, subject = max(shares)
    verdict = "not the bottleneck" if share < BUSY_PERCENT else "it limits what is measured"
    return [f"load generator: at most {share:.0f} % of a core, for {subject}: {verdict}"]
