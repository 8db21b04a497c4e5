"""Commands about models: ps, load, unload, reload, queue, logs."""

import argparse
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import quote

from rich.text import Text

from llamastead.cli.client import RELOAD_PATIENCE_S, Client, ClientError
from llamastead.cli.output import complain, duration, print_json, print_table, progress

LOOK_S = 0.2
NOT_RUNNING = ("unloaded", "downloading", "downloaded")
ALREADY_RUNS = "model is already running"  # the wire's word, llama-server's as well; nothing to do then
NOT_LOADED = "model is not running"  # likewise
SURE_LOOKS = 5  # after which what a gateway shows is no older view
SETTLE_S = 2.0  # a gateway's view may lag behind the order it passed on
COLOURS = {
    "ready": "green",
    "failed": "red",
    "stop_failed": "red",
    "loading": "yellow",
    "downloading": "yellow",
    "starting": "yellow",
}


def ps(parsed: argparse.Namespace) -> int:
    """Show all models, those in memory first."""
    models = _listed(Client.of(parsed))
    if parsed.json:
        print_json(models)
        return 0
    models.sort(key=lambda model: model["status"]["value"] == "unloaded")
    print_table(("model", "state", "context", "size", "source", "note"), [_row(model) for model in models])
    if not models:
        complain("no models: the herd is just starting, or has none; see `llamastead check`")
    return 0


def load(parsed: argparse.Namespace) -> int:
    """Load models, and wait until they are."""
    client = Client.of(parsed)
    for name in parsed.models:
        order_load(client, name)
    failed = False
    for name in () if parsed.no_wait else parsed.models:
        try:
            with _on_screen() as tell:
                took = _await_loaded(client, name, tell)
        except ClientError as error:
            complain(str(error))
            failed = True
        else:
            print(f"{name} loaded after {duration(took)}", flush=True)
    return int(failed)


def order_load(client: Client, name: str) -> None:
    """Order a load; a model that runs is loaded already."""
    try:
        client.post("/models/load", {"model": name})
    except ClientError as error:
        if str(error) != ALREADY_RUNS:
            raise


def unload(parsed: argparse.Namespace) -> int:
    """Unload models, or all, and wait until they are gone."""
    client = Client.of(parsed)
    names = parsed.models
    if parsed.all and names:
        raise ClientError("name the models to unload, or give --all, not both")
    if parsed.all:
        names = _running(client)
    elif not names:
        raise ClientError("name the models to unload, or give --all")
    for name in names:
        _order_unload(client, name, force=parsed.force, may_be_gone=parsed.all)
    if not parsed.no_wait:
        for name in names:
            with _on_screen() as tell:
                took = _await_unloaded(client, name, tell)
            print(f"{name} unloaded after {duration(took)}")
    return 0


def _order_unload(client: Client, name: str, *, force: bool, may_be_gone: bool) -> None:
    try:
        client.post("/models/unload", {"model": name, **({"force": True} if force else {})})
    except ClientError as error:
        if str(error) != NOT_LOADED:
            raise
        if not may_be_gone:
            raise ClientError(f"{name} is not loaded") from None


def reload(parsed: argparse.Namespace) -> int:
    """Have the registry read again and show what changed; it loads nothing unless `--apply` restarts it."""
    client = Client.of(parsed)
    answer = client.post("/models/reload", {"apply": parsed.apply}, RELOAD_PATIENCE_S)
    if parsed.json:
        print_json(answer)
        return 0
    lines = [f"added      {name}" for name in answer["added"]]
    lines += [f"removed    {name}" for name in answer["removed"]]
    lines += [f"changed    {name}: {', '.join(keys)}" for name, keys in answer["changed"].items()]
    lines += [f"restarted  {name}" for name in answer["restarted"]]
    print(
        "\n".join(lines) or f"nothing changed since the files were read last; revision {answer['revision']}"
    )
    # The herd reads changed files by itself, often before it is told to: the change is then no news here.
    old = [] if parsed.apply else [m["id"] for m in _listed(client) if m["status"].get("changed")]
    if old:
        how = "`llamastead reload --apply` restarts at once what is idle"
        print(f"old settings until its next load: {', '.join(old)}; {how}")
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
    running = _running(client)
    if not running:
        raise ClientError("no model runs: name one to see what its last run wrote")
    for name, line in _interleaved(client, running, params):
        print(f"{name} | {line}", flush=parsed.follow)
    return 0


def _listed(client: Client) -> list[dict[str, Any]]:
    """Return all models, hidden ones too: they are in memory like any other."""
    models: list[dict[str, Any]] = client.get("/models", hidden="true")["data"]
    return models


def _running(client: Client) -> list[str]:
    return [m["id"] for m in _listed(client) if m["status"]["value"] not in NOT_RUNNING]


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
    progress, download = status.get("progress") or {}, status.get("download") or {}
    if download.get("total"):
        note = f"{download['bytes'] / download['total']:.0%} of {_mebibytes(download['total'])}"
    elif "value" in progress:
        note = f"{progress['value']:.0%}"
    else:
        changed = "changed since it was loaded" if status.get("changed") else ""
        place = f"on {status['place']}" if status.get("place") else ""
        told = status.get("reason") or status.get("warning") or changed or place
        if model.get("hidden"):
            told = f"hidden; {told}" if told else "hidden"
        aliases = ", ".join(model.get("aliases") or ())
        note = f"{told}; also {aliases}" if told and aliases else told or aliases
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


def _on_screen() -> AbstractContextManager[Callable[[str], None]]:
    """Return what tells how far a wait is where somebody looks; a script reads the result alone."""
    return progress(quiet=not sys.stderr.isatty())


def _await_loaded(client: Client, name: str, tell: Callable[[str], None]) -> float:
    """Return after how many seconds it is loaded; `tell` hears how far it is. Raises ClientError."""
    began = time.monotonic()
    loading, away = False, 0
    while (status := _status(client, name))["value"] not in ("loaded", "sleeping"):
        # An older failure still shows until the gateway has seen the new start.
        over = loading or time.monotonic() - began > SETTLE_S
        if status.get("failed") and over:
            raise failed_to_load(name, status)
        if loading and status["value"] == "unloaded":
            raise _not_loaded(name, status)
        # What was told to load and waits no more came and went, maybe while another one was waited for.
        if over and status["value"] == "unloaded":
            away = 0 if _is_awaited(client, name) else away + 1
            if away == SURE_LOOKS:
                raise _not_loaded(name, status)
        loading = status["value"] == "loading"
        tell(f"{name}: {load_stage(status)}")
        time.sleep(LOOK_S)
    return time.monotonic() - began


def _not_loaded(name: str, status: dict[str, Any]) -> ClientError:
    """Return what to say of a model that was stopped in its load or right after it."""
    return ClientError(f"{name} is not loaded: {status.get('reason') or 'no reason is known'}")


def _is_awaited(client: Client, name: str) -> bool:
    """Whether its load is still to come. What a gateway shows of a model may lag behind this."""
    model = client.get(f"/v1/models/{quote(name, safe='')}")["id"]  # the queue knows no aliases
    return any(entry["model"] == model for entry in client.get("/queue")["queue"])


def failed_to_load(name: str, status: dict[str, Any]) -> ClientError:
    """Return what to say of a model whose load failed."""
    reason = status.get("reason") or "no reason is known"
    return ClientError(f"{name} did not load: {reason}; `llamastead logs {shlex.quote(name)}` has more")


def load_stage(status: dict[str, Any]) -> str:
    """Return how far a load is, by the `status` of /models."""
    if status["value"] == "unloaded":
        return "waiting for its turn; `llamastead queue` says why"
    share = (status.get("progress") or {}).get("value")
    return f"{status['value']} {share:.0%}" if share is not None else str(status["value"])


def _await_unloaded(client: Client, name: str, tell: Callable[[str], None]) -> float:
    began = time.monotonic()
    while (status := _status(client, name))["value"] != "unloaded":
        tell(f"{name}: {status.get('state') or status['value']}")
        time.sleep(LOOK_S)
    return time.monotonic() - began


def _status(client: Client, name: str) -> dict[str, Any]:
    status: dict[str, Any] = client.get(f"/v1/models/{quote(name, safe='')}")["status"]
    return status
