"""`python -m bench.policy [--json] [--seed N] [--share S]`: a table of all runs, and the verdicts."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.policy.report import POLICIES, Outcome, Verdict, replay, verdicts
from bench.policy.traces import traces


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, print, and return 1 if a verdict is no."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.policy", description="scheduling policies compared"
    )
    parser.add_argument("--json", action="store_true", help="figures and verdicts for machines")
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
    else:
        _print(outcomes, held)
    return 0 if all(verdict.holds for verdict in held) else 1


def _print(outcomes: Sequence[Outcome], held: Sequence[Verdict]) -> None:
    console = Console()
    table = Table("trace", "policy", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("swaps", "p50 s", "p95 s", "max s", "answers/s"):
        table.add_column(name, justify="right")
    first, *_, last = POLICIES
    for outcome in outcomes:
        figures = (outcome.p50, outcome.p95, outcome.longest)
        table.add_row(
            outcome.trace if outcome.policy == first else "",
            outcome.policy,
            str(outcome.swaps),
            *(f"{figure:.1f}" for figure in figures),
            f"{outcome.per_second:.3f}",
            end_section=outcome.policy == last,
        )
    console.print(table)
    for verdict in held:
        console.print(f"{'yes' if verdict.holds else 'NO '} {verdict.text}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
