"""Shows in Redis what the core knows and no script writes: why entries wait, how far loads have come."""

import json
from collections.abc import Mapping
from typing import Any

from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.words import InstanceState
from llamastead.supervisor.core.explain import explain
from llamastead.supervisor.core.state import State
from llamastead.supervisor.running import Running

# States that the engine's own lines bring about; all others are written by the script that decides them.
_TOLD_BY_ENGINE = frozenset({InstanceState.LOADING, InstanceState.WAKING, InstanceState.STOP_FAILED})


class Board:
    """Written by the driver after its steps, so that nothing here can overtake what a script decided."""

    def __init__(self, store: LeaderStore, running: Mapping[str, Running]) -> None:
        self._store = store
        self._running = running
        self._waits: dict[str, str] = {}
        self._states: dict[str, InstanceState] = {}
        self._progress: dict[str, dict[str, Any]] = {}

    async def show(self, state: State, now: float) -> None:
        """Bring Redis in line with the core's state; `now` is monotonic seconds."""
        await self._show_instances(state)
        await self._show_waits(state, now)

    async def _show_instances(self, state: State) -> None:
        for known in (self._states, self._progress):
            for gone in known.keys() - state.instances.keys():
                del known[gone]
        for instance in state.instances.values():
            running = self._running.get(instance.id)
            progress = running.progress if running else {}
            if instance.state in _TOLD_BY_ENGINE and self._states.get(instance.id) is not instance.state:
                fields: dict[str, str | int] = {"state": instance.state, "pid": running.pid if running else 0}
                await self._store.put_instance(
                    instance.id,
                    fields,
                    instance.model,
                    {"progress": json.dumps(progress) if progress else ""},
                )
            elif instance.state in _TOLD_BY_ENGINE and progress != self._progress.get(instance.id, {}):
                shown = {"progress": json.dumps(progress)}
                event = {"kind": "progress", "model": instance.model, "instance": instance.id, **shown}
                await self._store.put_model(instance.model, shown, event)
            self._states[instance.id] = instance.state
            self._progress[instance.id] = progress

    async def _show_waits(self, state: State, now: float) -> None:
        explained = {entry.model: entry for entry in explain(state, now) if entry.model in state.models}
        for model in self._waits.keys() - explained.keys():
            del self._waits[model]
            if model in state.models:
                await self._store.put_model(model, {"wait_reason": "", "wait": ""})
        for model, entry in explained.items():
            reason = entry.reason or "unexplained"
            if self._waits.get(model) != reason:
                self._waits[model] = reason
                await self._store.put_model(model, {"wait_reason": reason, "wait": entry.text})
