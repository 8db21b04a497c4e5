"""Commands about models: ps, load, unload, queue, logs."""

import argparse
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from rich.text import Text

from llamastead.cli.client import Client, ClientError
from llamastead.cli.output import duration, print_json, print_table

LOOK_S = 0.2
ALREADY_RUNS = "model is already running"  # the wire's word, llama-server's as well; nothing to do then
SETTLE_S = 2.0  # a gateway's view may lag behind the order it passed on
COLOURS = {"ready": "green", "failed": "red", "stop_failed": "red", "loading": "yellow", "starting": "yellow"}


def ps(parsed: argparse.Namespace) -> int:
    """Show all models, those in memory first."""
    models = Client.of(parsed).get("/models")["data"]
    if parsed.json:
        print_json(models)
        return 0
    models.sort(key=lambda model: model["status"]["value"] == "unloaded")
    print_table(("model", "state", "context", "size", "source", "note"), [_row(model) for model in models])
    return 0


def load(parsed: argparse.Namespace) -> int:
    """Load models, and wait until they are."""
    client = Client.of(parsed)
    for name in parsed.models:
        try:
            client.post("/models/load", {"model": name})
        except ClientError as error:
            if str(error) != ALREADY_RUNS:
                raise
    if not parsed.no_wait:
        for name in parsed.models:
            print(_await_loaded(client, name))
    return 0


def unload(parsed: argparse.Namespace) -> int:
    """Unload models, or all, and wait until they are gone."""
    client = Client.of(parsed)
    names = parsed.models
    if parsed.all:
        names = [m["id"] for m in client.get("/models")["data"] if m["status"]["value"] != "unloaded"]
    elif not names:
        raise ClientError("name the models to unload, or give --all")
    for name in names:
        client.post("/models/unload", {"model": name, **({"force": True} if parsed.force else {})})
    if not parsed.no_wait:
        for name in names:
            print(_await_unloaded(client, name))
    return 0


def show_queue(parsed: argparse.Namespace) -> int:
    """Show who waits and why, in the order in which they are served."""
    answer = Client.of(parsed).get("/queue")
    if parsed.json:
        print_json(answer)
        return 0
    rows = [
        (str(e["position"]), e["model"], duration(e["waiting_ms"] / 1000), str(len(e["requests"])), e["wait"])
        for e in answer["queue"]
    ]
    print_table(("place", "model", "waiting", "requests", "why"), rows)
    return 0


def logs(parsed: argparse.Namespace) -> int:
    """Print the log of a model, or of all that run, and follow it."""
    client = Client.of(parsed)
    params = {"lines": str(parsed.lines), **({"follow": "true"} if parsed.follow else {})}
    if parsed.model:
        for line in client.lines(f"/logs/{quote(parsed.model, safe='')}", **params):
            print(line, flush=parsed.follow)
        return 0
    running = [m["id"] for m in client.get("/models")["data"] if m["status"]["value"] != "unloaded"]
    if not running:
        raise ClientError("no model runs: name one to see what its last run wrote")
    for name, line in _interleaved(client, running, params):
        print(f"{name} | {line}", flush=parsed.follow)
    return 0


def _interleaved(client: Client, names: list[str], params: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the lines of several logs as they come, each with its model."""
    came: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()

    def read(name: str) -> None:
        try:
            for line in client.lines(f"/logs/{quote(name, safe='')}", **params):
                came.put((name, line))
        except ClientError as error:
            came.put((name, f"-- {error}"))
        finally:
            came.put((name, None))

    for name in names:
        threading.Thread(target=read, args=(name,), daemon=True).start()
    open_logs = len(names)
    while open_logs:
        name, line = came.get()
        if line is None:
            open_logs -= 1
        else:
            yield name, line


def _row(model: dict[str, Any]) -> tuple[str | Text, ...]:
    status, known = model["status"], model.get("metadata", {})
    state = status.get("state") or status["value"]
    progress = status.get("progress") or {}
    if "value" in progress:
        note = f"{progress['value']:.0%}"
    else:
        note = status.get("reason") or ", ".join(model.get("aliases") or ())
    context = (model.get("meta") or {}).get("n_ctx")
    size = known.get("size_bytes")
    return (
        model["id"],
        Text(state, style=COLOURS.get(state, "")),
        str(context) if context else "-",
        _mebibytes(int(size)) if size else "-",
        model.get("source", "-"),
        note,
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.{0 if size >= 10 * 2**20 else 1}f} MiB"


def _await_loaded(client: Client, name: str) -> str:
    began = time.monotonic()
    loading = False
    while (status := _status(client, name))["value"] not in ("loaded", "sleeping"):
        # An older failure still shows until the gateway has seen the new start.
        over = loading or time.monotonic() - began > SETTLE_S
        if status.get("failed") and over:
            raise ClientError(f"{name} did not load: {status.get('reason') or 'see `llamastead logs`'}")
        if loading and status["value"] == "unloaded":
            raise ClientError(f"{name} was stopped before it was loaded")
        loading = status["value"] == "loading"
        time.sleep(LOOK_S)
    return f"{name} loaded after {duration(time.monotonic() - began)}"


def _await_unloaded(client: Client, name: str) -> str:
    began = time.monotonic()
    while _status(client, name)["value"] != "unloaded":
        time.sleep(LOOK_S)
    return f"{name} unloaded after {duration(time.monotonic() - began)}"


def _status(client: Client, name: str) -> dict[str, Any]:
    return dict(client.get(f"/v1/models/{quote(name, safe='')}")["status"])
