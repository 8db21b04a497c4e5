"""The heartbeat: says that this gateway is there and what it holds, and hears what got lost."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping

from redis.exceptions import RedisError

from llamastead.gateway.admission import Admission
from llamastead.gateway.tally import Tally
from llamastead.shared.store.connect import explain, refuses_writes
from llamastead.shared.store.errors import StoreError
from llamastead.shared.store.gateway import GatewayStore

log = logging.getLogger(__name__)


class Heartbeat:
    """Registers this gateway in Redis and renews that."""

    def __init__(
        self,
        store: GatewayStore,
        gateway: str,
        about: Mapping[str, str],
        interval_s: float,
        redis_url: str,
        patience_s: float,
        tally: Tally,
    ) -> None:
        """`about` is shown to operators: pid, host, address; `redis_url` is named when away; requests wait
        through refusals to write for `patience_s`; `tally` is what is added to the herd's totals.

        `trouble` is what the herd lacks, as of the last heartbeat; empty for nothing.
        """
        self.reached_redis = False
        self.failing = True
        self.herd_open = False
        self.trouble = ""
        self.on_skipped: Callable[[], None] = lambda: None  # Redis may be back with older data
        self._store = store
        self._gateway = gateway
        self._about = about
        self._interval_s = interval_s
        self._redis_url = redis_url
        self._patience_s = patience_s
        self._tally = tally
        self._refused_since: float | None = None
        self._beat = 0
        self._one_at_a_time = asyncio.Lock()

    async def beat(self, admission: Admission) -> None:
        """Send one heartbeat now. Raises RedisError, StoreError or OSError when Redis is away."""
        async with self._one_at_a_time:
            self._beat += 1
            batch, counts = self._tally.batch()
            now = {
                "in_flight": str(admission.leases.in_flight()),
                "busy": json.dumps(admission.leases.busy()),
                "waiting": str(admission.waiting()),
            }
            result = await self._store.heartbeat(
                self._gateway,
                self._beat,
                {**self._about, **now},
                admission.leases.ids(),
                admission.tickets(),
                admission.minting(),
                batch,
                counts,
            )
            self._tally.sent(batch)
            self.herd_open = result.herd_open
            admission.on_heartbeat(result)
            if result.skipped:
                self.on_skipped()
        if not result.known_before:
            log.info("registered", extra={"gateway": self._gateway})

    async def run(self, admission: Admission) -> None:
        """Beat until cancelled."""
        while True:
            try:
                await self.beat(admission)
                self.trouble = (await self._store.read_leadership()).trouble
            except (RedisError, StoreError, OSError) as problem:
                if not self.failing or not self.reached_redis:
                    log.warning("Redis is away, new requests wait: %s", self._explain(problem))
                self.failing = True
                self._note_refusal(admission, refuses_writes(problem))
            else:
                if self.failing and self.reached_redis:
                    log.info("Redis is back")
                self.failing, self.reached_redis = False, True
                self._refused_since = None
            await asyncio.sleep(self._interval_s)

    def _note_refusal(self, admission: Admission, word: str) -> None:
        """Refuse who waits once Redis has refused to write for long: nobody can be served until it does."""
        now = time.monotonic()
        self._refused_since = (self._refused_since or now) if word else None
        if self._refused_since is not None and now - self._refused_since >= self._patience_s:
            admission.on_no_writes(word)

    def _explain(self, problem: Exception) -> str:
        return explain(self._redis_url, problem) if isinstance(problem, RedisError) else str(problem)
