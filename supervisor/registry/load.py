"""From the sources to the registry: which setting wins, and what identifies a started instance."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llamastead.shared.files import is_file
from llamastead.shared.gguf import shard_files
from llamastead.shared.hub_cache import REMOTE_PRESET, HubCache, split_name
from llamastead.shared.words import Source
from llamastead.supervisor.registry import keys
from llamastead.supervisor.registry.files import adapter_files
from llamastead.supervisor.registry.ini import GLOBAL_SECTION
from llamastead.supervisor.registry.layers import (
    COMMAND_LINE,
    HUB_CACHE,
    Layer,
    read_arguments,
    read_cache,
    read_folder,
    read_preset,
)
from llamastead.supervisor.registry.model import (
    ModelEntry,
    Problem,
    Registry,
    RegistryError,
    Severity,
    Sources,
)
from llamastead.supervisor.registry.options import FALSE, TRUE, OptionTable
from llamastead.supervisor.registry.reserved import selects_model

_NOTHING = Layer("")
# An instance comes out the same whatever these are.
_NOT_IN_REVISION = frozenset(
    {"tags", "log-colors", "log-file", "log-prefix", "log-timestamps", "log-verbosity"}
)


def load_registry(sources: Sources, table: OptionTable) -> Registry:
    """Read all sources afresh: `[*]` lowest, then hub cache or models folder, a section, the command line.

    Raises RegistryError, naming `file:line` or the argument, when a source can't be used: then nothing of
    them holds. What is merely odd stands in the registry's `problems`.
    """
    problems: list[Problem] = []
    over, named = read_arguments(sources.arguments, table, problems)
    cache = HubCache(sources.hub_cache) if sources.hub_cache else None
    cached = read_cache(cache, problems) if cache else {}
    found = cached | (read_folder(sources.models_dir, table, problems) if sources.models_dir else {})
    sections = read_preset(sources.models_preset, table, problems) if sources.models_preset else {}
    if remote := _preset_of(named, cache):
        sections = {**read_preset(remote, table, problems, remote=True), **sections}
        named = {}
    sections = {**sections, **{name: _laid(layer, sections.get(name)) for name, layer in named.items()}}
    shared = sections.pop(GLOBAL_SECTION, _NOTHING)
    plain = {layer.plain: layer for layer in cached.values() if layer.plain}
    entries: dict[str, ModelEntry] = {}
    origins: dict[str, dict[str, str]] = {}
    for name in sorted(found.keys() | sections.keys()):
        below = found.get(name) or plain.get(name, _NOTHING)
        layers = (shared, below, sections.get(name, _NOTHING))
        entries[name] = _merge(name, _source(name, sections, cached, found), layers, over, cache)
        where = (sections.get(name) or found[name]).where
        problems += [Problem(Severity.ERROR, where, fault, name) for fault in _faults(entries[name])]
        origins[name] = _origins(layers, over, entries[name])
    places = {name: layer.where for name, layer in (found | sections).items()}
    aliases = _collect_aliases(entries, places)
    for name, layer in cached.items():
        # A short name is only what nobody has given to another model.
        if layer.plain and layer.plain not in entries and aliases.setdefault(layer.plain, name) == name:
            entries[name] = replace(
                entries[name], aliases=tuple(sorted({*entries[name].aliases, layer.plain}))
            )
            note = f"{name}: llama-server calls it {layer.plain}; both names are taken"
            problems.append(Problem(Severity.NOTE, layer.where, note))
    return Registry(_without_doubles(entries), aliases, tuple(problems), origins)


def _preset_of(named: Mapping[str, Layer], cache: HubCache | None) -> Path | None:
    """Return the preset file of the repository that the command line names, if the cache has one."""
    for layer in named.values():
        name, _ = split_name(layer.options.get("hf-repo", ""))
        repository = cache.repositories.get(name) if cache else None
        if repository and layer.fields["may_be_presets"] and REMOTE_PRESET in repository.files:
            return repository.snapshot / REMOTE_PRESET
    return None


def _laid(over: Layer, under: Layer | None) -> Layer:
    """Return one model's word of the command line, laid over its section if it has one."""
    if under is None:
        return over
    return replace(
        under,
        options=under.options | over.options,
        router_keys=under.router_keys | over.router_keys,
        fields=under.fields | over.fields,
        origins=under.origins | over.origins,
    )


def _origins(layers: tuple[Layer, ...], over: Mapping[str, str], entry: ModelEntry) -> dict[str, str]:
    """Return for each key of an entry the place that won."""
    places = [*(layer.origins for layer in layers), dict.fromkeys(over, COMMAND_LINE)]
    won = {key: place for layer in places for key, place in layer.items()}
    return won | dict.fromkeys(entry.held, HUB_CACHE)


def _source(
    name: str, sections: Mapping[str, Layer], cached: Mapping[str, Layer], found: Mapping[str, Layer]
) -> Source:
    if name in sections:
        return Source.PRESET
    return Source.CACHE if found[name] is cached.get(name) else Source.MODELS_DIR


def _without_doubles(entries: Mapping[str, ModelEntry]) -> dict[str, ModelEntry]:
    """Hide the cache's own entries of files that a preset with `dedup-cache-models` serves."""
    served = {
        entry.path.resolve()
        for entry in entries.values()
        if entry.path and entry.dedup_cache_models and entry.source is Source.PRESET
    }
    if not served:
        return dict(entries)
    doubles = {
        name
        for name, entry in entries.items()
        if entry.path and entry.source is Source.CACHE and entry.path.resolve() in served
    }
    return {
        name: replace(entry, hidden=True) if name in doubles else entry for name, entry in entries.items()
    }


def _merge(
    name: str, source: Source, layers: tuple[Layer, ...], over: Mapping[str, str], cache: HubCache | None
) -> ModelEntry:
    options: dict[str, str] = {}
    router_keys: dict[str, str] = {}
    entry = ModelEntry(name, source, options, router_keys=router_keys)
    for layer in layers:
        options |= layer.options
        router_keys |= layer.router_keys
        entry = replace(entry, **layer.fields)
    options |= over
    if token := options.pop("hf-token", ""):
        # A secret: on the command line anybody on the machine could read it.
        entry = replace(entry, env={"HF_TOKEN": token, **entry.env})
    aliases = _split(options.pop("alias", ""))
    held = _held_by(cache, options) if cache and options.get("hf-repo") else {}
    entry = replace(entry, held=held)
    starts_with = entry.start_options
    entry = replace(
        entry,
        aliases=aliases,
        tags=_split(options.get("tags", "")),
        path=Path(starts_with["model"]).absolute() if starts_with.get("model") else None,
        mmproj=Path(starts_with["mmproj"]).absolute() if starts_with.get("mmproj") else None,
        files=_files(starts_with),
        load_on_startup=router_keys.get("load-on-startup") in TRUE,
        dedup_cache_models=router_keys.get("dedup-cache-models") in TRUE,
        stop_timeout=keys.stop_timeout(router_keys.get("stop-timeout")),
    )
    return replace(entry, revision=_revision(entry))


def _held_by(cache: HubCache, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that name by path what the hub repository of `options` means; empty if not cached.

    A draft model is only named where it is asked for by `spec-type`: the engine would load and drop it.
    """
    model = cache.find(options["hf-repo"], options.get("hf-file", ""))
    if model is None:
        return {}
    held = {"model": str(model.path)}
    if model.mmproj and "mmproj" not in options and options.get("mmproj-auto") not in FALSE:
        held["mmproj"] = str(model.mmproj)
    if model.draft and "model-draft" not in options and options.get("spec-type", "").startswith("draft-"):
        held["model-draft"] = str(model.draft)
    return held


def _split(names: str) -> tuple[str, ...]:
    """Split at commas, trim, sort, once each: as llama-server lists aliases and tags."""
    return tuple(sorted({name.strip() for name in names.split(",")} - {""}))


def _files(options: Mapping[str, str]) -> tuple[Path, ...]:
    """Return all files that options name for reading, the model's shards first."""
    model = [file for file in (options.get("model"), options.get("model-draft")) if file]
    files = [shard for file in model for shard in shard_files(Path(file).absolute())]
    single = [options.get("mmproj", ""), options.get("chat-template-file", "")]
    return (*files, *(Path(file).absolute() for file in single if file), *adapter_files(options))


def _faults(entry: ModelEntry) -> list[str]:
    """Say why a model won't load, as far as its files tell."""
    if not any(map(selects_model, entry.options)):
        return [f"[{entry.name}] names no model: add `model = PATH`"]
    return [f"{entry.name}: {file} doesn't exist" for file in entry.files if not is_file(file)]


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
