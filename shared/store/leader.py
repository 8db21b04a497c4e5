"""What the leading supervisor does to the shared state: every change compares the leader's token first."""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from redis.asyncio import Redis

from llamastead.shared.store.errors import StaleLeader, WrongState
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.parse import command, demands, lease_id, pairs
from llamastead.shared.store.records import Claimed, Claims, Command, Facts, Stopping
from llamastead.shared.store.scripts import Scripts
from llamastead.shared.words import WIRE_STATUS, EndClass, InstanceState

Fields = Mapping[str, str | int]
"""Fields of a hash; numbers are written in decimal."""


class LeaderStore:
    """The leader's verbs; all but `lead` and `read_number` raise StaleLeader when `token` does not lead.

    `token` is random and made anew for each attempt to lead. A state that a change does not start from raises
    WrongState, an instance without a record UnknownInstance, and nothing is changed. Every change of an
    instance's state also writes `state` and `status` of its model, raises `state_revision` and emits an event
    `status`.
    """

    def __init__(self, redis: Redis, keys: Keys, token: str) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis, keys.prefix)
        self._token = token
        self._commands_cursor: str | None = None

    async def _as_leader(self, name: str, keys: Mapping[str, str], argv: Mapping[str, str | int]) -> Any:
        """Run a script of the leader: it also gets the lock's key and the token to compare."""
        return await self._scripts.call(
            name, {"leader": self._keys.leader, **keys}, {"token": self._token, **argv}
        )

    # --- leadership

    async def lead(self, number: int, ttl_ms: int, info: Mapping[str, str]) -> bool:
        """Try to take the leadership under this number (1 + the larger of Redis's and the run folder's).

        False when another leads, or when the number is not above the last one known here: read it again.
        `info` (host, pid, …) is shown in the hash `leadership`.
        """
        reply = await self._as_leader(
            "lead",
            {"leadership": self._keys.leadership},
            {"number": number, "ttl_ms": ttl_ms, "info": json.dumps(dict(info))},
        )
        return bool(reply)

    async def renew(self, ttl_ms: int, info: Mapping[str, str] | None = None) -> None:
        """Keep the leadership for another `ttl_ms` and write the heartbeat (and `info`) into `leadership`."""
        await self._as_leader(
            "renew",
            {"leadership": self._keys.leadership},
            {"ttl_ms": ttl_ms, "info": json.dumps(dict(info or {}))},
        )

    async def resign(self) -> bool:
        """Give the leadership up, so that a standby need not wait for the TTL; False when it was lost."""
        try:
            await self._as_leader("resign", {}, {})
        except StaleLeader:
            return False
        return True

    async def read_number(self) -> int:
        """Return the number of the last leadership this Redis knows, 0 for none."""
        return int(await self._redis.hget(self._keys.leadership, "number") or 0)

    # --- the herd and its registry

    async def open_herd(self, fields: Fields) -> str:
        """Say that the herd is there, with these facts and limits, and return its incarnation.

        Call it when recovery has put the adopted instances: from here on gateways take what Redis says for
        the truth. The incarnation is kept while Redis keeps its data. Fields not given stay.
        """
        reply = await self._as_leader(
            "open_herd",
            {"herd": self._keys.herd, "events": self._keys.events},
            {"fresh_incarnation": uuid4().hex, "fields": _json(fields)},
        )
        return str(reply)

    async def publish(
        self,
        registry_revision: str,
        models: Mapping[str, Fields | None],
        aliases: Mapping[str, str],
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Make this the registry, in this order, in one change; one event `registry`, with `changes`.

        The given fields are written and all others of a model stay; None leaves a model as it is. A model
        that is gone vanishes, or, while it has an instance, is marked `removed` (no more admissions) until
        that ends. Its waiting tickets: see `fail`.
        """
        registry = [[name] if fields is None else [name, _plain(fields)] for name, fields in models.items()]
        await self._as_leader(
            "publish",
            {
                "models": self._keys.models,
                "aliases": self._keys.aliases,
                "herd": self._keys.herd,
                "events": self._keys.events,
            },
            {
                "revision": registry_revision,
                "registry": json.dumps(registry),
                "alias_names": _json(aliases),
                "changes": json.dumps(changes or {}),
            },
        )

    async def put_herd(self, fields: Fields) -> None:
        """Write facts of the herd that change while it is open."""
        await self._as_leader("put_herd", {"herd": self._keys.herd}, {"fields": _json(fields)})

    async def put_model(self, model: str, fields: Fields, event: Fields | None = None) -> None:
        """Write fields of a model (metadata, progress, reasons) and emit `event`, which has a `kind`."""
        await self._as_leader(
            "put_model",
            {"model_key": self._keys.model(model), "events": self._keys.events},
            {"fields": _json(fields), "event": _json(event or {})},
        )

    async def count(
        self, model: str, instance: str, counters: Mapping[str, float], gauges: Mapping[str, float]
    ) -> None:
        """Add to the fields `counters` of a model what its instance has done since the last time; they are as
        the instance counts, from its start on. `gauges` are written as they are.
        """
        await self._as_leader(
            "count",
            {"model_key": self._keys.model(model)},
            {"instance": instance, "counters": json.dumps(counters), "gauges": json.dumps(gauges)},
        )

    async def put_download(self, name: str, fields: Fields, event: Fields | None = None) -> None:
        """Begin a download or write fields of it, and emit `event`, which has a `kind`."""
        await self._as_leader(
            "put_download",
            {
                "download_key": self._keys.download(name),
                "downloads": self._keys.downloads,
                "events": self._keys.events,
            },
            {"name": name, "fields": _json(fields), "event": _json(event or {})},
        )

    async def drop_download(self, name: str, event: Fields | None = None) -> bool:
        """Forget a download and emit `event`; False when there was none."""
        reply = await self._as_leader(
            "drop_download",
            {
                "download_key": self._keys.download(name),
                "downloads": self._keys.downloads,
                "events": self._keys.events,
            },
            {"name": name, "event": _json(event or {})},
        )
        return bool(reply)

    async def put_devices(
        self, host: str, accounts: Mapping[str, Mapping[str, Any]], held: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Show a host's devices, each with its account, and bytes by model of each device."""
        await self._as_leader(
            "put_devices",
            {"devices_key": self._keys.devices(host)},
            {
                "host": host,
                "accounts": json.dumps({name: json.dumps(dict(facts)) for name, facts in accounts.items()}),
                "held": json.dumps({name: _plain(models) for name, models in held.items()}),
            },
        )

    # --- facts

    async def observe(self) -> Facts:
        """Return queue, claims and gateways as of one instant."""
        reply = await self._as_leader(
            "observe",
            {"queue": self._keys.queue, "instances": self._keys.instances, "gateways": self._keys.gateways},
            {},
        )
        now_ms, queue, claims, gateways = reply
        return Facts(
            now_ms,
            demands(queue),
            {
                instance: Claims({name: lease_id(value) for name, value in pairs(leases)}, int(last_used_ms))
                for instance, last_used_ms, leases in claims
            },
            {gateway: int(beat) for gateway, beat in pairs(gateways)},
        )

    async def missing(self, *, has_models: bool, has_aliases: bool) -> list[str]:
        """Return the names of keys that a leader wrote and that are gone; what the registry has none of is
        not missed.
        """
        reply = await self._as_leader(
            "missing",
            {
                "herd": self._keys.herd,
                "leadership": self._keys.leadership,
                "models": self._keys.models,
                "aliases": self._keys.aliases,
                "instances": self._keys.instances,
            },
            {"has_models": int(has_models), "has_aliases": int(has_aliases)},
        )
        return [str(name) for name in reply]

    # --- instances

    async def put_instance(
        self, instance: str, fields: Fields, model: str, model_fields: Fields, event: Fields | None = None
    ) -> None:
        """Create or update an instance and the model it serves: STARTING, LOADING, progress, adoption.

        With `state` among `fields` the model follows it. Not for READY: see `ready`.
        """
        own = _plain(fields)
        state = own.pop("state", "")
        await self._as_leader(
            "put_instance",
            {
                "instances": self._keys.instances,
                "instance_key": self._keys.instance(instance),
                "model_key": self._keys.model(model),
                "events": self._keys.events,
            },
            {
                "instance": instance,
                "model": model,
                "fields": json.dumps(own),
                "model_fields": _json(model_fields),
                "state": state,
                "status": WIRE_STATUS[InstanceState(state)].value if state else "",
                "event": _json(event or {}),
            },
        )

    async def ready(
        self, instance: str, model: str, fields: Fields, model_fields: Fields | None = None
    ) -> int:
        """Make an instance READY and turn the tickets of registered gateways into leases, in one change.

        Returns how many tickets were granted. Each gateway gets one lease and one inbox message {type:
        granted, model, instance, address, nonce, state_revision, lease, tickets: "t1,t2", load_ms}; tickets
        of unknown gateways are dropped. Sets the time of last use; counts a load when it was starting or
        loading. `fields` must bring `address` and `nonce` unless they were put before. From STARTING,
        LOADING, WAKING, SLEEPING, RECOVERING or READY.
        """
        reply = await self._as_leader(
            "ready",
            {
                "instance_key": self._keys.instance(instance),
                "model_key": self._keys.model(model),
                "gateways": self._keys.gateways,
                "queue": self._keys.queue,
                "events": self._keys.events,
            },
            {
                "instance": instance,
                "model": model,
                "fields": _json(fields),
                "model_fields": _json(model_fields or {}),
                "status": _status(InstanceState.READY),
            },
        )
        return int(reply)

    async def wake(self, instance: str, model: str) -> int:
        """SLEEPING → WAKING with the same grants as `ready`: the first of the requests wakes the engine."""
        reply = await self._as_leader(
            "wake",
            {
                "instance_key": self._keys.instance(instance),
                "gateways": self._keys.gateways,
                "queue": self._keys.queue,
                "events": self._keys.events,
            },
            {"instance": instance, "model": model, "status": _status(InstanceState.WAKING)},
        )
        return int(reply)

    async def drain(self, instance: str) -> bool:
        """READY → DRAINING: no new leases. False when it is not READY.

        Gateways with a lease get {type: draining, instance}, so that they give lingering ones back at once.
        """
        reply = await self._as_leader(
            "drain",
            {"instance_key": self._keys.instance(instance), "events": self._keys.events},
            {"instance": instance, "status": _status(InstanceState.DRAINING)},
        )
        return bool(reply)

    async def want(self, instance: str) -> None:
        """Tell gateways with a lease on an instance that its room is wanted: {type: wanted, instance}."""
        await self._as_leader("want", {}, {"instance": instance})

    async def undrain(self, instance: str) -> int | None:
        """DRAINING → READY with the same grants as `ready`; None when it is not DRAINING."""
        try:
            reply = await self._as_leader(
                "undrain",
                {
                    "instance_key": self._keys.instance(instance),
                    "gateways": self._keys.gateways,
                    "queue": self._keys.queue,
                    "events": self._keys.events,
                },
                {"instance": instance, "status": _status(InstanceState.READY)},
            )
        except WrongState:
            return None
        return int(reply)

    async def stop(self, instance: str, end_class: EndClass) -> Stopping | Claimed:
        """READY, DRAINING or SLEEPING → STOPPING, refused while there is a lease."""
        reply = await self._as_leader(
            "stop",
            {
                "instance_key": self._keys.instance(instance),
                "leases_key": self._keys.leases(instance),
                "events": self._keys.events,
            },
            {"instance": instance, "end_class": end_class.value, "status": _status(InstanceState.STOPPING)},
        )
        return Claimed(reply) if reply else Stopping()

    async def sleep(self, instance: str) -> bool:
        """READY → SLEEPING; False while there is a lease."""
        reply = await self._as_leader(
            "sleep",
            {
                "instance_key": self._keys.instance(instance),
                "leases_key": self._keys.leases(instance),
                "events": self._keys.events,
            },
            {"instance": instance, "status": _status(InstanceState.SLEEPING)},
        )
        return bool(reply)

    async def ended(
        self,
        instance: str,
        end_class: EndClass,
        exit_code: int | None,
        reason: str,
        model_fields: Fields | None = None,
        state: InstanceState = InstanceState.STOPPED,
    ) -> bool:
        """Remove an instance and its leases; False when it is not there (any more).

        Gateways with a lease get {type: ended, instance, model}. The model, if this is still its instance,
        takes `state`, its end class, exit code, reason and `model_fields`. The event `status` carries them
        too.
        """
        reply = await self._as_leader(
            "ended",
            {
                "instances": self._keys.instances,
                "instance_key": self._keys.instance(instance),
                "leases_key": self._keys.leases(instance),
                "events": self._keys.events,
            },
            {
                "instance": instance,
                "model_fields": _json(model_fields or {}),
                "state": state.value,
                "status": _status(state),
                "end_class": end_class.value,
                "exit_code": "" if exit_code is None else exit_code,
                "reason": reason,
            },
        )
        return bool(reply)

    # --- settling

    async def fail(self, model: str, error: Mapping[str, Any], tickets: Sequence[str] | None = None) -> int:
        """Settle all (or the given) tickets of a model with a refusal, once; returns how many.

        Each gateway gets one message {type: failed, model, tickets: "t1,t2", error: JSON}: status, message,
        fields, retry_after of an ApiError.
        """
        reply = await self._as_leader(
            "fail",
            {"gateways": self._keys.gateways, "queue": self._keys.queue},
            {
                "model": model,
                "error": json.dumps(dict(error)),
                "only": "" if tickets is None else json.dumps(list(tickets)),
            },
        )
        return int(reply)

    async def answer(self, command: str, gateway: str, payload: Mapping[str, Any]) -> bool:
        """Answer a command and be done with it: inbox {type: answer, command, payload: JSON}.

        False: it was answered before; a command is answered once.
        """
        reply = await self._as_leader(
            "answer",
            {"commands": self._keys.commands},
            {"command": command, "gateway": gateway, "payload": json.dumps(dict(payload))},
        )
        return bool(reply)

    async def at_work(self, orders: Mapping[str, str]) -> None:
        """Tell gateways that their commands (id → gateway) are being done: inbox {type: at_work, command}."""
        await self._as_leader("at_work", {}, {"orders": json.dumps(dict(orders))})

    async def done(self, commands: Sequence[str]) -> None:
        """Be done with commands that take no answer."""
        await self._as_leader("done", {"commands": self._keys.commands}, {"ids": json.dumps(list(commands))})

    async def sweep(self, gateway: str) -> None:
        """Forget a silent gateway: its tickets, leases and inbox go; `commands` says what became free."""
        await self._as_leader(
            "sweep",
            {
                "gateways": self._keys.gateways,
                "queue": self._keys.queue,
                "instances": self._keys.instances,
                "commands": self._keys.commands,
                "events": self._keys.events,
            },
            {"gateway": gateway},
        )

    async def emit(self, kind: str, fields: Fields) -> None:
        """Append to `events`."""
        await self._as_leader(
            "emit", {"events": self._keys.events}, {"event": _json({**fields, "kind": kind})}
        )

    async def read_commands(self, block_ms: int, limit: int = 100) -> list[Command]:
        """Return the next commands, waiting up to `block_ms` for one; up to three round trips.

        The first call also returns what an earlier leader took and did not finish. Each is delivered once to
        this leader, and again to the next one until `answer` or `done`. After an error or a cancelled call
        the next call delivers all that is unfinished again: remember the ids of those under way.
        """
        taken = await self._take_commands(limit)
        if taken or block_ms <= 0:
            return taken
        await self._redis.xread(
            {self._keys.commands: self._commands_cursor or "0-0"}, count=1, block=block_ms
        )
        return await self._take_commands(limit)

    async def _take_commands(self, limit: int) -> list[Command]:
        take_over, self._commands_cursor = self._commands_cursor is None, None
        now_ms, self._commands_cursor, entries = await self._as_leader(
            "take_commands",
            {"commands": self._keys.commands},
            {"limit": limit, "take_over": int(take_over)},
        )
        return [command(now_ms, entry, dict(pairs(flat)), take_over) for entry, flat in entries]


def _plain(fields: Fields) -> dict[str, str]:
    return {name: str(value) for name, value in fields.items()}


def _json(fields: Fields) -> str:
    return json.dumps(_plain(fields))


def _status(state: InstanceState) -> str:
    return WIRE_STATUS[state].value
