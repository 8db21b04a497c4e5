"""A small herd in Redis for the tests of the scripts."""

from typing import Any

from redis.asyncio import Redis

from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.store.records import Granted, HeartbeatResult, Message, Waiting
from llamastead.shared.words import InstanceState, UseKind

TTL_MS = 600_000
LIMITS = {"queue_limit": 0, "queue_limit_total": 0}


class Herd:
    """One leader and any gateways on one Redis, with short forms of what tests do all the time."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis = redis
        self.keys = keys
        self.gateway = GatewayStore(redis, keys)
        self.leader = LeaderStore(redis, keys, "token-1")
        self.beats: dict[str, int] = {}

    async def open(self, *models: str, gateways: tuple[str, ...] = ("g1", "g2"), **limits: int) -> "Herd":
        assert await self.leader.lead(1, TTL_MS, {"host": "here"})
        await self.leader.publish("r1", {model: {"source": "preset"} for model in models}, {})
        await self.leader.open_herd({**LIMITS, **limits})
        for gateway in gateways:
            await self.beat(gateway)
        return self

    async def beat(
        self,
        gateway: str,
        leases: dict[str, str] | None = None,
        tickets: dict[str, list[str]] | None = None,
        minting: tuple[str, ...] = (),
        **counts: Any,
    ) -> HeartbeatResult:
        self.beats[gateway] = self.beats.get(gateway, 0) + 1
        return await self.gateway.heartbeat(
            gateway, self.beats[gateway], {"host": "here"}, leases or {}, tickets or {}, minting, **counts
        )

    async def acquire(self, model: str, ticket: str, gateway: str = "g1", **more: Any) -> Granted | Waiting:
        return await self.gateway.acquire(model, ticket, gateway, UseKind.INFERENCE, 60_000, **more)

    async def start(self, instance: str, model: str, state: InstanceState = InstanceState.LOADING) -> None:
        fields = {
            "state": state.value,
            "address": f"unix:/{instance}",
            "nonce": f"n-{instance}",
            "load_ms": 5,
        }
        await self.leader.put_instance(instance, fields, model, {})

    async def ready(self, instance: str, model: str) -> int:
        await self.start(instance, model)
        return await self.leader.ready(instance, model, {})

    async def inbox(self, gateway: str) -> list[Message]:
        return list((await self.gateway.read_wait(gateway, "0-0", "999999999999999-0", 0)).inbox)

    async def asked(self) -> list[tuple[str, str]]:
        """Return what was asked of the supervisor, (verb, model or instance), and be done with it."""
        commands = await self.leader.read_commands(0)
        await self.leader.done([command.id for command in commands])
        return [(c.verb, c.fields.get("model") or c.fields.get("instance", "")) for c in commands]

    async def events(self, kind: str) -> list[dict[str, str]]:
        entries = await self.redis.xrange(self.keys.events)
        return [fields for _, fields in entries if fields["kind"] == kind]
