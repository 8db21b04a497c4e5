"""How the command speaks: tables for people, JSON for scripts."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDE = 10_000  # nothing is cut where nobody looks at a screen


def console() -> Console:
    """Return the console of standard output: obeys NO_COLOR and FORCE_COLOR, gives a pipe whole lines."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE
    return Console(highlight=False, markup=False, emoji=False, width=wide, soft_wrap=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print rows under upper-case column names, without lines, as `ps` and `docker ps` do.

    On a narrow screen the last column, which has the longest texts, goes on in further lines.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name.upper(), no_wrap=name != columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_json(value: Any) -> None:
    """Print a value as JSON on indented lines."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield what tells how far a wait is: one live line on a terminal, else a line for each change.

    It goes to standard error, so that the result can be piped; `quiet` tells nothing.
    """
    told = ""
    terminal = Console(stderr=True, highlight=False, markup=False, emoji=False)

    def tell_line(text: str) -> None:
        nonlocal told
        if text != told and not quiet:
            print(text, file=sys.stderr, flush=True)
        told = text

    if quiet or not terminal.is_terminal:
        yield tell_line
        return
    with terminal.status("") as status:
        yield lambda text: status.update(Text(text))


def complain(message: str) -> None:
    """Print an error, in one line, on standard error."""
    print(f"llamastead: {message}", file=sys.stderr)


def duration(seconds: float) -> str:
    """Return a time as people say it: 0.4s, 12s, 3m, 2h, 5d."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"
