"""Follows a herd's /models/sse during a drill."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from llamastead.cli.client import ClientError, checked


@dataclass(frozen=True)
class Change:
    """A model's change of status, seen at monotonic `at`; `end_class` only says something of an end."""

    at: float
    model: str
    status: str
    instance: str
    end_class: str

    def record(self, began: float) -> dict[str, Any]:
        """Return it as JSON-ready values, `at_ms` counting from monotonic `began`."""
        at_ms = round(max(0.0, self.at - began) * 1000, 1)
        shown = {"at_ms": at_ms, "model": self.model, "status": self.status, "instance": self.instance}
        return shown | ({"end_class": self.end_class} if self.end_class else {})


class Watch:
    """Collects changes of status as they are told; `seen` holds those that no step has taken yet."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.opened = asyncio.Event()
        self.seen: list[Change] = []

    def take(self) -> list[Change]:
        """Return what was seen since the last time."""
        seen, self.seen = self.seen, []
        return seen

    async def run(self) -> None:
        """Follow the events until cancelled. Raises ClientError when their stream can't be had or ends."""
        async with self._http.stream("GET", "/models/sse", timeout=None) as answer:
            if not answer.is_success:
                await answer.aread()
            checked(answer)
            self.opened.set()
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    self._note(json.loads(line.removeprefix("data:")))
        raise ClientError("the stream of events ended during the drill: run it again")

    def _note(self, event: dict[str, Any]) -> None:
        data = event.get("data", {})
        if "status" in data and "progress" not in data:
            words = (data["status"], data.get("instance", ""), data.get("end_class", ""))
            self.seen.append(Change(time.monotonic(), event["model"], *words))
