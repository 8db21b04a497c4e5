"""`llamastead report`: makes what an operator signs of a drill's record, or of the herd as it is."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from llamastead.cli.client import Client, ClientError, settings_of
from llamastead.cli.drill import FORM, record_path, survey
from llamastead.cli.findings import conclusions, figures, not_observed
from llamastead.cli.report_text import markdown


def report(parsed: argparse.Namespace) -> int:
    """Print or write the report: Markdown, or JSON with what was computed of the record."""
    record = _record(parsed)
    text = _json(record) if parsed.json else markdown(record)
    if parsed.output is None:
        sys.stdout.write(text)
        return 0
    try:
        parsed.output.write_text(text)
    except OSError as error:
        raise ClientError(f"the report can't be written to {parsed.output}: {error.strerror}") from None
    return 0


def _json(record: dict[str, Any]) -> str:
    computed = {
        "record": record,
        "figures": figures(record),
        "conclusions": conclusions(record),
        "not_observed": not_observed(record),
    }
    return json.dumps(computed, indent=2, ensure_ascii=False) + "\n"


def _record(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the record asked for, else the last drill's, else one without steps; say which on stderr."""
    local = None if parsed.url else settings_of(parsed)
    last = record_path(local.run_dir) if local else None
    path = parsed.record or (last if last and last.exists() else None)
    if path:
        record = _read(path)
        print(f"llamastead: the drill of {record['began']}, {path}", file=sys.stderr)
        return record
    client = Client.of(parsed)
    with client.readable_errors():
        record = asyncio.run(_survey(client, local is not None))
    print("llamastead: no drill was run: the report has the configuration only", file=sys.stderr)
    return record


async def _survey(client: Client, local: bool) -> dict[str, Any]:
    async with client.concurrent() as http:
        return await survey(http, client.url, local)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise ClientError(f"{path} can't be read: {error.strerror}") from None
    except ValueError:
        raise ClientError(f"{path} is no record of `llamastead drill`: it isn't JSON") from None
    if not isinstance(record, dict) or record.get("form") != FORM:
        raise ClientError(f"{path} is no record of `llamastead drill` that this version reads")
    return record
