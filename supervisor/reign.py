"""One leadership of this supervisor: from taking over what lives to losing the lead or being told to stop."""

import asyncio
import json
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from llamastead.shared.jobs import Jobs
from llamastead.shared.margins import parse_margins
from llamastead.shared.secret import read_or_make_herd_secret
from llamastead.shared.settings import Settings
from llamastead.shared.store.errors import NoHerd
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.board import Board
from llamastead.supervisor.book import Book
from llamastead.supervisor.clock import RedisClock
from llamastead.supervisor.commands import Commands
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.core.events import RecoveryDone, RegistryChanged, ShutDown, Took
from llamastead.supervisor.core.state import Policy, initial
from llamastead.supervisor.devices import Devices
from llamastead.supervisor.driver import Driver
from llamastead.supervisor.effects import Effects, keep_spare
from llamastead.supervisor.engine import EngineError
from llamastead.supervisor.gateways import Silence
from llamastead.supervisor.health import Health
from llamastead.supervisor.holder_link import HolderEvent
from llamastead.supervisor.holders import Holders
from llamastead.supervisor.launch import InstanceSpec, LaunchError, build_spec
from llamastead.supervisor.measuring import Measuring
from llamastead.supervisor.metadata import Metadata
from llamastead.supervisor.news import News
from llamastead.supervisor.publish import publish
from llamastead.supervisor.recovery import Recovery
from llamastead.supervisor.running import Running
from llamastead.supervisor.watchdog import Watchdog

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lead:
    """A leadership that was won: its number, and the token that every script compares."""

    number: int
    token: str


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
    ) -> None:
        self._settings = settings
        self._configuration = configuration
        self._holders = holders
        self._lead = lead
        self._running: dict[str, Running] = {}
        self._held_back: list[tuple[str, HolderEvent]] | None = []
        self._clock = RedisClock()
        self._tasks = asyncio.TaskGroup()
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keys = Keys(settings.redis_prefix)
        self._reads = GatewayStore(redis, keys)
        self._store = LeaderStore(redis, keys, lead.token)
        self._devices = Devices(
            parse_margins(settings.models_memory_margin),
            configuration.environ.get("CUDA_VISIBLE_DEVICES"),
            settings.reread,
        )
        self._book = Book(configuration, self._devices)
        self._metadata = Metadata(jobs, redis, keys, self._store)
        self._measuring = Measuring(
            jobs,
            redis,
            keys,
            self._reads,
            self._store,
            settings,
            self._book,
            lambda: self._driver.state,
            self._tell,
        )
        self._commands = Commands(
            self._store, settings.run_dir, self._metadata.copy, self._measuring.on_measured, self._socket_of
        )
        effects = Effects(
            self._store,
            holders,
            self._build,
            self._commands.answer,
            self._tell,
            self._spawn,
            lambda instance, view: self._news.on_view(instance, view),
            self._running,
            lambda model: json.dumps(self._book.show(model)),
            self._devices.look,
            settings.host_id,
            lead.number,
        )
        state = initial(
            Policy(
                models_max=settings.models_max,
                max_wait=settings.max_wait,
                min_residence=settings.min_residence,
                queue_timeout=settings.queue_timeout,
                stall_timeout=settings.stall_timeout,
            ),
            f"{settings.host_id}-{lead.number}",
            configuration.specs(),
            lead.token,
        )
        board = Board(self._store, self._running, self._clock)
        self._driver = Driver(state, self._store, effects, board, self._clock, settings.reread)
        self._news = News(settings.run_dir, self._running, self._tell, self._spawn, self._took)

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

    async def run(self, stop: asyncio.Event, reload: asyncio.Event) -> None:
        """Reign until `stop` is set and every instance is gone; `reload` reads the registry again.

        Raises a group of what ended it: OverError after a stop, else errors of Redis, the store, or a bug.
        """
        async with self._tasks:
            self._spawn(self._renew())
            self._spawn(self._await_fault())
            await self._take_over()
            for loop in (
                self._driver.run(),
                self._commands.run(self._driver),
                self._watch_gateways(),
                self._probe(),
                self._watch_devices(),
                self._measuring.run(),
                self._watch_tickets(),
                self._ask_holders_again(),
                self._reload_when(reload),
                self._metadata.read_missing(self._configuration.registry),
            ):
                self._spawn(loop)
            await keep_spare(self._holders)
            await stop.wait()
            await self._stop_all()
            raise OverError

    async def _take_over(self) -> None:
        self._tell(await self._devices.read({}))
        await self._measuring.refresh()
        self._tell(RegistryChanged(self._book.specs()))
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
        )
        adopted = await recovery.run()
        held_back, self._held_back = self._held_back, None
        for instance, event in held_back or ():
            self._news.on_event(instance, event)
        forgotten = not await self._herd_exists()
        await self._publish()
        await self._store.open_herd(self._configuration.herd_fields())
        if adopted and forgotten:
            # Leases that an emptied Redis has forgotten come back with the gateways' next heartbeats; until
            # then an instance that looks idle may be busy.
            await asyncio.sleep(2 * self._settings.heartbeat)
        self._tell(RecoveryDone(preload=not adopted))
        log.info("leading", extra={"number": self._lead.number, "adopted": adopted})

    async def _publish(self) -> None:
        registry, engine = self._configuration.registry, self._configuration.engine
        await publish(self._store, registry, engine, self._book.shown_memory())

    async def _herd_exists(self) -> bool:
        try:
            await self._reads.read_herd()
        except NoHerd:
            return False
        return True

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

    async def _ask_holders_again(self) -> None:
        """Make good what was missed of the holders' words: each tells its state again, news or not."""
        while True:
            await asyncio.sleep(self._settings.reread)
            self._holders.look_again()

    async def _probe(self) -> None:
        health = Health(self._settings.reread, self._tell)
        await health.run(lambda: self._driver.state, self._socket_of)

    def _socket_of(self, instance: str) -> Path | None:
        running = self._running.get(instance)
        return running.socket if running else None

    async def _watch_devices(self) -> None:
        try:
            await self._devices.run(
                self._running, lambda: self._driver.state, self._tell, self._store, self._settings.host_id
            )
        finally:
            self._devices.close()

    def _took(self, instance: str) -> None:
        """Take what a ready instance says it allocated: for its booking, and for the next start."""
        note = self._running[instance]
        found = note.effective.figures
        if found is None:
            return
        needs, shown = self._book.amounts(note.model, found)
        self._tell(Took(instance, needs, shown))
        self._book.learn(note.model, found, int(note.meta.get("meta", {}).get("n_ctx", 0)))
        self._tell(RegistryChanged(self._book.specs()))
        self._devices.look()
        self._spawn(self._measuring.keep(note.model))

    async def _reload_when(self, reload: asyncio.Event) -> None:
        """Read the registry again each time `reload` is set; a broken one changes nothing."""
        while True:
            await reload.wait()
            reload.clear()
            if self._configuration.reload():
                await self._measuring.refresh()
                await self._publish()
                self._tell(RegistryChanged(self._book.specs()))
                await self._metadata.read_missing(self._configuration.registry)

    async def _stop_all(self) -> None:
        """Stop every instance: idle ones at once, busy ones when done or after a quarter of the time-out.

        `up` ends the gateways before, so what is still claimed then is claimed by nobody who could use it.
        """
        log.info("stopping all models", extra={"instances": len(self._driver.state.instances)})
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

    def _build(self, instance: str, model: str, nonce: str, share: float) -> InstanceSpec:
        entry = self._configuration.registry.entries.get(model)
        if entry is None:
            raise LaunchError(f"model '{model}' is not in the registry any more")
        try:
            engine = self._configuration.engine_of(entry)
        except EngineError as error:
            raise LaunchError(str(error)) from error
        return build_spec(
            entry,
            engine,
            instance,
            nonce,
            self._settings.run_dir,
            read_or_make_herd_secret(self._settings.run_dir / "secret"),
            self._settings,
            self._configuration.environ,
            context=self._book.context(model, share),
            cache_ram_mib=self._configuration.cache_ram_mib,
        )

    def _tell(self, event: Any) -> None:
        self._driver.put(event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)


class OverError(Exception):
    """Ends the task group of a reign that is over."""
