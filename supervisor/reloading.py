"""Reading the registry again: for whoever asks and when a source changed, one at a time, for all at once."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llamastead.shared.errors import ApiError
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.core.events import Event, RestartOrdered
from llamastead.supervisor.core.state import State
from llamastead.supervisor.registry.changes import Changes, compare
from llamastead.supervisor.registry.model import RegistryError

log = logging.getLogger(__name__)

REST_LOOKS = 10
QUIET_SHARE = 20  # many files are looked at less often


@dataclass(frozen=True)
class _Order:
    command: str
    apply: bool


class Reloading:
    """Runs as long as the reign. `taken_over` makes a new registry the herd's, `answer` answers a command."""

    def __init__(
        self,
        configuration: Configuration,
        store: LeaderStore,
        wanted: asyncio.Event,
        taken_over: Callable[[Changes], Awaitable[None]],
        answer: Callable[[str, Mapping[str, Any]], Awaitable[None]],
        state: Callable[[], State],
        tell: Callable[[Event], None],
    ) -> None:
        """`wanted` is set from outside, too, by a signal: as often as may be before the next reading."""
        self._configuration = configuration
        self._store = store
        self._wanted = wanted
        self._taken_over = taken_over
        self._answer = answer
        self._state = state
        self._tell = tell
        self._orders: list[_Order] = []
        self._callers: list[asyncio.Future[None]] = []
        self._over = False

    def order(self, command: str, apply: bool) -> None:
        """Have the registry read and the command answered; `apply` restarts what runs with old settings."""
        self._orders.append(_Order(command, apply))
        self._wanted.set()

    async def read(self) -> None:
        """Have the registry read; return when it was, or when `run` ended: the next reign reads it then."""
        if self._over:
            return
        read = asyncio.get_running_loop().create_future()
        self._callers.append(read)
        self._wanted.set()
        await read

    async def run(self) -> None:
        """Read whenever it is wanted, until cancelled. What is asked for meanwhile is one more reading."""
        callers: list[asyncio.Future[None]] = []
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                orders, self._orders = self._orders, []
                callers, self._callers = self._callers, []
                answer = await self._reload(restart=any(order.apply for order in orders))
                for order in orders:
                    await self._answer(order.command, answer)
                _free(callers)
        finally:
            # Some read in their own clean-up, when all of a reign's tasks are cancelled at once.
            self._over = True
            _free(callers + self._callers)

    async def watch(self, interval_s: float) -> None:
        """Have the registry read when a source changed and has come to rest; one that vanished is awaited."""
        while True:
            began = time.monotonic()
            took_s = 0.0
            try:
                changed = await asyncio.to_thread(self._configuration.sources_changed)
                took_s = time.monotonic() - began
                if changed:
                    await self._rest(interval_s)
                    self._wanted.set()
            except OSError as error:
                log.debug("not looked for changes: %s", error)
            await asyncio.sleep(max(interval_s, QUIET_SHARE * took_s))

    async def _rest(self, interval_s: float) -> None:
        """Wait until two looks in a row see the same; not for ever, where something always moves."""
        before = None
        for _ in range(REST_LOOKS):
            now = await asyncio.to_thread(self._configuration.look)
            if now == before:
                return
            before = now
            await asyncio.sleep(interval_s / 2)

    async def _reload(self, *, restart: bool) -> dict[str, Any]:
        configuration = self._configuration
        before = configuration.registry
        await asyncio.to_thread(configuration.ask_silent_engines)
        try:
            fresh = await asyncio.to_thread(configuration.read_again)
        except RegistryError as error:
            log.error("registry not reloaded, the old one stays: %s", error)
            await self._show_error(str(error))
            return {"error": asdict(ApiError(500, f"registry not reloaded, the old one stays: {error}"))}
        await self._show_error("")
        changes = compare(before, fresh)
        configuration.registry = fresh
        if changes:
            await self._taken_over(changes)
            counts = {"added": len(changes.added), "removed": len(changes.removed)}
            log.info("registry reloaded", extra={**counts, "changed": len(changes.changed)})
        outdated = self._outdated() if restart else []
        if restart:
            self._tell(RestartOrdered())
        return {
            "previous": before.revision,
            "revision": fresh.revision,
            **changes.shown(),
            "restarted": outdated,
        }

    def _outdated(self) -> list[str]:
        entries, instances = self._configuration.registry.entries, self._state().instances.values()
        return sorted(
            own.model
            for own in instances
            if own.model in entries and own.revision != entries[own.model].revision
        )

    async def _show_error(self, error: str) -> None:
        if error != self._configuration.error:
            await self._store.put_herd({"registry_error": error})
        self._configuration.error = error


def _free(callers: list[asyncio.Future[None]]) -> None:
    for caller in callers:
        if not caller.done():
            caller.set_result(None)
