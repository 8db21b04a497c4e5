"""A supervisor in this process, on real Valkey and holders, and a gateway's word in its Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from holder_kit import PATIENCE_S
from redis.asyncio import Redis

from llamastead.shared.settings import Settings
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.words import UseKind
from llamastead.supervisor import main
from llamastead.supervisor.configuration import Configuration

LEADER_TTL_S = 60.0  # whoever waits for it fails the test


class Court:
    """A supervisor, what it serves, and a gateway that asks for it."""

    def __init__(self, redis: Redis, keys: Keys, settings: Settings) -> None:
        self.redis, self.keys = redis, keys
        self.gateway = GatewayStore(redis, keys)
        self.supervisor = main.Supervisor(settings, Configuration(settings))
        self._tickets = 0

    async def number(self) -> int:
        """Return the number of the present leadership, 0 while nobody leads."""
        if not await self.redis.exists(self.keys.leader):
            return 0
        return int(await self.redis.hget(self.keys.leadership, "number") or 0)

    async def instance(self, model: str) -> dict[str, str]:
        """Return the record of the model's instance, {} when there is none."""
        name = await self.redis.hget(self.keys.model(model), "instance")
        return {"id": name, **await self.redis.hgetall(self.keys.instance(name))} if name else {}

    async def want(self, model: str) -> None:
        """Stand in the queue for a model."""
        self._tickets += 1
        await self.gateway.acquire(model, f"t{self._tickets}", "g", UseKind.INFERENCE, 60_000)

    async def served(self, model: str) -> dict[str, str]:
        """Ask for a model and return the record of its instance once it is READY."""
        await self.want(model)

        async def look() -> dict[str, str]:
            found = await self.instance(model)
            return found if found.get("state") == "ready" else {}

        return dict(await self.until(look))

    async def until(self, look: Callable[[], Any]) -> Any:
        """Return the first true value of `look`, which asks Redis."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if found := await look():
                    return found
                await asyncio.sleep(0.01)

    async def reigns_after(self, number: int) -> int:
        """Wait for a later leadership under which all instances were adopted and return its number."""

        async def look() -> int:
            now = await self.number()
            records = (await self.gateway.read_instances()).values()
            return now if now > number and {r.get("epoch") for r in records} <= {str(now)} else 0

        return int(await self.until(look))


def settings_for(run_dir: Path, redis_url: str, **changes: Any) -> Settings:
    """Return settings with quick clocks, a lead that outlasts the test, and a gateway that may be silent."""
    quick = {"reread": 0.2, "heartbeat": 0.2, "leader_ttl": LEADER_TTL_S, "leader_renew": 0.2, "host_id": "h"}
    quick["suspect_after"] = 3600.0  # it beats once
    return Settings(run_dir=run_dir, redis_url=redis_url, **{**quick, **changes})


async def reigning(redis: Redis, keys: Keys, settings: Settings) -> AsyncIterator[Court]:
    """Yield a court whose supervisor runs, and let it stop in order."""
    (settings.run_dir / "i").mkdir(exist_ok=True, mode=0o700)
    made = Court(redis, keys, settings)
    task = asyncio.create_task(made.supervisor.run())

    async def open_herd() -> bool:
        return bool(await redis.exists(keys.herd)) and bool(await redis.zcard(keys.models))

    await made.until(open_herd)
    await made.gateway.heartbeat("g", 1, {}, {}, {}, [])
    yield made
    await made.gateway.leave("g")
    made.supervisor.stop.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await task == 0
