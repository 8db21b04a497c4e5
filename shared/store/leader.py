"""What the leading supervisor does to the shared state: every change compares the leader's token first."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from llamastead.shared.store.keys import Keys
from llamastead.shared.store.records import Claimed, Command, Facts, Stopping
from llamastead.shared.store.scripts import Scripts
from llamastead.shared.words import EndClass

Fields = Mapping[str, str | int]
"""Fields of a hash; numbers are written in decimal."""


class LeaderStore:
    """The leader's verbs. Every method but `lead`, `read_number` raises StaleLeader when `token` does not lead.

    `token` is random and made anew for each attempt to lead. A state that a change does not start from raises
    WrongState, an instance without a record UnknownInstance, and nothing is changed. Every change of an instance's
    state also writes `state` and `status` of its model, raises `state_revision` and emits an event `status`.
    """

    def __init__(self, redis: Redis, keys: Keys, token: str) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis)

    # --- leadership

    async def lead(self, number: int, ttl_ms: int, info: Mapping[str, str]) -> bool:
        """Try to take the leadership under this number (1 + the larger of Redis's and the run folder's).

        False when another leads, or when the number is not above the last one known here: read it again.
        `info` (host, pid, …) is shown in the hash `leadership`.
        """

    async def renew(self, ttl_ms: int, info: Mapping[str, str] | None = None) -> None:
        """Keep the leadership for another `ttl_ms` and write the heartbeat (and `info`) into `leadership`."""

    async def resign(self) -> None:
        """Give the leadership up, so that a standby needs not wait for the TTL."""

    async def read_number(self) -> int:
        """Return the number of the last leadership this Redis knows, 0 for none."""

    # --- the herd and its registry

    async def open_herd(self, fields: Fields) -> str:
        """Say that the herd is there, with these facts and limits, and return its incarnation.

        Call it when recovery has put the adopted instances: from here on gateways take what Redis says for the truth.
        The incarnation is kept while Redis keeps its data. Fields not given stay.
        """

    async def publish(
        self, registry_revision: str, models: Mapping[str, Fields], aliases: Mapping[str, str]
    ) -> None:
        """Make this the registry, in this order, in one change; one event `registry`.

        The given fields are written and all others of a model stay. A model that is gone vanishes, or, while it has
        an instance, is marked `removed` (no more admissions) until that ends. Its waiting tickets: see `fail`.
        """

    async def put_model(self, model: str, fields: Fields, event: Fields | None = None) -> None:
        """Write fields of a model (metadata, progress, reasons) and emit `event` (its member `kind` names it)."""

    # --- facts

    async def observe(self) -> Facts:
        """Return queue, claims and gateways as of one instant."""

    # --- instances

    async def put_instance(
        self, instance: str, fields: Fields, model: str, model_fields: Fields, event: Fields | None = None
    ) -> None:
        """Create or update an instance and the model it serves: STARTING, LOADING, progress, adoption.

        With `state` among `fields` the model follows it. Not for READY: see `ready`.
        """

    async def ready(self, instance: str, model: str, fields: Fields, model_fields: Fields | None = None) -> int:
        """Make an instance READY and turn the waiting tickets of registered gateways into leases, in one change.

        Returns how many tickets were granted. Each gateway gets one lease and one inbox message {type: granted,
        model, instance, address, nonce, state_revision, lease, tickets: "t1,t2", load_ms}; tickets of unknown
        gateways are dropped. Sets the time of last use; counts a load when it was starting or loading. `fields` must
        bring `address` and `nonce` unless they were put before. From STARTING, LOADING, WAKING, SLEEPING, RECOVERING
        or READY.
        """

    async def wake(self, instance: str, model: str) -> int:
        """SLEEPING → WAKING with the same grants as `ready`: the first request of a lease wakes the engine."""

    async def drain(self, instance: str) -> bool:
        """READY → DRAINING: no new leases. False when it is not READY.

        Gateways with a lease get {type: draining, instance}, so that they give lingering ones back at once.
        """

    async def undrain(self, instance: str) -> int | None:
        """DRAINING → READY with the same grants as `ready`; None when it is not DRAINING."""

    async def stop(self, instance: str, end_class: EndClass) -> Stopping | Claimed:
        """READY, DRAINING or SLEEPING → STOPPING, refused while there is a lease."""

    async def sleep(self, instance: str) -> bool:
        """READY → SLEEPING; False while there is a lease."""

    async def ended(
        self,
        instance: str,
        end_class: EndClass,
        exit_code: int | None,
        reason: str,
        model_fields: Fields | None = None,
        state: str = "stopped",
    ) -> bool:
        """Remove an instance and its leases; False when it is not there (any more).

        Gateways with a lease get {type: ended, instance, model}. The model, if this is still its instance, takes
        `state`, its end class, exit code, reason and `model_fields`. The event `status` carries them too.
        """

    # --- settling

    async def fail(self, model: str, error: Mapping[str, Any], tickets: Sequence[str] | None = None) -> int:
        """Settle all (or the given) tickets of a model with a refusal, once; returns how many.

        Each gateway gets one message {type: failed, model, tickets: "t1,t2", error: JSON}: status, message, fields,
        retry_after of an ApiError.
        """

    async def answer(self, command: str, gateway: str, payload: Mapping[str, Any]) -> None:
        """Answer a command, once, and be done with it: inbox {type: answer, command, payload: JSON}."""

    async def done(self, commands: Sequence[str]) -> None:
        """Be done with commands that take no answer."""

    async def sweep(self, gateway: str) -> None:
        """Forget a silent gateway: its tickets, leases and inbox go; the supervisor's stream says what became free."""

    async def emit(self, kind: str, fields: Fields) -> None:
        """Append to `events`."""

    async def read_commands(self, block_ms: int, limit: int = 100) -> list[Command]:
        """Return the next commands, waiting up to `block_ms` for one; up to three round trips.

        The first call also returns what an earlier leader took and did not finish. Each is delivered once to this
        leader, and again to the next one until `answer` or `done`.
        """
