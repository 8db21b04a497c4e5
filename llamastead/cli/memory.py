"""Commands about memory: devices and measure."""

import argparse
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from rich.text import Text

from llamastead.cli.client import Client, ClientError
from llamastead.cli.models import SETTLE_S, failed_to_load, load_stage, order_load
from llamastead.cli.output import console, duration, print_json, print_table, progress

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
    """Wait until a model's memory is measured, show how far that is, and then its figures by device."""
    client = Client.of(parsed)
    path = f"/v1/models/{quote(parsed.model, safe='')}"
    old = _earlier_load(client.get(path)) if parsed.load else None
    if parsed.load:
        order_load(client, parsed.model)
    with progress(quiet=parsed.json) as tell:
        model = _await_settled(client, path, parsed, tell, old)
    memory: dict[str, Any] = model.get("memory") or {}
    if parsed.json:
        print_json(memory)
        return 0
    if not memory:
        raise ClientError(f"nothing is known of {parsed.model}'s memory: its file isn't here")
    print_table(("device", "figure", "size", "of"), _figures(memory))
    for line in _sources(memory):
        console().print(line)
    if memory.get("places"):
        console().print(f"goes whole to one of: {', '.join(memory['places'])}")
    if memory.get("untold"):
        beyond = ", ".join(f"{_mib(size)} on {name}" for name, size in memory["untold"].items())
        console().print(f"seen in use beyond what its engine told: {beyond}")
    if memory.get("ran_out"):
        told = ", ".join(f"{_mib(size)} on {name}" for name, size in memory["ran_out"].items())
        console().print(Text(f"a load ran out of memory: it wanted {told} at least", style="yellow"))
    if memory.get("failed"):
        console().print(Text(f"not measured: {memory['failed']}", style="yellow"))
    return 0


def _earlier_load(model: dict[str, Any]) -> int | None:
    """Return when what is shown as effective was taken, if that is not by the load that lasts."""
    runs = model["status"]["value"] in ("loaded", "sleeping")
    return None if runs else (model.get("memory") or {}).get("effective_ms")


def _await_settled(
    client: Client, path: str, parsed: argparse.Namespace, tell: Callable[[str], None], old: int | None
) -> dict[str, Any]:
    """Return the model as /v1/models shows it, once nothing better is to be waited for or time is over. What
    a load took at `old` is not what is waited for.
    """
    began, seen_loading = time.monotonic(), False
    while True:
        model: dict[str, Any] = client.get(path)
        status, memory = model["status"], model.get("memory") or {}
        # An older failure still shows until the gateway has seen the new start.
        settled = seen_loading or time.monotonic() - began > SETTLE_S
        seen_loading |= status["value"] == "loading"
        if parsed.load and status.get("failed") and settled:
            raise failed_to_load(parsed.model, status)
        measured = memory.get("source") == "measured" or bool(memory.get("failed"))
        if measured and (not parsed.load or ("effective" in memory and memory.get("effective_ms") != old)):
            return model
        if time.monotonic() - began > parsed.wait:
            tell(f"still not over after {parsed.wait:g} s: this is what is known")
            return model
        tell(f"{parsed.model}: {_stage(status, memory, load=parsed.load and measured)}")
        time.sleep(LOOK_S)


def _stage(status: dict[str, Any], memory: dict[str, Any], *, load: bool) -> str:
    if not load:
        words: dict[str, str] = {"": "waiting for its turn", "queued": "waiting for a worker"}
        measuring: str = memory.get("measuring", "")
        return words.get(measuring, measuring.replace("running", "measuring"))
    return load_stage(status)


def _sources(memory: dict[str, Any]) -> list[str]:
    """Return where each figure comes from, and how old it is."""
    contexts = memory.get("contexts")
    lines = [
        f"min and max: {memory['source']}{_age(memory, 'age_s')}"
        + (f", contexts {contexts[0]} and {contexts[1]}" if contexts else "")
    ]
    if "effective" in memory:
        context = f" with context {memory['effective_context']}" if memory.get("effective_context") else ""
        lines.append(f"effective: a load{_age(memory, 'effective_age_s')}{context}")
    if memory.get("correction"):
        differences = ", ".join(f"{size / 2**20:+.0f} MiB on {n}" for n, size in memory["correction"].items())
        lines.append(f"correction of later starts: {differences}")
    return lines


def _age(memory: dict[str, Any], name: str) -> str:
    return f" {duration(memory[name])} ago" if name in memory else ""


def _figures(memory: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return a row for each figure that is known of each device; a narrow screen has room for them."""
    named = {name: memory.get(name, {}) for name in ("min", "max", "effective")}
    peak: dict[str, int] = memory.get("peak", {})
    rows = []
    for device in sorted({device for figure in (*named.values(), peak) for device in figure}):
        for name, figure in named.items():
            parts = {part: size for part, size in figure.get(device, {}).items() if part != "mapped"}
            if parts:
                of = ", ".join(f"{part} {_mib(size)}" for part, size in parts.items())
                rows.append((device, name, _mib(sum(parts.values())), of))
        if device in peak:
            rows.append((device, "peak", _mib(peak[device]), "what its process was seen to use"))
    return rows


def _rows(account: dict[str, Any]) -> list[tuple[str, int, str]]:
    strangers = sorted(account.get("strangers", {}).items(), key=lambda known: -known[1])
    whose = ", ".join(f"{who} {_mib(size)}" for who, size in strangers) or "other processes"
    rows: list[tuple[str, int, str]] = [("external", account["external"], whose)]
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
