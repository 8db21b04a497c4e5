"""Has models measured by the worker, one at a time, and keeps what came of it beside what loads showed."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamastead.shared.clock import wall_ms
from llamastead.shared.devices.device import HOST
from llamastead.shared.figures import from_json, to_json
from llamastead.shared.jobs import MEASURE_TIMEOUT_S, Jobs
from llamastead.shared.secret import read_or_make_herd_secret, seal
from llamastead.shared.settings import Settings
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.book import Book
from llamastead.supervisor.core.events import Event, MeasuringBegan, MeasuringEnded, RegistryChanged
from llamastead.supervisor.core.lifecycle import LOADS
from llamastead.supervisor.core.queue import entries
from llamastead.supervisor.core.state import State

log = logging.getLogger(__name__)

MIB = 1 << 20
# What a measuring engine takes itself: a vocabulary and its buffers, and on a GPU the driver's context.
HOST_BOOKED, GPU_BOOKED = 512 * MIB, 512 * MIB
RETRIES = 2  # of a measurement that failed, each after a load that succeeded
WORKER_SILENT_S = 60.0
LOOK_S = 1.0
NOTHING_TO_DO_S = 5.0


class Measuring:
    """Runs as long as the reign. `on_measured` is told of results; `keep` writes down what a load showed."""

    def __init__(
        self,
        jobs: Jobs,
        redis: Redis,
        keys: Keys,
        reads: GatewayStore,
        store: LeaderStore,
        settings: Settings,
        book: Book,
        state: Callable[[], State],
        tell: Callable[[Event], None],
    ) -> None:
        self._jobs = jobs
        self._redis = redis
        self._keys = keys
        self._reads = reads
        self._store = store
        self._settings = settings
        self._book = book
        self._state = state
        self._tell = tell
        self._results: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def refresh(self) -> None:
        """Reckon all models anew and take what is known of them from earlier measurements and loads."""
        await asyncio.to_thread(self._book.refresh)
        for key in {known.key for known in self._book.known.values()}:
            await self._take(key)
        self._book.worker_lives = await self._worker_lives()

    def on_measured(self, identity: str, preset: str) -> None:
        """Take note that a job has written a result."""
        self._results.put_nowait((identity, preset))

    async def keep(self, model: str) -> None:
        """Write down what a load of a model showed; one whose measurement failed is measured once more."""
        known = self._book.known.get(model)
        if known is None or known.took is None:
            return
        fields: dict[str, str | int] = {
            "effective": json.dumps(to_json(known.took)),
            "effective_context": known.took_context,
            "effective_ms": wall_ms(),
        }
        await self._redis.hset(self._keys.measurement(*known.key), mapping=cast("Mapping[Any, Any]", fields))
        if known.failure and known.failures <= RETRIES:
            self._book.forget_failure(known.key)

    async def run(self) -> None:
        """Measure what is not, those first that somebody waits for, until cancelled."""
        while True:
            lives = await self._worker_lives()
            if lives != self._book.worker_lives:
                self._book.worker_lives = lives
                self._tell(RegistryChanged(self._book.specs()))
            model = self._next() if lives and self._devices_are_calm() else None
            if model is None:
                await self._wait_for_result(LOOK_S if self._next() else NOTHING_TO_DO_S)
            else:
                await self._measure(model)

    def _next(self) -> str | None:
        wanted = [entry.model for entry in entries(self._state())]
        return next((name for name in (*wanted, *self._book.known) if self._book.is_open(name)), None)

    def _devices_are_calm(self) -> bool:
        """Whether nothing starts where there are GPUs: what is read of them then is neither nor."""
        gpu = self._book.devices.first_gpu
        return gpu is None or not any(i.state in LOADS for i in self._state().instances.values())

    async def _measure(self, model: str) -> None:
        known = self._book.known[model]
        order = json.dumps(self._book.order(model))
        secret = read_or_make_herd_secret(self._settings.run_dir / "secret")
        gpus = {name: GPU_BOOKED for name in self._book.devices.devices if name != HOST}
        self._tell(MeasuringBegan(model, {HOST: HOST_BOOKED, **gpus}))
        try:
            await self._jobs.measure_model(model, known.key, order, seal(secret, order))
            if not await self._await_result(known.key):
                self._book.fail(known.key, "no worker finished the measurement")
        except RedisError as error:
            log.warning("measurement not asked for: %s", error, extra={"model": model})
            self._book.fail(known.key, "it could not be asked for")
        finally:
            self._tell(MeasuringEnded(model))
        self._tell(RegistryChanged(self._book.specs()))

    async def _await_result(self, key: tuple[str, str]) -> bool:
        """Wait for this result; False when its time is over, or no worker has been there for a while."""
        began = alive_at = time.monotonic()
        while time.monotonic() - began < MEASURE_TIMEOUT_S:
            if await self._wait_for_result(LOOK_S) == key:
                return True
            if await self._worker_lives():
                alive_at = time.monotonic()
            elif time.monotonic() - alive_at > WORKER_SILENT_S:
                return False
        return False

    async def _wait_for_result(self, seconds: float) -> tuple[str, str] | None:
        try:
            async with asyncio.timeout(seconds):
                key = await self._results.get()
        except TimeoutError:
            return None
        await self._take(key)
        self._tell(RegistryChanged(self._book.specs()))
        for model in self._book.models_of(key):
            memory = json.dumps(self._book.show(model))
            await self._store.put_model(model, {"memory": memory}, {"kind": "measured", "model": model})
        return key

    async def _take(self, key: tuple[str, str]) -> None:
        """Copy what Redis keeps of a measurement into the book."""
        found = cast("dict[str, str]", await self._redis.hgetall(self._keys.measurement(*key)))
        try:
            if found.get("effective"):
                took = from_json(json.loads(found["effective"]))
                self._book.took(key, took, int(found["effective_context"]))
            if found.get("state") == "measured":
                smallest, largest = (from_json(json.loads(found[name])) for name in ("min", "max"))
                self._book.measured(key, smallest, largest)
            elif found.get("state") == "failed":
                self._book.fail(key, found.get("error", ""), int(found.get("failures", 1)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("measurement can't be read: %r", error, extra={"key": ":".join(key)})

    async def _worker_lives(self) -> bool:
        workers = await self._reads.read_workers()
        return any(worker.get("host") == self._settings.host_id for worker in workers.values())
