"""The registry as the rest of the herd sees it: model hashes in Redis, specs for the scheduler."""

import hashlib
import json
from collections.abc import Mapping

from llamastead.shared.store.leader import Fields, LeaderStore
from llamastead.supervisor.core.state import ModelSpec
from llamastead.supervisor.engine import Engine
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
    )


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
        "revision": entry.revision,
    }


def registry_revision(entries: Mapping[str, ModelEntry]) -> str:
    """Return 12 hex digits that change when any entry does."""
    text = "\n".join(f"{entry!r}" for entry in entries.values())
    return hashlib.sha256(text.encode()).hexdigest()[:12]


async def publish(store: LeaderStore, registry: Registry, engine: Engine, memory: Mapping[str, str]) -> None:
    """Make this registry the herd's, in one change; `memory` is what is known of each model's, as JSON."""
    models = {
        name: {**model_fields(entry, engine), "memory": memory.get(name, "")}
        for name, entry in registry.entries.items()
    }
    await store.publish(registry_revision(registry.entries), models, registry.aliases)
