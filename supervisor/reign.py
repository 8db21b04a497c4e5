"""One leadership of this supervisor: from taking over what lives to losing the lead or being told to stop."""

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Mapping
from typing import Any

from redis.asyncio import Redis

from llamastead.shared.jobs import Jobs
from llamastead.shared.settings import Settings
from llamastead.shared.store.errors import KeysLost, NoHerd
from llamastead.shared.words import InstanceState
from llamastead.supervisor.clock import RedisClock
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.core.events import RecoveryDone, RegistryChanged, ShutDown
from llamastead.supervisor.effects import keep_spare
from llamastead.supervisor.gateways import Silence
from llamastead.supervisor.health import Health
from llamastead.supervisor.holder_link import HolderEvent
from llamastead.supervisor.holders import Holders
from llamastead.supervisor.parts import Lead, Parts
from llamastead.supervisor.publish import publish
from llamastead.supervisor.recovery import Recovery
from llamastead.supervisor.registry.changes import Changes
from llamastead.supervisor.registry.model import Registry
from llamastead.supervisor.watchdog import Watchdog

log = logging.getLogger(__name__)


UNHEARD_REREADS = 3
_MAKES_MODELS = ("version", "engine", "engine_version", "registry_revision")
"""What of the herd's fields decides on those of its models."""


class Reign:
    """Everything that runs while this supervisor leads. Any error of Redis or of the store ends it.

    Nothing of it outlives it: the next reign starts from Redis and from what the holders say.
    """

    def __init__(
        self,
        settings: Settings,
        configuration: Configuration,
        redis: Redis,
        jobs: Jobs,
        holders: Holders,
        lead: Lead,
        clock: RedisClock,
        reload: asyncio.Event,
    ) -> None:
        """`clock` outlives reigns; `reload` has the registry read again whenever it is set."""
        self._settings = settings
        self._configuration = configuration
        self._holders = holders
        self._lead = lead
        self._jobs = jobs
        self._held_back: list[tuple[str, HolderEvent]] | None = []
        self._published = Registry({}, {})
        self._clock = clock
        self._tasks = asyncio.TaskGroup()
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parts = Parts(
            settings,
            configuration,
            redis,
            jobs,
            holders,
            lead,
            clock,
            reload,
            self._spawn,
            self._take_registry,
        )
        self._running, self._reads, self._store = parts.running, parts.reads, parts.store
        self._book, self._bookkeeping, self._devices = parts.book, parts.bookkeeping, parts.devices
        self._driver, self._board, self._commands = parts.driver, parts.board, parts.commands
        self._news, self._learning, self._usage = parts.news, parts.learning, parts.usage
        self._metadata, self._measuring = parts.metadata, parts.measuring
        self._reloading, self._downloads, self._removing = parts.reloading, parts.downloads, parts.removing
        self._conversations, self._address_of, self._tell = parts.conversations, parts.address_of, parts.tell

    def on_holder_event(self, instance: str, event: HolderEvent) -> None:
        """Take what a holder tells; what it tells before it is adopted is kept for afterwards."""
        if self._held_back is None:
            self._news.on_event(instance, event)
        else:
            self._held_back.append((instance, event))

    def break_off(self, fault: Exception) -> None:
        """End this reign with an error that came up outside of its tasks."""
        if not self._fault.done():
            self._fault.set_exception(fault)

    async def run(self, stop: asyncio.Event) -> None:
        """Reign until `stop` is set and every instance is gone.

        Raises a group of what ended it: OverError after a stop, else errors of Redis, the store, or a bug.
        """
        try:
            async with self._tasks:
                self._spawn(self._renew())
                self._spawn(self._await_fault())
                await self._take_over()
                for loop in (
                    self._driver.run(),
                    self._commands.run(self._driver),
                    self._commands.tell_at_work(),
                    self._watch_gateways(),
                    self._probe(),
                    self._watch_devices(),
                    self._conversations.run(self._settings.heartbeat),
                    self._bookkeeping.run(),
                    self._measuring.run(),
                    self._usage.run(self._settings.reread, lambda: self._driver.state),
                    self._measuring.keep(),
                    self._downloads.run(),
                    self._removing.run(),
                    self._sweep_jobs(),
                    self._watch_tickets(),
                    self._miss_keys(),
                    self._ask_holders_again(),
                    self._reloading.run(),
                    self._reloading.watch(self._settings.watch),
                    self._metadata.run(),
                ):
                    self._spawn(loop)
                await keep_spare(self._holders)
                await stop.wait()
                await self._stop_all()
                await self._usage.settle()
                raise OverError
        finally:
            self._news.close()

    async def _take_over(self) -> None:
        await self._learning.begin()
        recovery = Recovery(
            self._settings.run_dir,
            self._settings.host_id,
            self._lead.number,
            self._reads,
            self._store,
            self._holders,
            self._clock,
            self._running,
            self._tell,
            self._news.on_view,
            self._news.clean_up,
        )
        adopted = await recovery.run()
        held_back, self._held_back = self._held_back, None
        for instance, event in held_back or ():
            self._news.on_event(instance, event)
        herd = await self._herd()
        forgotten = not herd
        lost = await self._reads.read_unlisted(self._configuration.registry.entries)
        await self._publish({*lost, *await asyncio.to_thread(self._to_write, herd)})
        await self._store.open_herd(self._configuration.herd_fields())
        if adopted and forgotten:
            # Leases that an emptied Redis has forgotten come back with the gateways' next heartbeats; until
            # then an instance that looks idle may be busy.
            await asyncio.sleep(2 * self._settings.heartbeat)
        _, waits = await self._reads.read_waits()
        self._board.inherit(waits)
        await self._learning.look()
        ordered = tuple(model for model, wait in waits.items() if wait.ordered)
        self._tell(RecoveryDone(preload=not adopted, ordered=ordered))
        self._metadata.read_missing(self._configuration.registry)
        log.info("leading", extra={"number": self._lead.number, "adopted": adopted})

    def _to_write(self, herd: Mapping[str, str]) -> Collection[str]:
        """Return the models that Redis does not have yet as they are: none where an earlier reign of the same
        registry opened the herd.
        """
        own = self._configuration.herd_fields()
        same = all(herd.get(name) == str(own[name]) for name in _MAKES_MODELS)
        return () if same else self._configuration.registry.entries

    async def _publish(self, written: Collection[str], changes: Changes | None = None) -> None:
        registry, engine = self._configuration.registry, self._configuration.engine
        memory = self._book.shown_memory(written)
        await publish(self._store, registry, engine, memory, written, changes)
        self._published = registry

    async def _herd(self) -> Mapping[str, str]:
        try:
            return await self._reads.read_herd()
        except NoHerd:
            return {}

    async def _await_fault(self) -> None:
        await self._fault

    async def _renew(self) -> None:
        while True:
            await self._store.renew(round(self._settings.leader_ttl * 1000))
            await asyncio.sleep(self._settings.leader_renew)

    async def _watch_gateways(self) -> None:
        silence = Silence(self._settings.suspect_after, self._settings.swept_after)
        while True:
            beats = (await self._store.observe()).gateways
            suspects, dead = silence.look(beats, time.monotonic())
            for gateway in suspects:
                log.warning("gateway is silent", extra={"gateway": gateway})
            for gateway in dead:
                log.warning("gateway is gone: its tickets and leases end", extra={"gateway": gateway})
                await self._store.sweep(gateway)
            await asyncio.sleep(self._settings.heartbeat)

    async def _watch_tickets(self) -> None:
        driver, settings = self._driver, self._settings
        watchdog = Watchdog(
            self._store, lambda: driver.state, lambda: driver.looked_ms, driver.look, 2 * settings.reread
        )
        await watchdog.run(settings.heartbeat, round(settings.leader_ttl * 1000))

    async def _miss_keys(self) -> None:
        """End this reign when Redis has lost single keys: to take over is to write all that there is."""
        while True:
            await asyncio.sleep(self._settings.reread)
            has = {"has_models": bool(self._published.entries), "has_aliases": bool(self._published.aliases)}
            if missing := await self._store.missing(**has):
                raise KeysLost(f"Redis has lost {', '.join(missing)}; is its maxmemory-policy noeviction?")

    async def _ask_holders_again(self) -> None:
        """Make good what was missed of the holders' words: each tells its state again, news or not."""
        while True:
            await asyncio.sleep(self._settings.reread)
            for instance in self._holders.silent(UNHEARD_REREADS * self._settings.reread):
                known = self._driver.state.instances.get(instance)
                if known is not None and known.state is InstanceState.STOPPING:
                    # It can't stop anything any more. While it need not, its engine may serve.
                    self._news.clean_up(instance, "its holder process hung, so both were ended")
            self._holders.look_again()

    async def _probe(self) -> None:
        health = Health(self._settings.reread, self._tell)
        await health.run(lambda: self._driver.state, self._address_of)

    async def _watch_devices(self) -> None:
        try:
            await self._devices.run(
                self._running,
                lambda: self._driver.state,
                self._learning.on_devices_read,
                self._store,
                self._settings.host_id,
            )
        finally:
            self._devices.close()

    async def _sweep_jobs(self) -> None:
        """Make good what dead workers left undone."""
        while True:
            for line in await self._jobs.sweep():
                log.warning("%s", line)
            await asyncio.sleep(self._settings.reread)

    async def _take_registry(self, changes: Changes) -> None:
        """Make a registry that was read again the herd's."""
        await self._bookkeeping.refresh((*changes.added, *changes.changed))
        await self._publish({*changes.added, *changes.changed}, changes)
        self._tell(RegistryChanged(self._book.specs()))
        self._metadata.read_missing(self._configuration.registry, changes)

    async def _stop_all(self) -> None:
        """Stop every instance: idle ones at once, busy ones when done or after a quarter of the time-out.

        `up` ends the gateways before, so what is still claimed then is claimed by nobody who could use it.
        """
        log.info("stopping all models", extra={"instances": len(self._driver.state.instances)})
        await self._measuring.close()
        self._tell(ShutDown(force=False))
        if not await self._all_gone(self._settings.stop_timeout / 4):
            self._tell(ShutDown(force=True))
            if not await self._all_gone(self._settings.stop_timeout / 2):
                left = sorted(self._driver.state.instances)
                log.error("instances would not stop; their holders go on trying", extra={"instances": left})

    async def _all_gone(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._driver.empty.wait()
        except TimeoutError:
            return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)


class OverError(Exception):
    """Ends the task group of a reign that is over."""
