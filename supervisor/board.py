"""Shows in Redis what the core knows and no script writes: why entries wait, how far loads have come, who
may go.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamastead.shared.store.leader import Fields, LeaderStore
from llamastead.shared.words import InstanceState
from llamastead.supervisor.clock import RedisClock
from llamastead.supervisor.core.explain import Explanation, explain, spared
from llamastead.supervisor.core.state import State
from llamastead.supervisor.running import Running

log = logging.getLogger(__name__)

# States that the engine's own lines bring about; all others are written by the script that decides them.
_TOLD_BY_ENGINE = frozenset({InstanceState.LOADING, InstanceState.WAKING, InstanceState.STOP_FAILED})
# A sentence with a countdown in it is not written more often than this, however often facts are read.
_SENTENCE_LASTS_S = 1.0
_STANDING = ("pid", "evictable", "spared", "changed")
_NO_WAIT: Fields = dict.fromkeys(
    ("wait_reason", "wait", "wait_for", "wait_until_ms", "wait_since_ms", "wait_rank_ms", "wait_ordered"), ""
)


@dataclass
class _Told:
    """What was last written of an entry that waits."""

    facts: tuple[object, ...] = ()
    text: str = ""
    at: float = 0.0


@dataclass
class Board:
    """Written by the driver after its steps, so that nothing here can overtake what a script decided."""

    store: LeaderStore
    running: Mapping[str, Running]
    clock: RedisClock
    _waits: dict[str, _Told] = field(default_factory=dict)
    _states: dict[str, InstanceState] = field(default_factory=dict)
    _progress: dict[str, dict[str, Any]] = field(default_factory=dict)
    _standing: dict[str, dict[str, str | int]] = field(default_factory=dict)

    def inherit(self, waiting: Iterable[str]) -> None:
        """Note the models of which an earlier leader wrote that they are waited for."""
        self._waits.update({model: _Told() for model in waiting})

    async def show(self, state: State, now: float) -> None:
        """Bring Redis in line with the core's state; `now` is monotonic seconds."""
        await self._show_instances(state)
        await self._show_standing(state, now)
        await self._show_waits(state, now)

    async def _show_instances(self, state: State) -> None:
        for known in (self._states, self._progress):
            for gone in known.keys() - state.instances.keys():
                del known[gone]
        for instance in state.instances.values():
            running = self.running.get(instance.id)
            progress = running.progress if running else {}
            if instance.state in _TOLD_BY_ENGINE and self._states.get(instance.id) is not instance.state:
                fields: dict[str, str | int] = {"state": instance.state, "pid": running.pid if running else 0}
                await self.store.put_instance(
                    instance.id,
                    fields,
                    instance.model,
                    {"progress": json.dumps(progress) if progress else ""},
                )
            elif instance.state in _TOLD_BY_ENGINE and progress != self._progress.get(instance.id, {}):
                shown = {"progress": json.dumps(progress)}
                event = {"kind": "progress", "model": instance.model, "instance": instance.id, **shown}
                await self.store.put_model(instance.model, shown, event)
            self._states[instance.id] = instance.state
            self._progress[instance.id] = progress

    async def _show_standing(self, state: State, now: float) -> None:
        """Write of each model with an instance its pid, what keeps it from being sent away, and whether its
        preset has changed since it started.
        """
        verdicts = spared(state, now)
        standing: dict[str, dict[str, str | int]] = {}
        for instance in state.instances.values():
            running = self.running.get(instance.id)
            verdict = verdicts[instance.id]
            fields = {
                "pid": running.pid if running else 0,
                "evictable": int(verdict is None),
                "spared": verdict or "",
            }
            if instance.model in state.models:
                fields["changed"] = int(instance.revision != state.models[instance.model].revision)
                standing[instance.model] = fields
        for model, fields in standing.items():
            if self._standing.get(model) != fields:
                await self.store.put_model(model, fields)
        for model in self._standing.keys() - standing.keys():
            if model in state.models:
                await self.store.put_model(model, dict.fromkeys(_STANDING, ""))
        self._standing = standing

    async def _show_waits(self, state: State, now: float) -> None:
        explained = {entry.model: entry for entry in explain(state, now) if entry.model in state.models}
        for model in self._waits.keys() - explained.keys():
            del self._waits[model]
            if model in state.models:
                await self.store.put_model(model, _NO_WAIT)
        for entry in explained.values():
            await self._show_wait(entry, now)

    async def _show_wait(self, entry: Explanation, now: float) -> None:
        told = self._waits.setdefault(entry.model, _Told())
        facts = (entry.reason, entry.blockers, entry.until, entry.first, entry.rank, entry.ordered)
        stale = entry.text != told.text and now - told.at >= _SENTENCE_LASTS_S
        if facts == told.facts and not stale:
            return
        reason = entry.reason or "unexplained"
        event: Fields | None = None
        if not told.facts or told.facts[0] != entry.reason:
            requests = json.dumps(entry.requests)
            event = {"kind": "wait", "model": entry.model, "reason": reason, "wait": entry.text}
            event = {**event, "request_ids": requests}
            log.info("waits", extra={"model": entry.model, "reason": reason, "why": entry.text})
        self._waits[entry.model] = _Told(facts, entry.text, now)
        fields: Fields = {
            "wait_reason": reason,
            "wait": entry.text,
            "wait_for": json.dumps(dict(zip(entry.blockers, entry.blocking, strict=True))),
            "wait_until_ms": "" if entry.until is None else self.clock.redis_ms(entry.until),
            "wait_since_ms": self.clock.redis_ms(entry.first),
            "wait_rank_ms": self.clock.redis_ms(entry.rank),
            "wait_ordered": int(entry.ordered),
        }
        await self.store.put_model(entry.model, fields, event)
