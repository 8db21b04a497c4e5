"""Commands about memory: devices and measure."""

import argparse
import time
from typing import Any
from urllib.parse import quote

from rich.text import Text

from llamastead.cli.client import Client, ClientError
from llamastead.cli.output import console, print_json, print_table

BAR = 40  # characters of a device's bar
LOOK_S = 0.2
PARTS = ("external", "held", "releasing", "measuring", "margin", "free")
FILLED = {"external": "x", "held": "#", "releasing": "~", "measuring": "m", "margin": "-", "free": "."}
COLOURS = {"external": "red", "held": "green", "releasing": "yellow", "measuring": "cyan", "margin": "blue"}


def devices(parsed: argparse.Namespace) -> int:
    """Show what each device has, who holds it, and what is free."""
    found: dict[str, Any] = Client.of(parsed).get("/props")["llamastead"]["devices"]
    if parsed.json:
        print_json(found)
        return 0
    if not found:
        raise ClientError("the supervisor has shown no devices yet")
    for name, account in found.items():
        title = " ".join(part for part in (name, account.get("description"), account.get("uuid")) if part)
        console().print(f"{title}: {_mib(account['total'])}")
        console().print(_bar(account))
        print_table(
            ("bytes", "size", "of"), [(part, _mib(size), whose) for part, size, whose in _rows(account)]
        )
        if account.get("problem"):
            console().print(Text(f"not read well: {account['problem']}", style="yellow"))
    return 0


def measure(parsed: argparse.Namespace) -> int:
    """Wait until a model's memory is measured, and show it by device."""
    client = Client.of(parsed)
    path = f"/v1/models/{quote(parsed.model, safe='')}"
    if parsed.load:
        client.post("/models/load", {"model": parsed.model})
    ends_at = time.monotonic() + parsed.wait
    while not _is_settled(client.get(path), load=parsed.load) and time.monotonic() < ends_at:
        time.sleep(LOOK_S)
    memory: dict[str, Any] = client.get(path).get("memory") or {}
    if parsed.json:
        print_json(memory)
        return 0
    if not memory:
        raise ClientError(f"nothing is known of {parsed.model}'s memory: its file isn't here")
    columns = [name for name in ("min", "max", "effective") if name in memory]
    names = sorted({device for column in columns for device in memory[column]})
    rows = [(device, *(_parts(memory[column].get(device, {})) for column in columns)) for device in names]
    print_table(("device", *columns), rows)
    console().print(f"source: {memory['source']}{_context_note(memory)}")
    if memory.get("failed"):
        console().print(Text(f"not measured: {memory['failed']}", style="yellow"))
    return 0


def _is_settled(model: dict[str, Any], *, load: bool) -> bool:
    memory = model.get("memory") or {}
    if load and model["status"]["value"] != "loaded" and not model["status"].get("failed"):
        return False
    return memory.get("source") == "measured" or bool(memory.get("failed"))


def _context_note(memory: dict[str, Any]) -> str:
    contexts = memory.get("contexts")
    note = f", contexts {contexts[0]} to {contexts[1]}" if contexts else ""
    return note + (f", loaded with {memory['effective_context']}" if "effective_context" in memory else "")


def _parts(parts: dict[str, int]) -> str:
    total = sum(size for name, size in parts.items() if name != "mapped")
    told = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in parts.items() if name != "mapped")
    return f"{_mib(total)} ({told})" if told else "-"


def _rows(account: dict[str, Any]) -> list[tuple[str, int, str]]:
    rows: list[tuple[str, int, str]] = [("external", account["external"], "other processes")]
    for part in ("held", "releasing", "measuring"):
        rows += [(part, size, model) for model, size in sorted(account[part].items())]
    rows += [("margin", account["margin"], ""), ("free", account["free"], "")]
    return rows + ([("debt", account["debt"], "more is held than there is")] if account["debt"] else [])


def _bar(account: dict[str, Any]) -> Text:
    bar, drawn, so_far = Text("["), 0, 0
    for part in PARTS:
        value = account[part]
        so_far += sum(value.values()) if isinstance(value, dict) else value
        until = min(BAR, round(BAR * so_far / max(1, account["total"])))
        bar.append(FILLED[part] * max(0, until - drawn), style=COLOURS.get(part, ""))
        drawn = max(drawn, until)
    return bar.append("]")


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
