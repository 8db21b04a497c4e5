"""Resumable conversations in Redis: who began them, where they are answered, how long they go on alone."""

from dataclasses import dataclass
from typing import cast

from redis.asyncio import Redis

from llamastead.shared.store.keys import Keys
from llamastead.shared.store.scripts import Scripts
from llamastead.shared.words import ConversationState

CLAIM = "conversation:"
"""How a conversation's claim is named among the leases of its instance; its own name follows."""

KEEP_MS = 300_000
"""How long an end can be asked for: the engine keeps what it said as long."""

LONGEST_MS = 86_400_000
"""How long a conversation that has its client is known, should its gateway die and never end it."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as Redis has it. `instance` is empty while it waits, its address once it is gone.

    `gateway_alive`: the gateway that waits for it, or waited, is registered. `deadline_ms` is Redis time, 0
    while it has its client. `lead` is how many bytes of comments its client got before those of the engine.
    """

    name: str
    state: ConversationState
    ticket: str
    model: str
    gateway_alive: bool
    instance: str = ""
    address: str = ""
    nonce: str = ""
    reason: str = ""
    deadline_ms: int = 0
    lead: int = 0


@dataclass(frozen=True)
class Before:
    """What a conversation was before a script ended it; both empty for none."""

    state: str
    instance: str


class ConversationStore:
    """What gateways and the supervisor do with conversations. Names are made by shared/streams.py.

    Every method raises redis.exceptions.RedisError when Redis is away.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis, keys.prefix)

    async def converse(self, name: str, ticket: str, gateway: str, model: str, request_id: str) -> Before:
        """Begin a conversation, which ends an older one of its name; return what that was.

        Where the older one waited, its gateway is told; its answer at an instance is the caller's to stop.
        """
        reply = await self._scripts.call(
            "converse",
            {"conversation": self._keys.conversation(name), "commands": self._keys.commands},
            {
                "name": name,
                "ticket": ticket,
                "gateway": gateway,
                "model": model,
                "request_id": request_id,
                "keep_ms": LONGEST_MS,
            },
        )
        return Before(*reply)

    async def attach(self, name: str, ticket: str, instance: str, lead: int = 0) -> bool:
        """Note the instance that answers it, and claim that; False when it is over.

        `lead` is how many bytes of comments its client gets before those of the engine.
        """
        reply = await self._scripts.call(
            "attach",
            {
                "conversation": self._keys.conversation(name),
                "leases_key": self._keys.leases(instance),
                "instance_key": self._keys.instance(instance),
            },
            {"name": name, "ticket": ticket, "instance": instance, "lead": lead},
        )
        return bool(reply)

    async def detach(self, name: str, ticket: str, instance: str, limit_ms: int) -> bool:
        """Let its claim last `limit_ms` from now, with no client to it; False: it is over or lost."""
        reply = await self._scripts.call(
            "detach",
            {
                "conversation": self._keys.conversation(name),
                "leases_key": self._keys.leases(instance),
                "instance_key": self._keys.instance(instance),
            },
            {
                "name": name,
                "ticket": ticket,
                "instance": instance,
                "limit_ms": limit_ms,
                "keep_ms": KEEP_MS,
            },
        )
        return bool(reply)

    async def conclude(
        self, name: str, state: ConversationState, ticket: str = "", reason: str = "", keep_ms: int = KEEP_MS
    ) -> Before:
        """End it and its claim, and return what it was; `ticket` empty: whichever has the name now."""
        reply = await self._scripts.call(
            "conclude",
            {"conversation": self._keys.conversation(name), "commands": self._keys.commands},
            {"name": name, "ticket": ticket, "state": state.value, "reason": reason, "keep_ms": keep_ms},
        )
        return Before(*reply)

    async def read_queued(self, gateway: str) -> dict[str, str]:
        """Return ticket → name of all that wait in a gateway, as Redis has it; looks through all."""
        prefix, found = self._keys.conversation(""), {}
        async for key in self._redis.scan_iter(match=f"{prefix}*", count=1000):
            state, owner, ticket = await self._redis.hmget(key, "state", "gateway", "ticket")
            if owner == gateway and state == ConversationState.QUEUED:
                found[str(ticket)] = str(key).removeprefix(prefix)
        return found

    async def read(self, name: str) -> Conversation | None:
        """Return a conversation, None where none of that name is known; two round trips."""
        fields = cast("dict[str, str]", await self._redis.hgetall(self._keys.conversation(name)))
        if not fields:
            return None
        instance = fields.get("instance", "")
        pipeline = self._redis.pipeline()
        pipeline.zscore(self._keys.gateways, fields["gateway"])
        pipeline.hmget(self._keys.instance(instance), "address", "nonce")
        beat, (address, nonce) = await pipeline.execute()
        return Conversation(
            name=name,
            state=ConversationState(fields["state"]),
            ticket=fields["ticket"],
            model=fields["model"],
            gateway_alive=beat is not None,
            instance=instance,
            address=address or "",
            nonce=nonce or "",
            reason=fields.get("reason", ""),
            deadline_ms=int(fields.get("deadline_ms") or 0),
            lead=int(fields.get("lead") or 0),
        )
