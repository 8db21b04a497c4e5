"""The registry as the rest of the herd sees it: model hashes in Redis, specs for the scheduler."""

import asyncio
import json
from collections.abc import Collection, Mapping

from llamastead.shared.files import is_file
from llamastead.shared.store.leader import Fields, LeaderStore
from llamastead.supervisor.core.state import ModelSpec
from llamastead.supervisor.engine import Engine
from llamastead.supervisor.registry.changes import Changes
from llamastead.supervisor.registry.model import ModelEntry, Registry
from llamastead.supervisor.registry.render import preset_text, wire_args


def model_spec(entry: ModelEntry, unload_after: float | None) -> ModelSpec:
    """Return what the scheduler needs of an entry; `unload_after` is for entries that say nothing."""
    own = unload_after if entry.unload_after is None else entry.unload_after
    return ModelSpec(
        name=entry.name,
        revision=entry.revision,
        pinned=entry.pin,
        load_on_startup=entry.load_on_startup,
        unload_after=own if own and own > 0 else None,
        priority=entry.priority,
        max_wait=entry.max_wait,
        absent=is_absent(entry),
    )


def is_absent(entry: ModelEntry) -> bool:
    """Whether a model's files have yet to come from the hub."""
    if not entry.options.get("hf-repo") or entry.options.get("model"):
        return False
    return not entry.held or not all(map(is_file, entry.files))


def model_fields(entry: ModelEntry, engine: Engine) -> Fields:
    """Return the fields of `model:<name>` that come from the configuration."""
    return {
        "name": entry.name,
        "source": entry.source,
        "hidden": int(entry.hidden),
        "pinned": int(entry.pin),
        "priority": entry.priority,
        "tags": json.dumps(entry.tags),
        "aliases": json.dumps(entry.aliases),
        "args": json.dumps(wire_args(entry, engine.options, str(engine.path))),
        "preset": preset_text(entry, engine.options),
        "path": str(entry.path or ""),
        "mmproj": str(entry.mmproj or ""),
        "timeouts": json.dumps(_timeouts(entry)),
        "revision": entry.revision,
    }


def _timeouts(entry: ModelEntry) -> Mapping[str, float]:
    """Return the entry's own time-outs by the name of the setting, in seconds, 0 for none."""
    own = {
        "first-byte-timeout": entry.first_byte_timeout,
        "idle-timeout": entry.idle_timeout,
        "total-timeout": entry.total_timeout,
    }
    return {name: seconds for name, seconds in own.items() if seconds is not None}


async def publish(
    store: LeaderStore,
    registry: Registry,
    engine: Engine,
    memory: Mapping[str, str],
    written: Collection[str],
    changes: Changes | None = None,
) -> None:
    """Make this registry the herd's, in one change; `memory` is what is known of models', as JSON.

    Only the models that are to be `written` are: of all others Redis has the fields already. `changes` are
    told in the event.
    """
    # In a thread: of thousands it takes a while, in which the lead must be renewed.
    models = await asyncio.to_thread(
        lambda: {
            name: model_fields(entry, engine) if name in written else None
            for name, entry in registry.entries.items()
        }
    )
    for name, text in memory.items():
        if fields := models.get(name):
            models[name] = {**fields, "memory": text}
    await store.publish(registry.revision, models, registry.aliases, changes.shown() if changes else None)
