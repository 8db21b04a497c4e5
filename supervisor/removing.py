"""Removing a model of the hub cache: refused while it is in use, stopped first when it is not."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from llamastead.shared.errors import ApiError
from llamastead.shared.hub_cache import split_name
from llamastead.shared.hub_plan import job_id
from llamastead.shared.jobs import REMOVE_MODEL, Jobs
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.words import JobState, Source
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.core.lifecycle import LOADS
from llamastead.supervisor.core.state import State
from llamastead.supervisor.registry.model import ModelEntry

log = logging.getLogger(__name__)

IDLE_WITHIN_S = 1.0  # a lease lingers a moment after its last request
DONE_WITHIN_S = 50.0  # the stop, its memory, and the files: the gateway waits longer
LOOK_S = 0.05


class Removing:
    """Carries one order out at a time. `read` has the registry read again, `answer` answers a command,
    `unload` has a model stopped once it is idle.
    """

    def __init__(
        self,
        jobs: Jobs,
        store: LeaderStore,
        configuration: Configuration,
        state: Callable[[], State],
        read: Callable[[], Awaitable[None]],
        answer: Callable[[str, Mapping[str, Any]], Awaitable[None]],
        unload: Callable[[str], None],
    ) -> None:
        self._jobs = jobs
        self._store = store
        self._configuration = configuration
        self._state = state
        self._read = read
        self._answer = answer
        self._unload = unload
        self._orders: asyncio.Queue[tuple[str, str, bool]] = asyncio.Queue()

    def order(self, command: str, model: str, *, again: bool) -> None:
        """Have a model removed; `again`: an earlier leader may have done it."""
        self._orders.put_nowait((command, model, again))

    async def run(self) -> None:
        """Take orders until cancelled."""
        while True:
            command, model, again = await self._orders.get()
            try:
                await self._remove(model, again)
            except ApiError as error:
                await self._answer(command, {"error": asdict(error)})
            else:
                await self._answer(command, {"success": True})

    async def _remove(self, model: str, again: bool) -> None:
        entry = self._configuration.registry.entries.get(model)
        if entry is None:
            if again:
                return
            raise ApiError(404, f"model '{model}' not found", {"param": "model"})
        if entry.source is not Source.CACHE:
            text = f"model '{model}' comes from {entry.source}: only models of the hub cache can be removed"
            raise ApiError(400, text, {"param": "model"})
        others = await asyncio.to_thread(self._on_the_same_files, entry)
        await self._require_idle(model, {model, *others})
        # Out of the registry it gets nobody new, and its instance goes, as for any model that is no more.
        self._configuration.withheld.add(model)
        try:
            await self._read()
            ends = time.monotonic() + DONE_WITHIN_S
            for other in others:
                if self._state().instance_of(other) is not None:
                    self._unload(other)
            for user in (model, *others):
                await self._await_gone(user, ends)
            await self._remove_files(model, ends)
        finally:
            self._configuration.withheld.discard(model)
            await self._read()
        log.info("model removed", extra={"model": model})
        await self._store.emit("removed", {"model": model})

    def _on_the_same_files(self, entry: ModelEntry) -> list[str]:
        """Return the models besides this one that are served from its file, by whatever link."""
        assert entry.path is not None, "a model of the cache has a path"
        file = entry.path.resolve()
        others = [other for other in self._configuration.registry.entries.values() if other is not entry]
        return [other.name for other in others if other.path and other.path.resolve() == file]

    async def _require_idle(self, model: str, users: set[str]) -> None:
        """Raise ApiError 409 when one of `users`, the model or others on the same files, loads or serves."""
        ends = time.monotonic() + IDLE_WITHIN_S
        while busy := await self._busy(users):
            if time.monotonic() < ends:
                await asyncio.sleep(LOOK_S)
                continue
            text = f"model '{model}' is in use ({busy}): try again when it is idle, or unload it first"
            raise ApiError(409, text, {"reason": "busy", "param": "model"})

    async def _busy(self, users: set[str]) -> str:
        facts = await self._store.observe()
        for model in sorted(users):
            if model in facts.queue:
                return f"requests wait for {model}"
            own = self._state().instance_of(model)
            if own is None:
                continue
            if own.state in LOADS:
                return f"{model} loads"
            claims = facts.claims.get(own.id)
            if claims and claims.leases:
                return f"{model} answers requests"
        return ""

    async def _await_gone(self, model: str, ends: float) -> None:
        """Wait until its process is gone and its memory shows as free, and until what is withheld is no model
        any more. Raises ApiError 503 if that lasts.
        """
        while time.monotonic() < ends:
            state = self._state()
            holds = any(ended.model == model for ended in state.releasing.values())
            listed = model in state.models and model in self._configuration.withheld
            if state.instance_of(model) is None and not holds and not listed:
                return
            await asyncio.sleep(LOOK_S)
        raise ApiError(503, f"model '{model}' did not stop in time; nothing was removed", retry_after=10)

    async def _remove_files(self, model: str, ends: float) -> None:
        repo, quant = split_name(model)
        job = job_id("remove", model)
        await self._jobs.ask(job, REMOVE_MODEL, model, {"repo": repo, "quant": quant})
        while time.monotonic() < ends:
            record = await self._jobs.record(job)
            if record is not None and record.state is JobState.DONE:
                return
            if record is not None and record.state is JobState.FAILED:
                try:
                    raise ApiError.from_json(record.error)
                except ValueError:
                    raise ApiError(500, f"model '{model}' was not removed: {record.error}") from None
            await asyncio.sleep(LOOK_S)
        await self._jobs.cancel(job)
        raise ApiError(503, f"no worker removed the files of '{model}' in time", retry_after=10)
