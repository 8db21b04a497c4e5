"""`python -m bench.policy [--json|--markdown] [--seed N] [--share S]`: a table of all runs, and verdicts."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.policy.report import POLICIES, Outcome, Verdict, replay, verdicts
from bench.policy.traces import traces

COLUMNS = ("trace", "policy", "swaps", "p50 s", "p95 s", "max s", "answers/s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, print, and return 1 if a verdict is no."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.policy", description="scheduling policies compared"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="figures and verdicts for machines")
    form.add_argument("--markdown", action="store_true", help="the table as docs/scheduling.md has it")
    parser.add_argument("--seed", type=int, default=1, help="which traces (default: 1)")
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of each trace's requests (default: 1)"
    )
    asked = parser.parse_args(arguments)
    outcomes = [
        replay(trace, name, make)
        for trace in traces(asked.seed, asked.share)
        for name, make in POLICIES.items()
    ]
    held = verdicts(outcomes)
    if asked.json:
        found = {
            "seed": asked.seed,
            "runs": [asdict(o) for o in outcomes],
            "verdicts": [asdict(v) for v in held],
        }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    elif asked.markdown:
        sys.stdout.write(markdown(outcomes))
    else:
        _print(outcomes, held)
    return 0 if all(verdict.holds for verdict in held) else 1


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the table for docs/scheduling.md."""
    head = ["| " + " | ".join(COLUMNS) + " |", "|---|---|" + "--:|" * (len(COLUMNS) - 2)]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in _rows(outcomes))]) + "\n"


def _rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each run; a trace is named once, beside the first policy."""
    first = next(iter(POLICIES))
    for outcome in outcomes:
        waits = (outcome.p50, outcome.p95, outcome.longest)
        yield (
            outcome.trace if outcome.policy == first else "",
            outcome.policy,
            str(outcome.swaps),
            *(f"{wait:.1f}" for wait in waits),
            f"{outcome.per_second:.3f}",
        )


def _print(outcomes: Sequence[Outcome], held: Sequence[Verdict]) -> None:
    console = Console()
    table = Table(*COLUMNS[:2], box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS[2:]:
        table.add_column(name, justify="right")
    for number, row in enumerate(_rows(outcomes), start=1):
        table.add_row(*row, end_section=number % len(POLICIES) == 0)
    console.print(table)
    for verdict in held:
        console.print(f"{'yes' if verdict.holds else 'NO '} {verdict.text}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
