"""`python -m bench [--quick] [--json] [--report FILE]`: Llamastead and llama-server's router in one table."""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.plan import FULL, QUICK, Plan
from bench.report import added_sections, print_table, to_json, to_markdown
from bench.results import Results
from bench.run import measure
from llamastead.shared.clock import wall_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a gate is not met, 2 if the time was over before all was measured.

    A page that is there already keeps the sections that people added to it, those with a heading.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one minute in place of ten")
    parser.add_argument("--json", action="store_true", help="all values for machines")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the page for the docs")
    asked = parser.parse_args(arguments)
    results = Results()
    late = False
    try:
        uvloop.run(_until_stopped(QUICK if asked.quick else FULL, results))
    except TimeoutError as problem:
        late = True
        results.remarks.append(f"not everything was measured: {problem or 'the time is over'}")
    if asked.report:
        day = time.strftime("%Y-%m-%d", time.gmtime(wall_s()))
        before = asked.report.read_text() if asked.report.exists() else ""
        asked.report.write_text(to_markdown(results, day) + added_sections(before))
    if asked.json:
        sys.stdout.write(to_json(results) + "\n")
    else:
        print_table(results)
    return 2 if late else 1 if results.failed else 0


async def _until_stopped(plan: Plan, results: Results) -> None:
    """Measure; SIGTERM stops everything that was started, as an interrupt does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await measure(plan, results)


if __name__ == "__main__":
    sys.exit(main())
