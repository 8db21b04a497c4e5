"""What gateways and jobs ask of the supervisor: the `commands` stream, turned into events and answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamastead.shared.addresses import Address
from llamastead.shared.errors import ApiError
from llamastead.shared.store.connect import BLOCK_MS
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.store.records import Command
from llamastead.supervisor.core.events import LoadOrdered, TurnsAway, UnloadOrdered, Unresponsive
from llamastead.supervisor.downloads import Downloads
from llamastead.supervisor.driver import Driver
from llamastead.supervisor.health import refuses
from llamastead.supervisor.logfiles import log_path, read_log
from llamastead.supervisor.removing import Removing

log = logging.getLogger(__name__)

LOOK_VERBS = frozenset({"demand", "left", "idle"})
LOG_LINES_MAX = 10_000
AT_WORK_S = 1.0  # well below the time for which a gateway waits


class Commands:
    """Reads commands while this supervisor leads, hands orders to the driver, answers what needs no decision.

    `on_metadata` is told the identity of a file whose metadata a job has read, `on_measured` file identity
    and preset of what a job has measured; `address_of` is where an instance listens; `on_reload` has the
    registry read again for a command and answers it then, with what runs restarted or not.
    """

    def __init__(
        self,
        store: LeaderStore,
        run_dir: Path,
        on_metadata: Callable[[str], Awaitable[bool]],
        on_measured: Callable[[str, str], None],
        address_of: Callable[[str], Address | None],
        on_reload: Callable[[str, bool], None],
        downloads: Downloads,
        removing: Removing,
    ) -> None:
        self._store = store
        self._run_dir = run_dir
        self._on_metadata = on_metadata
        self._on_measured = on_measured
        self._address_of = address_of
        self._on_reload = on_reload
        self._downloads = downloads
        self._removing = removing
        self._asked_by: dict[str, str] = {}

    async def answer(self, command: str, payload: Mapping[str, Any]) -> None:
        """Answer a command that a gateway gave; orders of our own (start-up) have nobody to answer."""
        gateway = self._asked_by.pop(command, None)
        if gateway is not None:
            await self._store.answer(command, gateway, payload)

    async def tell_at_work(self) -> None:
        """Tell gateways what is still being done for them, until cancelled: they wait while they hear so."""
        while True:
            await asyncio.sleep(AT_WORK_S)
            if self._asked_by:
                await self._store.at_work(self._asked_by)

    async def run(self, driver: Driver) -> None:
        """Read until cancelled."""
        while True:
            taken = await self._store.read_commands(BLOCK_MS)
            looks = [command.id for command in taken if command.verb in LOOK_VERBS]
            if looks:
                driver.look()
                await self._store.done(looks)
            for command in taken:
                if command.verb not in LOOK_VERBS:
                    await self._take(command, driver)

    async def _take(self, command: Command, driver: Driver) -> None:
        if not command.gateway:
            if command.verb == "metadata":
                await self._on_metadata(command.fields["identity"])
            elif command.verb == "measured":
                self._on_measured(command.fields["identity"], command.fields["preset"])
            elif command.verb == "planned":
                self._downloads.look()
            elif command.verb == "broken":
                errors = command.fields["errors"]
                reason = f"answered {errors} requests with errors and none right since its load"
                driver.put(Unresponsive(command.fields["instance"], reason))
            elif command.verb == "refused" and await refuses(self._address_of(command.fields["instance"])):
                driver.put(TurnsAway(command.fields["instance"]))
            await self._store.done([command.id])
            return
        self._asked_by[command.id] = command.gateway
        if command.expired:
            await self._refuse(command, ApiError(503, f"'{command.verb}' was read too late and not done"))
            return
        model = command.fields.get("model", "")
        match command.verb:
            case "load":
                driver.put(LoadOrdered(model, command.id, command.again))
            case "unload":
                force = command.fields.get("force") == "1"
                if not await self._downloads.cancel(command.id, model, force=force):
                    instance = command.fields.get("instance") or None
                    driver.put(UnloadOrdered(model, command.id, force, instance, command.again))
            case "reload":
                self._on_reload(command.id, command.fields.get("apply") == "1")
            case "download":
                await self._downloads.order(command.id, model, again=command.again)
            case "remove":
                # What is on its way is called off for all; what is here is removed.
                if not await self._downloads.cancel(command.id, model, force=True):
                    self._removing.order(command.id, model, again=command.again)
            case "logs":
                await self._answer_logs(command, model)
            case _:
                await self._refuse(command, ApiError(400, f"Unknown command '{command.verb}'"))

    async def _answer_logs(self, command: Command, model: str) -> None:
        try:
            lines = min(int(command.fields.get("lines") or 200), LOG_LINES_MAX)
            piece = read_log(log_path(self._run_dir, model), lines, command.fields.get("offset", ""))
        except FileNotFoundError:
            await self._refuse(
                command, ApiError(404, f"Model '{model}' has no log: it never ran on this herd")
            )
        except ValueError:
            await self._refuse(
                command, ApiError(400, "lines must be a number, offset one that an earlier answer gave")
            )
        else:
            await self.answer(command.id, {"text": piece.text, "next": piece.next})

    async def _refuse(self, command: Command, error: ApiError) -> None:
        await self.answer(command.id, {"error": asdict(error)})
