"""The supervisor's process: stands by, leads when it can, and lives through losing the lead or Redis."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal

import uvloop
from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamastead.shared import log as logs
from llamastead.shared.disk import unusable
from llamastead.shared.faults import fault_point
from llamastead.shared.jobs import Jobs
from llamastead.shared.settings import Settings, SettingsError
from llamastead.shared.store.connect import check, connect, explain
from llamastead.shared.store.errors import StaleLeader, StoreError, StoreUnreachable
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.clock import RedisClock
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.engine import EngineError
from llamastead.supervisor.epoch import read_epoch, write_epoch
from llamastead.supervisor.holder_link import HolderEvent
from llamastead.supervisor.holder_record import instance_folders
from llamastead.supervisor.holders import Holders
from llamastead.supervisor.parts import Lead
from llamastead.supervisor.registry.model import RegistryError
from llamastead.supervisor.registry.options import OptionError
from llamastead.supervisor.reign import OverError, Reign
from llamastead.supervisor.seat import Seat
from llamastead.supervisor.web_ui import unpack

log = logging.getLogger(__name__)

EXIT_CONFIGURATION = 78  # EX_CONFIG of sysexits.h: starting again as things are won't help
PAUSE_AFTER_TROUBLE_S = 0.5


class Supervisor:
    """Leads when nobody else does. `stop` ends all models and leaves, `leave` leaves them to the holders."""

    def __init__(self, settings: Settings, configuration: Configuration) -> None:
        self._settings = settings
        self._configuration = configuration
        self._redis: Redis = connect(settings.redis_url)
        self._keys = Keys(settings.redis_prefix)
        self._jobs = Jobs(settings.redis_url, self._keys)
        self._epoch_file = settings.run_dir / "epoch"
        self._reign: Reign | None = None
        self._won: LeaderStore | None = None
        self._seat = Seat(settings.run_dir / "leader")
        self._trouble = ""
        self._clock = RedisClock()
        self._holders = Holders(settings.run_dir, self._on_holder_event)
        self.stop, self.leave, self.reload = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self) -> int:
        """Serve until told to stop or leave; return the exit code."""
        for warning in await check(self._redis, self._settings.redis_url):
            log.warning(warning)
        duty = asyncio.create_task(self._serve())
        unpacking = asyncio.create_task(self._unpack_web_ui())
        leaving = asyncio.create_task(self.leave.wait())
        await asyncio.wait((duty, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        for task in (duty, unpacking):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._holders.close()
        self._jobs.close()
        await self._redis.aclose()
        return 0

    async def _unpack_web_ui(self) -> None:
        given = self._configuration
        if given.web_ui:
            await unpack(given.engine, given.web_ui, self._settings.run_dir, given.environ)

    async def _serve(self) -> None:
        fresh = True
        while not self.stop.is_set():
            lead = await self._stand_for_election()
            if lead is not None:
                await self._lead(lead, fresh=fresh)
            elif not self.stop.is_set():
                await self._wait(self._settings.leader_renew / 3)
            fresh = False

    async def _lead(self, lead: Lead, *, fresh: bool) -> None:
        try:
            if not fresh:
                await self._catch_up(lead)
            # What holders told an earlier reign is told again to this one: adoption starts from connecting.
            self._holders.close()
            self._holders.set_leadership(lead.number, True)
            self._reign = reign = Reign(
                self._settings,
                self._configuration,
                self._redis,
                self._jobs,
                self._holders,
                lead,
                self._clock,
                self.reload,
            )
            await reign.run(self.stop)
        except* OverError:
            log.info("all models stopped")
        except* StaleLeader:
            log.warning("another supervisor leads now", extra={"number": lead.number})
        except* (RedisError, StoreError, OSError) as trouble:
            log.warning("the lead is given up for now: %s", _first(trouble))
            # Without a file to open the next one would end the same way, and nobody would be told why.
            self._holders.reserve.release()
            await self._wait(PAUSE_AFTER_TROUBLE_S)
        except* Exception:
            # A bug: this reign's view is not trusted any more; the next starts from the facts.
            log.exception("the reign broke off")
            await self._wait(PAUSE_AFTER_TROUBLE_S)
        finally:
            self._reign = None
            self._holders.dismiss_spare()
            self._holders.set_leadership(None, False)
            with contextlib.suppress(RedisError, StoreError):
                await self._resign()

    async def _catch_up(self, lead: Lead) -> None:
        """Read the registry again: whoever led meanwhile may have been told of changes.

        The lead is kept meanwhile: thousands of models on a slow disk take longer than its TTL.
        """
        store = LeaderStore(self._redis, self._keys, lead.token)
        reading = asyncio.get_running_loop().run_in_executor(None, self._configuration.catch_up)
        try:
            while True:
                done, _ = await asyncio.wait({reading}, timeout=self._settings.leader_renew)
                if done:
                    break
                await store.renew(round(self._settings.leader_ttl * 1000))
        finally:
            await asyncio.wait({reading})  # two that read at once would mix what they found
        reading.result()

    async def _stand_for_election(self) -> Lead | None:
        """Try once to take the lead; a standby stays connected to the holders of this host meanwhile."""
        token = secrets.token_hex(16)
        store = LeaderStore(self._redis, self._keys, token)
        try:
            await self._resign()
            number = 1 + max(await store.read_number(), read_epoch(self._epoch_file))
            info = {"host": self._settings.host_id, "pid": str(os.getpid())}
            if await store.lead(number, round(self._settings.leader_ttl * 1000), info):
                self._won = store
                if write_epoch(self._epoch_file, number):
                    fault_point("epoch.written")
                    self._trouble = ""
                    self._seat.take(token)
                    fault_point("seat.taken")
                    return Lead(number, token)
            else:
                await self._unseat_the_dead()
            self._trouble = ""
        except (RedisError, OSError) as error:
            self._holders.reserve.release()
            self._complain(
                explain(self._settings.redis_url, error)
                if isinstance(error, RedisError)
                else unusable(error.filename or self._settings.run_dir, error)
            )
        # Who does not answer is known to hang when it is our turn to lead.
        self._holders.look_again()
        try:
            for folder in instance_folders(self._settings.run_dir):
                if not self._holders.knows(folder.name):
                    await self._holders.watch(folder)
        except OSError as error:
            self._complain(unusable(error.filename or self._settings.run_dir, error))
        return None

    def _complain(self, trouble: str) -> None:
        """Log what keeps us from standing, once for as long as it stays the same: we try several times a
        second.
        """
        if trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble

    async def _unseat_the_dead(self) -> None:
        """End the lead of a leader of this run folder that died, which would last until its TTL is over."""
        token = self._seat.token_of_the_dead()
        if token:
            with contextlib.suppress(StaleLeader):  # the lead is over already, or somebody else's
                await LeaderStore(self._redis, self._keys, token).resign()

    async def _resign(self) -> None:
        """Give up the lead that we won last: left to its TTL it would keep everybody waiting, us included."""
        self._seat.leave()
        if self._won is not None:
            await self._won.resign()
            self._won = None

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stop.wait()

    def _on_holder_event(self, instance: str, event: HolderEvent) -> None:
        reign = self._reign
        if reign is None:
            return
        try:
            reign.on_holder_event(instance, event)
        except Exception as fault:  # noqa: BLE001 - it ends the reign; here it would end the holder's connection
            reign.break_off(fault)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def _serve(settings: Settings, configuration: Configuration) -> int:
    supervisor = Supervisor(settings, configuration)
    loop = asyncio.get_running_loop()
    for number, event in (
        (signal.SIGTERM, supervisor.stop),
        (signal.SIGINT, supervisor.stop),
        (signal.SIGUSR1, supervisor.leave),
        (signal.SIGHUP, supervisor.reload),
    ):
        loop.add_signal_handler(number, event.set)
    return await supervisor.run()


def run(settings: Settings) -> int:
    """Run a supervisor until it is told to end; return its exit code.

    SIGTERM and SIGINT stop all models first. SIGUSR1 leaves them to the next supervisor: they end after the
    orphan grace if none comes. SIGHUP reads the registry again. Exit code 78: a wrong setting, registry or
    engine.
    """
    logs.setup(settings.log_level, settings.log_format, "supervisor")
    try:
        settings.check_socket_paths()
        (settings.run_dir / "i").mkdir(parents=True, exist_ok=True, mode=0o700)
        configuration = Configuration(settings)
    except (SettingsError, RegistryError, EngineError, OptionError) as error:
        log.error("%s", error)
        return EXIT_CONFIGURATION
    try:
        return uvloop.run(_serve(settings, configuration))
    except StoreUnreachable as error:
        log.error("%s", error)
        return 1
