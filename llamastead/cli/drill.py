"""`llamastead drill`: asks for models in a known order and writes down what the herd did."""

import argparse
import asyncio
import json
import os
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.status import Status

from llamastead.cli.client import Client, ClientError, settings_of
from llamastead.cli.output import print_json
from llamastead.cli.probe import Answer, ask
from llamastead.cli.survey import (
    Machine,
    host_memory,
    kind_of,
    preset,
    read_herd,
    read_models,
    running,
    without_secrets,
)
from llamastead.cli.watch import Watch
from llamastead.shared.clock import wall_ms
from llamastead.shared.settings import Settings

FORM = 1
ANSWER_S = 120.0  # for a short answer, once the herd has let its request in
SETTLE_S = 2.0  # events and listings lag behind answers by so much at most
LOOK_S = 0.05
AT_ONCE = "+"


def drill(parsed: argparse.Namespace) -> int:
    """Run a sequence of requests and print or keep the record; 1 when a request was not answered in full."""
    if parsed.output and not os.access(parsed.output.parent, os.W_OK):
        raise ClientError(f"the record can't be written to {parsed.output}: no such folder, or not ours")
    client = Client.of(parsed)
    local = None if parsed.url else settings_of(parsed)
    with client.readable_errors(), Console(stderr=True).status("looking at the herd") as status:
        record = asyncio.run(_drill(client, local, parsed.sequence, status))
    kept = [path for path in (parsed.output, local and record_path(local.run_dir)) if path]
    for path in kept:
        _keep(path, record)
    if parsed.json:
        print_json(record)
    elif kept:
        print(f"kept in {kept[0]}; `llamastead report {kept[0]}` makes a report of it")
    else:
        print("kept nowhere: give -o FILE to make a report of it")
    return int(any(answer["error"] for step in record["steps"] for answer in step["answers"]))


def record_path(run_dir: Path) -> Path:
    """Return where the record of the last drill of a run folder's herd lies."""
    return run_dir / "drill.json"


def plan(sequence: Iterable[str], names: Collection[str]) -> list[list[str]]:
    """Return the steps of a sequence, each a list of names: `A+B` asks for both at once, unless it is a name.

    Raises ClientError for a step without a name.
    """
    steps = [[word] if word in names else word.split(AT_ONCE) for word in sequence]
    if not all(map(all, steps)):
        raise ClientError(f"a step needs models, as in `llamastead drill A B A{AT_ONCE}C`")
    return steps


async def survey(http: httpx.AsyncClient, url: str, local: bool) -> dict[str, Any]:
    """Return a record without steps: when, which herd, which presets, how much memory.

    `local`: the herd runs on this machine. Raises ClientError.
    """
    models = await read_models(http)
    return {
        "form": FORM,
        "began": _now(),
        "url": without_secrets([url])[0],
        "herd": await read_herd(http),
        "presets": [preset(entry) for entry in models.values()],
        "memory": host_memory() if local else None,
        "running": running(models),
        "steps": [],
    }


async def _drill(
    client: Client, local: Settings | None, sequence: list[str], status: Status
) -> dict[str, Any]:
    machine = Machine(local) if local else None
    try:
        async with client.concurrent() as http:
            record = await survey(http, client.url, local is not None)
            names = {name for known in record["presets"] for name in (known["model"], *known["aliases"])}
            steps = plan(sequence, names)
            models = await read_models(http, {name for step in steps for name in step} - names)
            canonical = {alias: name for name, entry in models.items() for alias in (name, *entry["aliases"])}
            record["presets"] = [preset(entry) for entry in models.values()]
            record |= {"id": f"drill-{secrets.token_hex(4)}", "sequence": sequence}
            asked = [[canonical[name] for name in step] for step in steps]
            record["steps"] = await _Run(http, machine, record, models, status).run(asked)
            record["ended"] = _now()
            return record
    finally:
        if machine:
            await machine.close()


class _Run:
    """The steps of one drill."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        machine: Machine | None,
        record: dict[str, Any],
        models: dict[str, dict[str, Any]],
        status: Status,
    ) -> None:
        self._http = http
        self._machine = machine
        self._kinds = {name: kind_of(entry) for name, entry in models.items()}
        self._patience_s = record["herd"]["limits"].get("queue_timeout", 0.0) + ANSWER_S
        self._status = status
        self._watch = Watch(http)
        self._id = record["id"]

    async def run(self, steps: list[list[str]]) -> list[dict[str, Any]]:
        """Carry the steps out, one after the other. Raises ClientError when the events can't be followed."""
        watching = asyncio.create_task(self._watch.run())
        stepping = asyncio.create_task(self._steps(steps))
        try:
            await asyncio.wait((watching, stepping), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching
            return await stepping
        finally:
            watching.cancel()
            stepping.cancel()
            await asyncio.gather(watching, stepping, return_exceptions=True)

    async def _steps(self, steps: list[list[str]]) -> list[dict[str, Any]]:
        await self._watch.opened.wait()
        done = []
        for number, models in enumerate(steps, start=1):
            self._status.update(f"step {number} of {len(steps)}: {f' {AT_ONCE} '.join(models)}")
            step = await self._step(number, models)
            self._status.console.print(said(step, len(steps)), highlight=False, soft_wrap=True, markup=False)
            done.append(step)
        return done

    async def _step(self, number: int, models: list[str]) -> dict[str, Any]:
        before = running(await read_models(self._http, models))
        began = time.monotonic()
        answers = await asyncio.gather(
            *(self._ask(model, f"{self._id}-{number}-{place}") for place, model in enumerate(models, start=1))
        )
        listed = await self._settled(answers)
        changes = self._watch.take()
        ended = {change.instance for change in changes if change.status == "unloaded"}
        for answer in answers:
            pid = listed[answer.model]["status"].get("pid")
            if answer.process is None and pid and answer.instance and answer.instance not in ended:
                answer.process = {"model": answer.model, "pid": pid}
        return {
            "step": number,
            "models": models,
            "before": before,
            "answers": [asdict(answer) for answer in answers],
            "events": [change.record(began) for change in changes],
            "after": running(listed),
        }

    async def _ask(self, model: str, request_id: str) -> Answer:
        answer = await ask(self._http, model, self._kinds[model], request_id, self._patience_s)
        if self._machine and answer.instance:
            # At once: another step of the drill may be about to stop this process.
            answer.process = await self._machine.process(answer.instance)
        return answer

    async def _settled(self, answers: list[Answer]) -> dict[str, dict[str, Any]]:
        """Return the models once events and listing tell all that the answers were the end of."""
        loaded = {answer.model for answer in answers if answer.path == "cold"}
        gives_up_at = time.monotonic() + SETTLE_S
        while True:
            models = await read_models(self._http, {answer.model for answer in answers})
            changes = {change.model: change.status for change in self._watch.seen}
            agreed = all(
                models[name]["status"]["value"] == status
                for name, status in changes.items()
                if name in models
            )
            told = loaded <= {change.model for change in self._watch.seen if change.status == "loaded"}
            if (agreed and told) or time.monotonic() > gives_up_at:
                return models
            await asyncio.sleep(LOOK_S)


def said(step: dict[str, Any], count: int) -> str:
    """Return a step in one line, for people who watch."""
    answers = "; ".join(
        f"{answer['model']} failed: {answer['error']}"
        if answer["error"]
        else f"{answer['model']} {answer['path']}, first byte {answer['first_byte_ms']:.0f} ms"
        for answer in step["answers"]
    )
    stops = [event["model"] for event in step["events"] if event["status"] == "unloaded"]
    return f"step {step['step']}/{count}: {answers}" + (f"; stopped {', '.join(stops)}" if stops else "")


def _keep(path: Path, record: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        draft.replace(path)
    except OSError as error:
        raise ClientError(f"the record can't be written to {path}: {error.strerror}") from None


def _now() -> str:
    return datetime.fromtimestamp(wall_ms() / 1000, UTC).isoformat(timespec="seconds")
