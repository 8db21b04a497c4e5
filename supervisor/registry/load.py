"""From the sources to the registry: which setting wins, and what identifies a started instance."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llamastead.shared.gguf import shard_files
from llamastead.shared.words import Source
from llamastead.supervisor.registry import keys
from llamastead.supervisor.registry.ini import GLOBAL_SECTION
from llamastead.supervisor.registry.layers import Layer, read_arguments, read_folder, read_preset
from llamastead.supervisor.registry.model import (
    ModelEntry,
    Problem,
    Registry,
    RegistryError,
    Severity,
    Sources,
)
from llamastead.supervisor.registry.options import TRUE, OptionTable
from llamastead.supervisor.registry.reserved import selects_model

_NOTHING = Layer("")
# An instance comes out the same whatever these are.
_NOT_IN_REVISION = frozenset(
    {"tags", "log-colors", "log-file", "log-prefix", "log-timestamps", "log-verbosity"}
)


def load_registry(sources: Sources, table: OptionTable) -> Registry:
    """Read all sources afresh: `[*]` lowest, then the models folder, a model's section, the command line.

    Raises RegistryError, naming `file:line` or the argument, when a source can't be used: then nothing of
    them holds. What is merely odd stands in the registry's `problems`.
    """
    problems: list[Problem] = []
    over = read_arguments(sources.arguments, table, problems)
    found = read_folder(sources.models_dir, table, problems) if sources.models_dir else {}
    sections = read_preset(sources.models_preset, table, problems) if sources.models_preset else {}
    shared = sections.pop(GLOBAL_SECTION, _NOTHING)
    entries: dict[str, ModelEntry] = {}
    for name in sorted(found.keys() | sections.keys()):
        source = Source.PRESET if name in sections else Source.MODELS_DIR
        layers = (shared, found.get(name, _NOTHING), sections.get(name, _NOTHING))
        entries[name] = _merge(name, source, layers, over)
        where = (sections.get(name) or found[name]).where
        problems += [Problem(Severity.WARNING, where, fault) for fault in _faults(entries[name])]
    places = {name: layer.where for name, layer in (found | sections).items()}
    return Registry(entries, _collect_aliases(entries, places), tuple(problems))


def _merge(name: str, source: Source, layers: tuple[Layer, ...], over: Mapping[str, str]) -> ModelEntry:
    options: dict[str, str] = {}
    router_keys: dict[str, str] = {}
    entry = ModelEntry(name, source, options, router_keys=router_keys)
    for layer in layers:
        options |= layer.options
        router_keys |= layer.router_keys
        entry = replace(entry, **layer.fields)
    options |= over
    aliases = _split(options.pop("alias", ""))
    path = Path(options["model"]).absolute() if options.get("model") else None
    mmproj = Path(options["mmproj"]).absolute() if options.get("mmproj") else None
    entry = replace(
        entry,
        aliases=aliases,
        tags=_split(options.get("tags", "")),
        path=path,
        mmproj=mmproj,
        files=_files(options),
        load_on_startup=router_keys.get("load-on-startup") in TRUE,
        dedup_cache_models=router_keys.get("dedup-cache-models") in TRUE,
        stop_timeout=keys.stop_timeout(router_keys.get("stop-timeout")),
    )
    return replace(entry, revision=_revision(entry))


def _split(names: str) -> tuple[str, ...]:
    """Split at commas, trim, sort, once each: as llama-server lists aliases and tags."""
    return tuple(sorted({name.strip() for name in names.split(",")} - {""}))


def _files(options: Mapping[str, str]) -> tuple[Path, ...]:
    """Return all files that options name for reading, the model's shards first."""
    model = [file for file in (options.get("model"), options.get("model-draft")) if file]
    files = [shard for file in model for shard in shard_files(Path(file).absolute())]
    single = [
        options.get("mmproj", ""),
        options.get("chat-template-file", ""),
        *options.get("lora", "").split(","),
    ]
    return tuple(files + [Path(file).absolute() for file in single if file])


def _faults(entry: ModelEntry) -> list[str]:
    """Say why a model won't load, as far as its files tell."""
    if not any(map(selects_model, entry.options)):
        return [f"[{entry.name}] names no model: add `model = PATH`"]
    return [f"{entry.name}: {file} doesn't exist" for file in entry.files if not file.is_file()]


def _collect_aliases(entries: Mapping[str, ModelEntry], places: Mapping[str, str]) -> dict[str, str]:
    """Return alias → name. Raises RegistryError with both places when two models claim a name."""
    aliases: dict[str, str] = {}
    errors = []
    for name, entry in entries.items():
        for alias in entry.aliases:
            owner = alias if alias in entries else aliases.setdefault(alias, name)
            if owner != name:
                claim = f"alias '{alias}' of [{name}] is a name of [{owner}] too ({places[owner]})"
                errors.append(f"{places[name]}: {claim}")
    if errors:
        raise RegistryError("\n".join(errors))
    return aliases


def _revision(entry: ModelEntry) -> str:
    """Hash what changes a started instance: options, environment, engine, and the files as they are now."""
    options = {name: value for name, value in entry.options.items() if name not in _NOT_IN_REVISION}
    files = [(str(file), *_identity(file)) for file in entry.files]
    facts = [sorted(options.items()), sorted(entry.env.items()), str(entry.engine), files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _identity(file: Path) -> tuple[int, int]:
    """Return size and time of change (ns), zeros for a file that isn't there."""
    try:
        facts = file.stat()
    except OSError:
        return 0, 0
    return facts.st_size, facts.st_mtime_ns
