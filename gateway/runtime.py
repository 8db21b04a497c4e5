"""One gateway process at work: its parts, wired, started and ended together."""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from llamastead.gateway.admission import Admission
from llamastead.gateway.catalog import Catalog
from llamastead.gateway.commands import Commands
from llamastead.gateway.conversations import Conversations
from llamastead.gateway.events import EventStreams
from llamastead.gateway.heartbeat import Heartbeat
from llamastead.gateway.inbox import Inbox
from llamastead.gateway.replay import Replay
from llamastead.gateway.sessions import Sessions
from llamastead.gateway.tally import Tally
from llamastead.gateway.upstream import Pools
from llamastead.shared.errors import ApiError
from llamastead.shared.secret import instance_key, read_herd_secret
from llamastead.shared.settings import Settings
from llamastead.shared.store.connect import BLOCK_MS, connect
from llamastead.shared.store.conversations import ConversationStore
from llamastead.shared.store.errors import StoreError
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0


@dataclass
class Clients:
    """The connections of clients, and how many there may be; none before there is a server."""

    connections: Collection[object] = ()
    limit: int = 0


@dataclass(frozen=True)
class Gateway:
    """The parts that answer requests. `draining` is set when the process is asked to leave."""

    id: str
    settings: Settings
    store: GatewayStore
    catalog: Catalog
    admission: Admission
    commands: Commands
    heartbeat: Heartbeat
    events: EventStreams
    pools: Pools
    conversations: Conversations
    replay: Replay
    tally: Tally
    draining: asyncio.Event
    clients: Clients = field(default_factory=Clients)


@asynccontextmanager
async def open_gateway(settings: Settings) -> AsyncIterator[Gateway]:
    """Run a gateway's parts as long as the context lasts, then give everything back to Redis and leave.

    A part that fails for a reason nobody foresaw ends the context: a gateway that no longer hears its inbox
    must not go on accepting requests. Raises StoreUnreachable for a Redis address that is none.
    """
    redis = connect(settings.redis_url)
    store = GatewayStore(redis, Keys(settings.redis_prefix))
    talks = ConversationStore(redis, Keys(settings.redis_prefix))
    gateway_id = f"{settings.host_id}-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        async with asyncio.timeout(None) as leaving, asyncio.TaskGroup() as tasks:
            gateway = _assemble(settings, store, talks, gateway_id, tasks)
            loops = [tasks.create_task(part) for part in _loops(gateway)]
            try:
                yield gateway
            finally:
                for loop in loops:
                    loop.cancel()
                gateway.admission.end()
                leaving.reschedule(asyncio.get_running_loop().time() + LAST_WORDS_S)
        await _leave(gateway)
    except TimeoutError:
        if not leaving.expired():
            raise
    finally:
        await redis.aclose()


class InstanceKeys:
    """Makes the keys of instances. The secret is read when the first instance is met: by then it is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._secret: bytes | None = None

    def __call__(self, instance: str, nonce: str) -> str:
        """Return an instance's key; ApiError 500 when the herd secret can't be read."""
        if self._secret is None:
            try:
                self._secret = read_herd_secret(self._path)
            except (OSError, ValueError) as problem:
                log.error("the herd secret can't be read", extra={"problem": str(problem)})
                raise ApiError(500, "this gateway can't read the herd secret in its run folder") from problem
        return instance_key(self._secret, instance, nonce)


def _assemble(
    settings: Settings,
    store: GatewayStore,
    talks: ConversationStore,
    gateway_id: str,
    tasks: asyncio.TaskGroup,
) -> Gateway:
    about = {"host": settings.host_id, "pid": str(os.getpid()), "address": f"{settings.host}:{settings.port}"}
    tally = Tally()
    patience_s = settings.admission_timeout
    heartbeat = Heartbeat(store, gateway_id, about, settings.heartbeat, settings.redis_url, patience_s, tally)

    async def register() -> None:
        await heartbeat.beat(admission)

    keys = InstanceKeys(settings.run_dir / "secret")
    pools = Pools(settings.connect_timeout if settings.connect_timeout > 0 else None)
    sessions = Sessions(store, pools, keys)
    admission = Admission(store, gateway_id, keys, settings, tasks, register)
    conversations = Conversations(talks, sessions, gateway_id, settings.detach_limit)
    heartbeat.on_skipped = conversations.look_for_strays
    return Gateway(
        id=gateway_id,
        settings=settings,
        store=store,
        catalog=Catalog(store, settings.reread),
        admission=admission,
        commands=Commands(store, gateway_id, settings.admission_timeout),
        heartbeat=heartbeat,
        events=EventStreams(store),
        pools=pools,
        conversations=conversations,
        replay=Replay(talks, sessions, admission, settings.detach_limit),
        tally=tally,
        draining=asyncio.Event(),
    )


def _loops(gateway: Gateway) -> Iterator[Coroutine[Any, Any, None]]:
    inbox = Inbox(
        gateway.store,
        gateway.id,
        BLOCK_MS / 1000,
        gateway.admission,
        gateway.commands,
        gateway.catalog,
        gateway.events.on_event,
        gateway.pools.drop,
        gateway.conversations.on_over,
        lambda instance: gateway.pools.cut(instance, "it was stopped by force"),
    )
    yield gateway.heartbeat.run(gateway.admission)
    yield inbox.run()
    yield gateway.catalog.run()
    yield gateway.events.run()
    yield gateway.conversations.run()


async def _leave(gateway: Gateway) -> None:
    with suppress(TimeoutError, RedisError, StoreError, OSError):
        async with asyncio.timeout(LAST_WORDS_S):
            if gateway.tally.batch()[0]:
                await gateway.heartbeat.beat(gateway.admission)
            await gateway.store.leave(gateway.id)
