"""The parts of one leadership, made and put together; what they do in which order is reign.py."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from redis.asyncio import Redis

from llamastead.shared.addresses import Address, TcpAddress, UnixAddress, closing
from llamastead.shared.errors import ApiError
from llamastead.shared.hub_cache import hub_cache_folder
from llamastead.shared.hub_tokens import HubTokens
from llamastead.shared.jobs import Jobs
from llamastead.shared.margins import parse_margins, parse_sizes
from llamastead.shared.secret import kept_herd_secret
from llamastead.shared.settings import Settings
from llamastead.shared.store.conversations import ConversationStore
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.words import EndClass, InstanceState
from llamastead.supervisor.board import Board
from llamastead.supervisor.book import Book
from llamastead.supervisor.bookkeeping import Bookkeeping
from llamastead.supervisor.clock import RedisClock
from llamastead.supervisor.commands import Commands
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.conversations import Conversations
from llamastead.supervisor.core.actions import Start
from llamastead.supervisor.core.events import DownloadFailed, LoadOrdered, UnloadOrdered
from llamastead.supervisor.core.state import Policy, State, initial
from llamastead.supervisor.devices import Devices, list_devices
from llamastead.supervisor.downloads import Download, Downloads, Wanted, absent_and_wanted
from llamastead.supervisor.driver import Driver
from llamastead.supervisor.effects import Effects
from llamastead.supervisor.engine import EngineError
from llamastead.supervisor.holder_link import HolderView
from llamastead.supervisor.holders import Holders
from llamastead.supervisor.instance_ports import InstancePorts, NoPortError
from llamastead.supervisor.launch import InstanceSpec, LaunchError, build_spec
from llamastead.supervisor.learning import Learning
from llamastead.supervisor.measuring import Measuring
from llamastead.supervisor.metadata import Metadata
from llamastead.supervisor.news import News
from llamastead.supervisor.registry.changes import Changes
from llamastead.supervisor.registry.options import TRUE
from llamastead.supervisor.reloading import Reloading
from llamastead.supervisor.removing import Removing
from llamastead.supervisor.running import Running
from llamastead.supervisor.usage import Usage


@dataclass(frozen=True)
class Lead:
    """A leadership that was won: its number, and the token that every script compares."""

    number: int
    token: str


class Parts:
    """Each part is given what it asks of the others: a function of theirs, or one of ours where the other is
    made only after it.
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
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        take_registry: Callable[[Changes], Awaitable[None]],
    ) -> None:
        """`spawn` begins a task of the reign, `take_registry` makes a registry that was read again that of
        the herd; for the others see Reign.
        """
        self._settings = settings
        self._configuration = configuration
        host = settings.instance_host
        self._ports = InstancePorts(host, *settings.instance_port_range) if host else None
        self._offline = configuration.environ.get("LLAMA_ARG_OFFLINE") in TRUE
        self._secret = partial(kept_herd_secret, settings.run_dir / "secret")
        self.running: dict[str, Running] = {}
        keys = Keys(settings.redis_prefix)
        self.reads = GatewayStore(redis, keys)
        self.store = LeaderStore(redis, keys, lead.token)
        self.devices = Devices(
            parse_margins(settings.models_memory_margin),
            configuration.environ.get("CUDA_VISIBLE_DEVICES"),
            settings.reread,
            parse_sizes(settings.device_memory),
            lambda engine: list_devices(engine, configuration.environ),
        )
        self.book = Book(configuration, self.devices)
        self.metadata = Metadata(jobs, redis, keys, self.store)
        self.bookkeeping = Bookkeeping(
            self.book, redis, keys, self.store, self._recall, self.tell, self._models_in_use
        )
        self.measuring = Measuring(
            jobs,
            redis,
            keys,
            self.reads,
            self.store,
            settings,
            self.book,
            self.state,
            self.tell,
            self.bookkeeping.know,
        )
        self.reloading = Reloading(
            configuration, self.store, reload, take_registry, self._answer, self.state, self.tell
        )
        self.downloads = Downloads(
            jobs,
            redis,
            keys,
            self.store,
            hub_cache_folder(configuration.environ),
            self._answer,
            self._on_arrived,
            self._on_download_failed,
            self._wanted_files,
            self.reads.read_workers,
            HubTokens(settings.run_dir),
            self._token_of,
        )
        self.removing = Removing(
            jobs, self.store, configuration, self.state, self.reloading.read, self._answer, self._unload
        )
        self.commands = Commands(
            self.store,
            settings.run_dir,
            self.metadata.copy,
            self.measuring.on_measured,
            self.address_of,
            self.reloading.order,
            self.downloads,
            self.removing,
        )
        self.conversations = Conversations(
            self.store,
            self.reads,
            ConversationStore(redis, keys),
            self._secret,
            self.running,
            round(settings.detach_limit * 1000),
        )
        effects = Effects(
            self.store,
            holders,
            self._build,
            self.commands.answer,
            self.tell,
            spawn,
            self._on_view,
            self._clean_up,
            self.running,
            lambda model: json.dumps(self.book.show(model)),
            self.devices.look,
            self.conversations.end,
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
        self.board = Board(self.store, self.running, clock)
        self.driver = Driver(
            state, self.store, effects, self.board, clock, settings.reread, self.bookkeeping.know
        )
        self.learning = Learning(
            self.book,
            self.devices,
            self.measuring,
            self.bookkeeping,
            self.store,
            self.running,
            self.tell,
            spawn,
        )
        self.usage = Usage(self.store, self._secret, self.running, spawn)
        self.news = News(
            settings.run_dir,
            self.running,
            self.tell,
            spawn,
            self.learning.on_took,
            self.learning.on_ran_out,
            self.usage.on_end,
        )

    # What parts ask of the scheduler

    def state(self) -> State:
        """Return the core's state as it is now."""
        return self.driver.state

    def tell(self, event: Any) -> None:
        """Tell the core."""
        self.driver.put(event)

    def address_of(self, instance: str) -> Address | None:
        """Return where an instance is reached, None for one that doesn't run."""
        running = self.running.get(instance)
        where = running.where if running else None
        known = self.driver.state.instances.get(instance)
        if isinstance(where, UnixAddress) and known is not None and known.state is InstanceState.STOPPING:
            return closing(where)
        return where

    def _models_in_use(self) -> list[str]:
        """Return the models that run or are waited for, or are loaded at start."""
        state, entries = self.driver.state, self._configuration.registry.entries
        at_start = (name for name, entry in entries.items() if entry.load_on_startup)
        running = (instance.model for instance in state.instances.values())
        return [*running, *state.demands, *state.orders, *at_start]

    def _wanted_files(self) -> list[Wanted]:
        entries = self._configuration.registry.entries
        return absent_and_wanted(entries, self.driver.state, offline=self._offline)

    def _token_of(self, model: str) -> str:
        entry = self._configuration.registry.entries.get(model)
        return entry.env.get("HF_TOKEN", "") if entry else ""

    async def _on_arrived(self, download: Download) -> None:
        await self.reloading.read()
        if not download.presets:
            return
        entries, error = self._configuration.registry.entries, self._configuration.error
        for name, entry in entries.items():
            if name in download.models and entry.may_be_presets and not entry.held:
                # It would be fetched again and again.
                why = error or "its preset.ini is not in the cache"
                self.tell(DownloadFailed(name, ApiError(500, f"presets of '{download.repo}': {why}")))
            elif entry.load_on_startup and name not in download.models:
                # They are part of the start, which waited for them.
                self.tell(LoadOrdered(name, ""))

    def _on_download_failed(self, model: str, error: ApiError) -> None:
        self.tell(DownloadFailed(model, error))

    def _unload(self, model: str) -> None:
        self.tell(UnloadOrdered(model, ""))

    # What parts ask of those that are made after them

    async def _answer(self, command: str, payload: Mapping[str, Any]) -> None:
        await self.commands.answer(command, payload)

    async def _recall(self, measurements: Collection[tuple[str, str]]) -> None:
        await self.measuring.recall(measurements)

    def _on_view(self, instance: str, view: HolderView) -> None:
        self.news.on_view(instance, view)

    def _clean_up(self, instance: str, why: str, end_class: EndClass) -> None:
        self.news.clean_up(instance, why, end_class)

    # What a start needs

    def _build(self, start: Start, nonce: str) -> InstanceSpec:
        entry = self._configuration.registry.entries.get(start.model)
        if entry is None:
            raise LaunchError(f"model '{start.model}' is not in the registry any more")
        try:
            engine = self._configuration.engine_of(entry)
        except EngineError as error:
            raise LaunchError(str(error)) from error
        if problem := self.book.problem(start.model):
            raise LaunchError(f"[{start.model}] {problem}")
        spec = build_spec(
            entry,
            engine,
            start.instance,
            nonce,
            self._settings.run_dir,
            self._secret(),
            self._settings,
            self._configuration.environ,
            context=self.book.context(start.model, start.share, start.place),
            spot=self.book.spot(start.model, start.place),
            spared_mib=self.devices.spared_mib(),
            fit=not self.book.needs_no_fitting(start.model),
            cache_ram_mib=self._configuration.cache_ram_mib,
            listen=self._listen(),
        )
        return replace(spec, place=start.place, needs=dict(start.needs))

    def _listen(self) -> TcpAddress | None:
        """Return where on TCP the next instance is to listen, None for a unix socket. Raises LaunchError."""
        if self._ports is None:
            return None
        try:
            return self._ports.choose({running.address for running in self.running.values()})
        except NoPortError as problem:
            raise LaunchError(str(problem)) from problem
