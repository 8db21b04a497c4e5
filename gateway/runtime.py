"""One gateway process at work: its parts, wired, started and ended together."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from llamastead.gateway.admission import Admission
from llamastead.gateway.catalog import Catalog
from llamastead.gateway.commands import Commands
from llamastead.gateway.events import EventStreams
from llamastead.gateway.heartbeat import Heartbeat
from llamastead.gateway.inbox import Inbox
from llamastead.gateway.upstream import Pools
from llamastead.shared.secret import instance_key, read_or_make_herd_secret
from llamastead.shared.settings import Settings
from llamastead.shared.store.connect import BLOCK_MS, connect
from llamastead.shared.store.errors import StoreError
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys

LAST_WORDS_S = 2.0


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
    draining: asyncio.Event


@asynccontextmanager
async def open_gateway(settings: Settings) -> AsyncIterator[Gateway]:
    """Run a gateway's parts as long as the context lasts, then give everything back to Redis and leave.

    A part that fails for a reason nobody foresaw ends the context: a gateway that no longer hears its inbox
    must not go on accepting requests. Raises OSError or ValueError when the herd secret can't be had.
    """
    secret = read_or_make_herd_secret(settings.run_dir / "secret")
    redis = connect(settings.redis_url)
    store = GatewayStore(redis, Keys(settings.redis_prefix))
    gateway_id = f"{settings.host_id}-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        async with asyncio.timeout(None) as leaving, asyncio.TaskGroup() as tasks:
            gateway = _assemble(settings, store, gateway_id, partial(instance_key, secret), tasks)
            loops = [tasks.create_task(part) for part in _loops(gateway)]
            try:
                yield gateway
            finally:
                for loop in loops:
                    loop.cancel()
                gateway.admission.end()
                leaving.reschedule(asyncio.get_running_loop().time() + LAST_WORDS_S)
        await _leave(store, gateway_id)
    except TimeoutError:
        if not leaving.expired():
            raise
    finally:
        await redis.aclose()


def _assemble(
    settings: Settings,
    store: GatewayStore,
    gateway_id: str,
    key_of: Callable[[str, str], str],
    tasks: asyncio.TaskGroup,
) -> Gateway:
    about = {"host": settings.host_id, "pid": str(os.getpid()), "address": f"{settings.host}:{settings.port}"}
    heartbeat = Heartbeat(store, gateway_id, about, settings.heartbeat)

    async def register() -> None:
        await heartbeat.beat(admission)

    admission = Admission(store, gateway_id, key_of, settings, tasks, register)
    return Gateway(
        id=gateway_id,
        settings=settings,
        store=store,
        catalog=Catalog(store, settings.reread),
        admission=admission,
        commands=Commands(store, gateway_id, settings.admission_timeout),
        heartbeat=heartbeat,
        events=EventStreams(store),
        pools=Pools(),
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
    )
    yield gateway.heartbeat.run(gateway.admission)
    yield inbox.run()
    yield gateway.catalog.run()
    yield gateway.events.run()


async def _leave(store: GatewayStore, gateway_id: str) -> None:
    with suppress(TimeoutError, RedisError, StoreError, OSError):
        async with asyncio.timeout(LAST_WORDS_S):
            await store.leave(gateway_id)
