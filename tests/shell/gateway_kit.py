"""A gateway's parts on a real Valkey, and a leader that does what a test tells it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from waiting import until as until

from llamastead.gateway.admission import Admission
from llamastead.gateway.catalog import Catalog
from llamastead.gateway.commands import Commands
from llamastead.gateway.heartbeat import Heartbeat
from llamastead.gateway.inbox import Inbox
from llamastead.gateway.leases import Claim
from llamastead.gateway.tally import Tally
from llamastead.shared.secret import instance_key
from llamastead.shared.settings import Settings
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.store.records import Granted, Waiting
from llamastead.shared.words import EndClass, InstanceState, UseKind

SECRET = b"s" * 64
FOREVER_S = 3600.0


def settings_for(folder: Path, **more: Any) -> Settings:
    """Return settings whose clocks stand still unless a test scales them."""
    slow = {"heartbeat": FOREVER_S, "reread": FOREVER_S, "admission_timeout": 5.0, "linger": 0.05}
    return Settings(**{"run_dir": folder, **slow, **more})


class WatchedStore(GatewayStore):
    """A store that notes its calls, and can hold `acquire` before or after it went to Redis."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        super().__init__(redis, keys)
        self.calls: list[str] = []
        self.asking: dict[str, int] = {}
        self.most_at_once = 0
        self.before_acquire = asyncio.Event()
        self.before_acquire.set()
        self.after_acquire = asyncio.Event()
        self.after_acquire.set()

    async def acquire(self, model: str, *args: Any, **kwargs: Any) -> Granted | Waiting:
        self.calls.append("acquire")
        self.asking[model] = self.asking.get(model, 0) + 1
        self.most_at_once = max(self.most_at_once, self.asking[model])
        try:
            await self.before_acquire.wait()
            outcome = await super().acquire(model, *args, **kwargs)
            await self.after_acquire.wait()
            return outcome
        finally:
            self.asking[model] -= 1

    async def release(self, *args: Any, **kwargs: Any) -> bool:
        self.calls.append("release")
        return await super().release(*args, **kwargs)

    async def give_back(self, *args: Any, **kwargs: Any) -> bool:
        self.calls.append("give_back")
        return await super().give_back(*args, **kwargs)


@dataclass
class Desk:
    """The parts that admit requests, at work."""

    id: str
    store: WatchedStore
    admission: Admission
    heartbeat: Heartbeat
    commands: Commands
    catalog: Catalog
    inbox: Inbox
    events: list[dict[str, str]] = field(default_factory=list)
    requests: "list[asyncio.Task[Claim]]" = field(default_factory=list)

    def ask(self, model: str, kind: UseKind = UseKind.INFERENCE) -> "asyncio.Task[Claim]":
        """Begin a request for a model; it is cancelled at the end, if it still waits."""
        self.requests.append(asyncio.ensure_future(self.admission.acquire(model, kind, f"r-{model}")))
        return self.requests[-1]

    async def beat(self) -> None:
        """Send a heartbeat now."""
        await self.heartbeat.beat(self.admission)


@asynccontextmanager
async def open_desk(redis: Redis, keys: Keys, settings: Settings, gateway: str = "g1") -> AsyncIterator[Desk]:
    """Run a gateway's admission as long as the context lasts; it is registered when the context begins."""
    store = WatchedStore(redis, keys)
    patience = settings.admission_timeout
    heartbeat = Heartbeat(store, gateway, {}, settings.heartbeat, settings.redis_url, patience, Tally())
    commands = Commands(store, gateway, settings.admission_timeout)
    catalog = Catalog(store, settings.reread)

    async def register() -> None:
        await heartbeat.beat(admission)

    async with asyncio.TaskGroup() as tasks:
        admission = Admission(
            store, gateway, lambda i, n: instance_key(SECRET, i, n), settings, tasks, register
        )
        events: list[dict[str, str]] = []
        inbox = Inbox(
            store,
            gateway,
            2.0,
            admission,
            commands,
            catalog,
            lambda e: events.append(dict(e)),
            lambda _: None,
            lambda _: None,
            lambda _: None,
        )
        desk = Desk(gateway, store, admission, heartbeat, commands, catalog, inbox, events)
        await desk.beat()
        loops = [tasks.create_task(part) for part in (inbox.run(), catalog.run())]
        try:
            yield desk
        finally:
            for task in (*desk.requests, *loops):
                task.cancel()
            await asyncio.gather(*desk.requests, return_exceptions=True)
            admission.end()


class ScriptedLeader:
    """Plays the supervisor: it does nothing by itself."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis = redis
        self.keys = keys
        self.store = LeaderStore(redis, keys, "token")

    async def open(self, *models: str, aliases: dict[str, str] | None = None, **limits: int) -> None:
        """Lead, publish models and open the herd."""
        assert await self.store.lead(await self.store.read_number() + 1, 600_000, {})
        await self.store.publish("r1", {name: {"source": "preset"} for name in models}, aliases or {})
        await self.store.open_herd({"queue_limit": 0, "queue_limit_total": 0, **limits})

    async def begin(self, instance: str, model: str) -> None:
        """Start an instance: it is loading."""
        fields = {
            "state": InstanceState.LOADING.value,
            "address": f"unix:/{instance}",
            "nonce": f"n-{instance}",
        }
        await self.store.put_instance(instance, {**fields, "load_ms": 7}, model, {})

    async def load(self, instance: str, model: str) -> int:
        """Load a model from nothing to READY; returns how many tickets that granted."""
        await self.begin(instance, model)
        return await self.store.ready(instance, model, {})

    async def end(self, instance: str, end_class: EndClass = EndClass.STOPPED) -> None:
        """Have an instance gone."""
        await self.store.ended(instance, end_class, 0, "")

    async def waiting(self, model: str) -> list[str]:
        """Return the ids of a model's tickets."""
        return sorted(await self.redis.hkeys(self.keys.tickets(model)))

    async def leases(self, instance: str) -> dict[str, str]:
        """Return who holds leases on an instance: gateway → lease id."""
        raw = await self.redis.hgetall(self.keys.leases(instance))
        return {gateway: value.rpartition(":")[0] for gateway, value in raw.items()}

    async def asked(self) -> list[tuple[str, str]]:
        """Return what was asked of the supervisor so far, (verb, model or instance), and be done with it."""
        commands = await self.store.read_commands(0)
        await self.store.done([command.id for command in commands])
        return [(c.verb, c.fields.get("model") or c.fields.get("instance", "")) for c in commands]


async def tickets(leader: ScriptedLeader, model: str, count: int) -> list[str]:
    """Return the model's tickets once there are exactly so many."""
    found: list[str] = []

    async def look() -> bool:
        found[:] = await leader.waiting(model)
        return len(found) == count

    await until(look, f"{count} tickets for {model}")
    return found


async def gone(leader: ScriptedLeader, instance: str) -> None:
    """Return once nobody holds a lease on the instance."""

    async def look() -> bool:
        return not await leader.leases(instance)

    await until(look, f"no lease on {instance}")
