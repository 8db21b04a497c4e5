"""Has models measured by the worker, one at a time, and keeps what came of it beside what loads showed."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamastead.shared.clock import wall_ms
from llamastead.shared.devices.device import HOST, MIB
from llamastead.shared.figures import from_json, to_json
from llamastead.shared.jobs import MEASURE_MODEL, Jobs, measure_job
from llamastead.shared.secret import kept_herd_secret, seal
from llamastead.shared.settings import Settings
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.words import JobState
from llamastead.supervisor.book import Book
from llamastead.supervisor.core.events import Event, MeasuringBegan, MeasuringEnded, RegistryChanged
from llamastead.supervisor.core.lifecycle import LOADS
from llamastead.supervisor.core.queue import entries
from llamastead.supervisor.core.state import State
from llamastead.supervisor.known import Key

log = logging.getLogger(__name__)

# What a measuring engine takes itself: a vocabulary and its buffers, and on a GPU the driver's context.
HOST_BOOKED, GPU_BOOKED = 512 * MIB, 512 * MIB
RETRIES = 2  # of a measurement that failed, each after a load that succeeded
WORKER_SILENT_S = 60.0
QUEUED_S = 10.0
"""A measurement that no worker begins for so long is put off: what it has booked may keep others waiting."""
LOOK_S = 1.0
CLOSE_S = 2.0
NOTHING_TO_DO_S = 5.0


class Measuring:
    """Runs as long as the reign. It is told of results, of loads, and of what processes are seen to use."""

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
        know: Callable[[Collection[str]], Awaitable[Event | None]],
    ) -> None:
        """`know` has the figures of models worked out that are not yet."""
        self._jobs = jobs
        self._know = know
        self._redis = redis
        self._keys = keys
        self._reads = reads
        self._store = store
        self._settings = settings
        self._book = book
        self._state = state
        self._tell = tell
        self._results: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._to_keep: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._under_way: str | None = None
        self._closing = False

    async def recall(self, keys: Collection[Key]) -> None:
        """Take into the book what Redis keeps of these measurements."""
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.hgetall(self._keys.measurement(*key))
        for key, found in zip(keys, await pipeline.execute(), strict=True):
            self._note(key, found)

    def on_measured(self, identity: str, preset: str) -> None:
        """Take note that a job has written a result."""
        self._results.put_nowait((identity, preset))

    def on_loaded(self, model: str) -> None:
        """Take note that a load has told what it took."""
        self._to_keep.put_nowait(lambda: self._keep(model))

    def on_seen(self, seen: Mapping[str, Mapping[str, int]]) -> None:
        """Take note of what models' processes are seen to use by device."""
        self._to_keep.put_nowait(lambda: self._keep_peaks(seen))

    def on_untold(self, key: Key, amounts: Mapping[str, int]) -> None:
        """Take note of what a process is seen to use of devices beyond what its engine told."""
        if self._book.untold(key, amounts):
            self._to_keep.put_nowait(lambda: self._keep_untold(key))
            self._tell(RegistryChanged(self._book.specs()))

    async def keep(self) -> None:
        """Write down what was noted, until cancelled."""
        while True:
            await (await self._to_keep.get())()

    async def _keep(self, model: str) -> None:
        """Write down what a load of a model showed; one whose measurement failed is measured once more."""
        known = self._book.known.get(model)
        if known is None:
            return
        if known.took is not None:
            fields: dict[str, str | int] = {
                "effective": json.dumps(to_json(known.took)),
                "effective_context": known.took_context,
                "effective_ms": known.took_ms,
            }
            place = self._keys.measurement(*known.key)
            await self._redis.hset(place, mapping=cast("Mapping[Any, Any]", fields))
        if known.failure and known.failures <= RETRIES:
            self._book.forget_failure(known.key)

    async def _keep_peaks(self, seen: Mapping[str, Mapping[str, int]]) -> None:
        """Write down the most that models' processes were seen to use, where that has grown."""
        for model, amounts in seen.items():
            known = self._book.known.get(model)
            if known is not None and self._book.peaked(known.key, amounts):
                peak = json.dumps(dict(self._book.known[model].peak))
                await self._redis.hset(self._keys.measurement(*known.key), "peak", peak)
                await self._show(known.key)

    async def _keep_untold(self, key: Key) -> None:
        await self._redis.hset(self._keys.measurement(*key), "untold", json.dumps(self._book.untold_of(key)))
        await self._show(key)

    async def run(self) -> None:
        """Measure what is not, those first that somebody waits for, until cancelled."""
        for record in await self._jobs.under_way():
            # An earlier reign asked for it: nothing else is measured beside it.
            if record.name == MEASURE_MODEL:
                await self._know((record.model,))
                known = self._book.known.get(record.model)
                same = known is not None and measure_job(known.key) == record.id
                if same and self._book.is_open(record.model):
                    await self._measure(record.model)
                else:
                    await self._jobs.cancel(record.id)
        while not self._closing:
            await self.count_workers()
            model = self._next() if self._book.worker_lives else None
            if model is None or not self._may_measure(model):
                await self._wait_for_result(LOOK_S if self._next() else NOTHING_TO_DO_S)
            else:
                await self._measure(model)

    async def close(self) -> None:
        """Ask for no more measurements, and call the one off that is under way.

        Without Redis, or with a slow one, it is left to its worker: nobody waits for that to end.
        """
        self._closing = True
        if self._under_way is not None:
            with contextlib.suppress(RedisError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._jobs.cancel(self._under_way)

    def _next(self) -> str | None:
        return self._book.next_to_measure(entry.model for entry in entries(self._state()))

    def _may_measure(self, model: str) -> bool:
        """Whether its devices have what measuring takes itself, and nothing starts where there are GPUs: what
        is read of them then is neither nor.
        """
        state = self._state()
        if self._book.devices.first_gpu and any(i.state in LOADS for i in state.instances.values()):
            return False
        shown = ((state.devices[name].free, size) for name, size in self._takes(model).items())
        return all(free is None or free >= size for free, size in shown)

    def _takes(self, model: str) -> dict[str, int]:
        """Return what a measurement takes itself: of the host, and of the GPUs that its engine sees."""
        seen = {HOST, *self._book.known[model].spot.names.values()} & self._state().devices.keys()
        return {name: HOST_BOOKED if name == HOST else GPU_BOOKED for name in seen}

    async def _measure(self, model: str) -> None:
        known = self._book.known[model]
        order = json.dumps(self._book.order(model))
        secret = kept_herd_secret(self._settings.run_dir / "secret")
        self._tell(MeasuringBegan(model, self._takes(model)))
        self._under_way = measure_job(known.key)
        try:
            await self._jobs.measure_model(model, known.key, order, seal(secret, order))
            await self._await_result(known.key)
        except RedisError as error:
            log.warning("measurement not asked for: %s", error, extra={"model": model})
            self._book.fail(known.key, "it could not be asked for")
        finally:
            self._under_way = None
            self._tell(MeasuringEnded(model))
        await self._show(known.key)
        self._tell(RegistryChanged(self._book.specs()))

    async def _await_result(self, key: tuple[str, str]) -> None:
        """Wait until a measurement is over. One that vanished, or is put off, is asked for anew."""
        began = alive_at = time.monotonic()
        shown = ""
        while await self._wait_for_result(LOOK_S) != key:
            record = await self._jobs.record(measure_job(key))
            if record is None or (record.state is JobState.FAILED and self._closing):
                return
            if record.state is JobState.DONE:
                await self._take(key)
                return
            if record.state is JobState.FAILED:
                await self._note_failure(key, record.error, record.asked_ms)
                return
            if record.state is JobState.QUEUED and time.monotonic() - began > QUEUED_S:
                await self._jobs.cancel(record.id)
                return
            if (now := f"{record.state} {record.progress}".strip()) != shown:
                shown = now
                await self._show(key, now)
            if await self.count_workers():
                alive_at = time.monotonic()
            elif time.monotonic() - alive_at > WORKER_SILENT_S:
                await self._jobs.cancel(record.id)
                await self._note_failure(key, "no worker finished the measurement", record.asked_ms)
                return

    async def _note_failure(self, key: tuple[str, str], why: str, asked_ms: int) -> None:
        """Take a failure that the job wrote down since it was asked for, or write one down in its place."""
        place = self._keys.measurement(*key)
        if int(await self._redis.hget(place, "measured_ms") or 0) < asked_ms:
            fields = {"state": "failed", "error": why, "measured_ms": wall_ms()}
            await self._redis.hset(place, mapping=cast("Mapping[Any, Any]", fields))
            await self._redis.hincrby(place, "failures", 1)
        await self._take(key)

    async def _wait_for_result(self, seconds: float) -> tuple[str, str] | None:
        try:
            async with asyncio.timeout(seconds):
                key = await self._results.get()
        except TimeoutError:
            return None
        await self._take(key)
        self._tell(RegistryChanged(self._book.specs()))
        await self._show(key)
        return key

    async def _show(self, key: tuple[str, str], measuring: str = "") -> None:
        """Write what people are shown of the models that a measurement is of."""
        for model in self._book.models_of(key):
            memory = self._book.show(model) | ({"measuring": measuring} if measuring else {})
            event = {"kind": "measuring" if measuring else "measured", "model": model}
            await self._store.put_model(model, {"memory": json.dumps(memory)}, event)

    async def _take(self, key: Key) -> None:
        """Copy what Redis keeps of a measurement into the book."""
        self._note(key, cast("dict[str, str]", await self._redis.hgetall(self._keys.measurement(*key))))

    def _note(self, key: Key, found: Mapping[str, str]) -> None:
        try:
            if found.get("effective"):
                took = from_json(json.loads(found["effective"]))
                context, at_ms = (int(found[name]) for name in ("effective_context", "effective_ms"))
                self._book.took(key, took, context, at_ms)
            if found.get("peak"):
                self._book.peaked(key, {name: int(size) for name, size in json.loads(found["peak"]).items()})
            if found.get("untold"):
                self._book.untold(key, {name: int(n) for name, n in json.loads(found["untold"]).items()})
            if found.get("state") == "measured":
                smallest, largest = (from_json(json.loads(found[name])) for name in ("min", "max"))
                self._book.measured(key, smallest, largest, int(found["measured_ms"]))
            elif found.get("state") == "failed":
                self._book.fail(key, found.get("error", ""), int(found.get("failures", 1)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("measurement can't be read: %r", error, extra={"key": ":".join(key)})

    async def count_workers(self) -> int:
        """Return how many workers of this host live, and note whether any does: transfers make way."""
        workers = await self._reads.read_workers()
        mine = [worker for worker in workers.values() if worker.get("host") == self._settings.host_id]
        if self._book.count_workers(len(mine)):
            self._tell(RegistryChanged(self._book.specs()))
        return len(mine)
