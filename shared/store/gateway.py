"""What a gateway does to the shared state. Every method is one round trip unless it says otherwise."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis

from llamastead.shared.store.errors import Code, refusal
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.parse import WAIT_FIELDS, demands, lease_id, messages, wait
from llamastead.shared.store.records import (
    Cursors,
    Demand,
    Granted,
    HeartbeatResult,
    Leadership,
    Messages,
    Wait,
    Waiting,
)
from llamastead.shared.store.scripts import Scripts
from llamastead.shared.words import UseKind

READ_AT_ONCE = 500


class GatewayStore:
    """The gateways' verbs: register, claim, give back, ask, read.

    Every method raises redis.exceptions.RedisError when Redis is away, and a StoreRefusal where a script says
    no. Ids of gateways, tickets and leases are made by the caller, unique, and hold neither "," nor ":" nor
    "+".
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis, keys.prefix)
        self._released_meanwhile: list[tuple[str, str, str, bool]] | None = None

    async def heartbeat(
        self,
        gateway: str,
        beat: int,
        info: Mapping[str, str],
        leases: Mapping[str, str],
        tickets: Mapping[str, Sequence[str]],
        minting: Sequence[str],
        batch: int = 0,
        counts: Mapping[str, Mapping[str, int]] = {},
    ) -> HeartbeatResult:
        """Register the gateway, or say that it is still there, and bring Redis in line with what it holds.

        `beat` grows by one with each call. `leases` (instance → lease id), `tickets` (model → ticket ids) and
        `minting` (ids of `acquire` calls under way) are everything alive in this process when the call is
        made: live leases that Redis lost are booked again where the instance exists and is not stopping;
        leases and tickets of this gateway that are not alive and were booked before its previous beat are
        removed. `info` is for display. `counts` (model → field of its record → how much more) are added,
        once however often a `batch` is sent; 0: there are none. One heartbeat at a time. Does not raise
        NoHerd: see HeartbeatResult.
        """
        self._released_meanwhile = []
        try:
            reply = await self._scripts.call(
                "heartbeat",
                {
                    "herd": self._keys.herd,
                    "gateways": self._keys.gateways,
                    "gateway_info": self._keys.gateway(gateway),
                    "inbox": self._keys.inbox(gateway),
                    "queue": self._keys.queue,
                    "instances": self._keys.instances,
                    "commands": self._keys.commands,
                },
                {
                    "gateway": gateway,
                    "beat": beat,
                    "info": json.dumps(dict(info)),
                    "leases": json.dumps(dict(leases)),
                    "tickets": json.dumps({model: list(ids) for model, ids in tickets.items()}),
                    "minting": json.dumps(list(minting)),
                    "batch": batch,
                    "counts": json.dumps({model: dict(fields) for model, fields in counts.items()}),
                },
            )
        finally:
            released, self._released_meanwhile = self._released_meanwhile, None
        # The heartbeat asserts what was held when it was made. It may have booked again what was released in
        # between, so that is released once more (a no-op in the usual order).
        for instance, owner, lease, used in released or ():
            await self.release(instance, owner, lease, used)
        before, herd_open, lost, missing, inbox_id = reply
        skipped = bool(before) and before != beat - 1
        return HeartbeatResult(bool(before), skipped, bool(herd_open), tuple(lost), tuple(missing), inbox_id)

    async def acquire(
        self,
        model: str,
        ticket: str,
        gateway: str,
        kind: UseKind,
        deadline_ms: int,
        not_instance: str = "",
        first_arrival_ms: int | None = None,
        request_id: str = "",
        may: str = "load",
    ) -> Granted | Waiting:
        """Claim the model's instance, or stand in the queue for it.

        READY, or SLEEPING for a peek, and not `not_instance`: a lease is booked whose id is the ticket's
        (over an older lease of this gateway there; see `release`). Anything else: the ticket is enrolled and
        the supervisor told.
        `deadline_ms` counts from now; what waits longer is failed by the supervisor. `first_arrival_ms`
        enrols a lost ticket with its old place. Calling again with the same ticket is harmless; a call of
        unknown outcome is undone by `give_back`. `may`: `load`, `wake` (a sleeper, no more) or `wait` (for
        what others have loaded or woken). Raises NoHerd, UnknownModel, Unregistered, NotLoaded, QueueFull.
        """
        reply = await self._scripts.call(
            "acquire",
            {
                "herd": self._keys.herd,
                "gateways": self._keys.gateways,
                "model_key": self._keys.model(model),
                "queue": self._keys.queue,
                "tickets_key": self._keys.tickets(model),
                "commands": self._keys.commands,
                "events": self._keys.events,
            },
            {
                "model": model,
                "ticket": ticket,
                "gateway": gateway,
                "kind": kind.value,
                "deadline_ms": deadline_ms,
                "not_instance": not_instance,
                "first_arrival_ms": first_arrival_ms or 0,
                "request_id": request_id,
                "may": may,
            },
        )
        if isinstance(reply, int):
            return Waiting(reply)
        instance, address, nonce, state_revision = reply
        return Granted(instance, address, nonce, int(state_revision))

    async def release(self, instance: str, gateway: str, lease: str, used: bool) -> bool:
        """Give a lease back; True when it was the one booked, False when there was nothing (more) to release.

        `used`: inference ran under it, which moves the time of last use. The last lease gone tells the
        supervisor. A gateway that was granted two leases on one instance at once (two `acquire` calls, or a
        grant from the inbox) holds the claim under the later id only and can't know which that is: it
        releases every id it was given.
        """
        if self._released_meanwhile is not None:
            self._released_meanwhile.append((instance, gateway, lease, used))
        reply = await self._scripts.call(
            "release",
            {
                "leases_key": self._keys.leases(instance),
                "instance_key": self._keys.instance(instance),
                "commands": self._keys.commands,
            },
            {"instance": instance, "gateway": gateway, "lease": lease, "used": int(used)},
        )
        return bool(reply)

    async def report(self, instance: str, right: bool, broken_after: int) -> int:
        """Note how an instance answered inference; return its errors so far, 0 once an answer was right.

        `broken_after` errors with no right answer since its load tell the supervisor that it is broken.
        """
        reply = await self._scripts.call(
            "report",
            {"instance_key": self._keys.instance(instance), "commands": self._keys.commands},
            {"instance": instance, "right": int(right), "broken_after": broken_after},
        )
        return int(reply)

    async def give_back(self, model: str, ticket: str, gateway: str) -> bool:
        """Take a ticket out of the queue, or undo what an `acquire` of unknown outcome booked under this id.

        False: neither exists, so the ticket was settled: a message about it is in the inbox (a grant's lease
        then has an id of its own and must be released). The model's last ticket gone tells the supervisor.
        """
        reply = await self._scripts.call(
            "give_back",
            {
                "queue": self._keys.queue,
                "model_key": self._keys.model(model),
                "commands": self._keys.commands,
            },
            {"model": model, "ticket": ticket, "gateway": gateway},
        )
        return bool(reply)

    async def submit(self, verb: str, gateway: str, deadline_ms: int, fields: Mapping[str, str]) -> str:
        """Ask the supervisor for something and return the command's id; the answer comes through the inbox.

        `deadline_ms` counts from now: read later than that, the command is answered as expired. Raises
        NoHerd.
        """
        reply = await self._scripts.call(
            "submit",
            {"herd": self._keys.herd, "commands": self._keys.commands},
            {
                "verb": verb,
                "gateway": gateway,
                "deadline_ms": deadline_ms,
                "fields": json.dumps(dict(fields)),
            },
        )
        return str(reply)

    async def leave(self, gateway: str) -> None:
        """Unregister: its tickets, leases and inbox go, and the supervisor is told what became free."""
        await self._scripts.call(
            "leave",
            {
                "gateways": self._keys.gateways,
                "queue": self._keys.queue,
                "instances": self._keys.instances,
                "commands": self._keys.commands,
            },
            {"gateway": gateway},
        )

    async def read_herd(self) -> dict[str, str]:
        """Return the herd's facts (`incarnation`, limits, versions); raises NoHerd where there is none."""
        herd = await self._hash(self._keys.herd)
        if not herd:
            raise refusal(Code.NO_HERD, [])
        return herd

    async def read_models(self) -> dict[str, dict[str, str]]:
        """Return every model in listing order, name → fields; thousands in pieces, so that others get on."""
        found = await self._hashes(self._keys.models, self._keys.model)
        return {name: fields for name, fields in found.items() if "name" in fields}

    async def read_model(self, name: str) -> dict[str, str]:
        """Return the fields of one model (canonical name).

        Raises UnknownModel, and NoHerd where it is not known which models there are.
        """
        model = await self._hash(self._keys.model(name))
        if "name" not in model or model.get("removed") == "1":
            await self.read_herd()
            raise refusal(Code.UNKNOWN_MODEL, [])
        return model

    async def read_unlisted(self, names: Iterable[str]) -> list[str]:
        """Return those of the models of which there is no record, or not all of it; thousands in pieces."""
        wanted, found = list(names), []
        for start in range(0, len(wanted), READ_AT_ONCE):
            some = wanted[start : start + READ_AT_ONCE]
            pipeline = self._redis.pipeline()
            for name in some:
                pipeline.hexists(self._keys.model(name), "revision")
            found += [name for name, there in zip(some, await pipeline.execute(), strict=True) if not there]
        return found

    async def read_downloads(self) -> dict[str, dict[str, str]]:
        """Return every download under way, oldest first, name → fields; two round trips."""
        return await self._hashes(self._keys.downloads, self._keys.download)

    async def read_aliases(self) -> dict[str, str]:
        """Return alias → canonical name."""
        return await self._hash(self._keys.aliases)

    async def read_queue(self) -> dict[str, Demand]:
        """Return who waits: model → its tickets, the entry that came first standing first."""
        _, entries = await self._scripts.call("read_queue", {"queue": self._keys.queue}, {})
        return demands(entries)

    async def read_waits(self) -> tuple[int, dict[str, Wait]]:
        """Return Redis's time and why models are waited for, as the supervisor wrote it."""
        names = cast("list[str]", await self._redis.zrange(self._keys.models, 0, -1))
        found: list[list[str]] = []
        for start in range(0, len(names), READ_AT_ONCE):
            some = names[start : start + READ_AT_ONCE]
            pipeline = self._redis.pipeline()
            for name in some:
                pipeline.hmget(self._keys.model(name), WAIT_FIELDS)
            found += await pipeline.execute()
        seconds, micros = await self._redis.time()
        waits = {name: wait(values) for name, values in zip(names, found, strict=True) if values[0]}
        return seconds * 1000 + micros // 1000, waits

    async def read_instances(self) -> dict[str, dict[str, str]]:
        """Return every instance, oldest first, id → fields; two round trips."""
        return await self._hashes(self._keys.instances, self._keys.instance)

    async def read_instance(self, instance: str) -> dict[str, str]:
        """Return the fields of one instance, empty where there is none."""
        return await self._hash(self._keys.instance(instance))

    async def read_leases(self, instance: str) -> dict[str, str]:
        """Return who holds an instance, gateway → lease id."""
        leases = await self._hash(self._keys.leases(instance))
        return {gateway: lease_id(value) for gateway, value in leases.items()}

    async def read_claims(self) -> dict[str, int]:
        """Return how many gateways hold each instance, id → leases; two round trips."""
        instances = cast("list[str]", await self._redis.zrange(self._keys.instances, 0, -1))
        pipeline = self._redis.pipeline()
        for instance in instances:
            pipeline.hlen(self._keys.leases(instance))
        return dict(zip(instances, await pipeline.execute(), strict=True))

    async def read_leadership(self) -> Leadership:
        """Return who leads, and what the leader says of itself."""
        pipeline = self._redis.pipeline()
        pipeline.exists(self._keys.leader)
        pipeline.hgetall(self._keys.leadership)
        leads, about = await pipeline.execute()
        return Leadership(
            number=int(about.get("number") or 0),
            leading=bool(leads),
            ready=bool(leads) and about.get("ready") == "1",
            oldest_demand_ms=int(about.get("oldest_demand_ms") or 0),
            heartbeat_ms=int(about.get("heartbeat_ms") or 0),
        )

    async def read_gateways(self) -> dict[str, dict[str, str]]:
        """Return every registered gateway, id → what it says of itself; two round trips."""
        return await self._hashes(self._keys.gateways, self._keys.gateway)

    async def read_devices(self, host: str) -> dict[str, dict[str, Any]]:
        """Return the devices of a host, name → its account as supervisor/core/ledger.py words it."""
        found = cast("dict[str, str]", await self._redis.hgetall(self._keys.devices(host)))
        return {name: json.loads(found[name]) for name in sorted(found)}

    async def read_workers(self) -> dict[str, dict[str, str]]:
        """Return every living worker, name → host, pid, state, job; two round trips."""
        return await self._hashes(self._keys.workers, self._keys.worker)

    async def read_cursors(self, gateway: str) -> Cursors:
        """Return where to begin reading. Take it before reading facts, so that nothing falls between."""
        pipeline = self._redis.pipeline()
        pipeline.xrevrange(self._keys.inbox(gateway), count=1)
        pipeline.xrevrange(self._keys.events, count=1)
        inbox, events = await pipeline.execute()
        return Cursors(inbox[0][0] if inbox else "0-0", events[0][0] if events else "0-0")

    async def read_wait(self, gateway: str, inbox_id: str, events_id: str, block_ms: int) -> Messages:
        """Return what came after the given ids in the inbox and in `events`, waiting up to `block_ms`.

        0 does not wait. After `known_before` was False begin the inbox anew at "0-0": all in it is for this
        process. Keep `block_ms` well below the socket time-out. After a time-out read the facts again.
        """
        inbox, events = self._keys.inbox(gateway), self._keys.events
        reply = await self._redis.xread(
            {inbox: inbox_id, events: events_id}, count=1000, block=block_ms or None
        )
        return Messages(messages(reply, inbox), messages(reply, events))

    async def _hash(self, key: str) -> dict[str, str]:
        return cast("dict[str, str]", await self._redis.hgetall(key))

    async def _hashes(self, index: str, key_of: Callable[[str], str]) -> dict[str, dict[str, str]]:
        names = cast("list[str]", await self._redis.zrange(index, 0, -1))
        found: dict[str, dict[str, str]] = {}
        for start in range(0, len(names), READ_AT_ONCE):
            some = names[start : start + READ_AT_ONCE]
            pipeline = self._redis.pipeline()
            for name in some:
                pipeline.hgetall(key_of(name))
            found.update(zip(some, await pipeline.execute(), strict=True))
        return {name: fields for name, fields in found.items() if fields}
