"""Commands about the Hugging Face hub: pull and rm."""

import argparse
import json
import queue
import sys
import threading
import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from llamastead.cli.client import Client, ClientError
from llamastead.cli.models import LOOK_S
from llamastead.cli.output import duration, print_json
from llamastead.shared.words import Source, WireStatus

LISTED_S = 10.0  # after which a model that came is listed, or never
LINE_S = 5.0  # between two lines of progress where no bar can be drawn
EXISTS = "already exists"  # the wire's word, llama-server's as well; nothing to do then
INTERRUPTED = 130


def pull(parsed: argparse.Namespace) -> int:
    """Bring a model from the hub and show how far it is. Ctrl-C asks to do without it."""
    client = Client.of(parsed)
    came: queue.SimpleQueue[dict[str, Any] | ClientError] = queue.SimpleQueue()
    opened = threading.Event()
    threading.Thread(target=_listen, args=(client, came, opened), daemon=True).start()
    # What happens right after the order must not be missed.
    opened.wait(5.0)
    began = time.monotonic()
    try:
        answer = client.post("/models", {"model": parsed.model})
    except ClientError as error:
        if EXISTS not in str(error):
            raise
        names = _names(client, parsed.model)
        shown = {"model": parsed.model, "state": "exists", "names": names}
        _finish(parsed, shown, f"{parsed.model} is here already{_called(names, parsed.model)}")
        return 0
    if answer.get("warning"):
        print(f"llamastead: {answer['warning']}", file=sys.stderr)
    if parsed.no_wait:
        _finish(parsed, answer, f"{parsed.model} is on its way")
        return 0
    try:
        total = _follow(parsed, came)
    except KeyboardInterrupt:
        left = client.post("/models/unload", {"model": parsed.model}).get("askers", 0)
        kept = f"goes on for {left} others" if left else "is called off; pull it again to begin anew"
        print(f"\n{parsed.model} {kept}", file=sys.stderr)
        return INTERRUPTED
    took = duration(time.monotonic() - began)
    names = _names(client, parsed.model)
    shown = {"model": parsed.model, "state": "downloaded", "bytes": total, "names": names}
    _finish(parsed, shown, f"{parsed.model} is here after {took}{_called(names, parsed.model)}")
    return 0


def rm(parsed: argparse.Namespace) -> int:
    """Remove models from the cache, their files included."""
    client = Client.of(parsed)
    for name in parsed.models:
        client.delete("/models", model=name)
        if not parsed.json:
            print(f"{name} removed")
    if parsed.json:
        print_json([{"model": name, "state": "removed"} for name in parsed.models])
    return 0


def _names(client: Client, asked: str) -> list[str]:
    """Return the names under which it is listed, which is a moment after it came; the download is none."""
    began = time.monotonic()
    while True:
        names = [
            model["id"]
            for model in client.get("/models")["data"]
            if model["source"] == Source.CACHE and model["status"]["value"] != WireStatus.DOWNLOADING
        ]
        names = [name for name in names if name == asked or name.startswith(f"{asked}:")]
        if names or time.monotonic() - began > LISTED_S:
            return names
        time.sleep(LOOK_S)


def _called(names: list[str], asked: str) -> str:
    """Return under which names to ask for it, unless that is the one that was asked for."""
    return f"; its name is {' or '.join(names)}" if names and names != [asked] else ""


def _finish(parsed: argparse.Namespace, shown: dict[str, Any], text: str) -> None:
    if parsed.json:
        print(json.dumps(shown, ensure_ascii=False), flush=True)
    else:
        print(text)


def _listen(
    client: Client, came: "queue.SimpleQueue[dict[str, Any] | ClientError]", opened: threading.Event
) -> None:
    try:
        for event in client.events(opened.set):
            came.put(event)
        came.put(ClientError("the stream of events ended; `llamastead ps` shows how far it is"))
    except ClientError as error:
        came.put(error)
    finally:
        opened.set()


def _follow(parsed: argparse.Namespace, came: "queue.SimpleQueue[dict[str, Any] | ClientError]") -> int:
    """Show progress until the download ends; return its bytes. Raises ClientError when it failed."""
    total = 0
    with _Shown(parsed) as shown:
        while True:
            event = came.get()
            if isinstance(event, ClientError):
                raise event
            if event.get("model") != parsed.model:
                continue
            match event["event"]:
                case "download_progress":
                    files = event["data"]["progress"].values()
                    total = sum(file["total"] for file in files)
                    shown.move(sum(file["done"] for file in files), total)
                case "download_finished":
                    return total
                case "download_failed":
                    raise ClientError(event.get("data", {}).get("error") or f"{parsed.model} did not arrive")


class _Shown:
    """Progress as a bar on a terminal, as lines elsewhere, as JSON lines for scripts."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        self._parsed = parsed
        self._bar: Progress | None = None
        self._told = 0.0

    def __enter__(self) -> "_Shown":
        if sys.stderr.isatty() and not self._parsed.json:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
            self._bar = Progress(
                *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
            )
            self._task = self._bar.add_task(self._parsed.model, total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def move(self, done: int, total: int) -> None:
        """Show that so many bytes of so many are here."""
        if self._parsed.json:
            print(json.dumps({"model": self._parsed.model, "bytes": done, "total": total}), flush=True)
        elif self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._told >= LINE_S:
            self._told = time.monotonic()
            share = f"{done / total:.0%} of " if total else ""
            print(f"{self._parsed.model}: {share}{total / 2**20:.1f} MiB", flush=True)
