"""`llamastead check`: what the sources of models mean, as a dry run that needs nothing to run."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamastead.cli.engine_words import with_engine_words
from llamastead.cli.output import print_json, print_table
from llamastead.shared.addresses import UnixAddress
from llamastead.shared.gguf import GgufError, read_metadata
from llamastead.shared.settings import load_settings
from llamastead.supervisor.configuration import (
    NOT_TRIED,
    cache_ram_share_mib,
    check_variables,
    check_words,
    ignored_variables,
    sources_of,
    unread_config,
)
from llamastead.supervisor.effective import OURS, effective_words
from llamastead.supervisor.engine import Engine, EngineError, Objection, find_engine, objection
from llamastead.supervisor.launch import instance_environment, instance_options
from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import (
    ModelEntry,
    Problem,
    Registry,
    RegistryError,
    Severity,
    Sources,
)
from llamastead.supervisor.registry.render import command_words

# Only looked into when the model is loaded.
_UNREAD = frozenset(
    {"alias", "tags", "model", "mmproj", "model-draft", "hf-repo", "hf-file", "hf-repo-draft"}
)


def check(given: Mapping[str, Any], words: Sequence[str], parsed: argparse.Namespace) -> int:
    """Print the effective arguments of each model and where each comes from, then what is odd; with `--of`
    what concerns the models named there, alone or with others.

    `given` are the settings given as flags, `words` options of llama-server. Returns 1 when the sources can't
    be used, or a model of them that is shown can't be loaded.
    """
    settings = load_settings(given)
    engine = find_engine(settings.engine)
    settings = with_engine_words(given, words, engine)
    try:
        check_variables(os.environ, engine.options)
        sources = sources_of(settings, os.environ)
        registry = load_registry(sources, engine.options)
        check_words(settings.instance_args, os.environ, engine)
    except RegistryError as error:
        return _refused(str(error).splitlines(), parsed.json)
    models, faults = _models(registry, engine, parsed.of or ())
    names = {registry.aliases.get(name, name) for name in parsed.of or ()}
    concerns = [odd for odd in registry.problems if not names or not odd.model or odd.model in names]
    problems = [*concerns, *faults, *ignored_variables(os.environ, engine.options)]
    problems += unread_config(os.environ, engine.options)
    if not registry.entries:
        problems.append(Problem(Severity.NOTE, "models", none_found(sources)))
    if parsed.json:
        print_json({"models": models, "problems": [_shown(problem) for problem in problems]})
    else:
        _print(models, problems)
    return int(any(problem.severity is Severity.ERROR for problem in problems))


def _models(
    registry: Registry, engine: Engine, wanted: Sequence[str]
) -> tuple[list[dict[str, Any]], list[Problem]]:
    """Return what is shown of each model, of all if none are `wanted`, and what its own engine lacks."""
    models, faults = [], []
    tried = Trial()
    names = {registry.aliases.get(name, name) for name in wanted}
    if unknown := sorted(names - registry.entries.keys()):
        raise RegistryError(f"no model is called {', '.join(unknown)}: `check` without --of shows all")
    for name, entry in registry.entries.items():
        if names and name not in names:
            continue
        try:
            own = find_engine(entry.engine) if entry.engine else engine
        except EngineError as error:
            faults.append(Problem(Severity.ERROR, f"[{name}]", str(error)))
            continue
        foreign = [option for option in entry.options if option not in own.options]
        faults += [
            Problem(Severity.ERROR, f"[{name}]", f"{own.path} has no option --{option}") for option in foreign
        ]
        if foreign:
            continue
        faults += _unreadable(entry)
        faults += tried.refused(entry, own, registry)
        words = effective_words(entry, registry.origins[name], own, os.environ, cache_ram_share_mib())
        models.append(
            {
                "name": name,
                "source": str(entry.source),
                "aliases": list(entry.aliases),
                "hidden": entry.hidden,
                "engine": str(own.path),
                "arguments": [{"text": word.text, "origin": word.origin} for word in words],
            }
        )
    return models, faults


class Trial:
    """Has engines read the options of models, those of many alike models once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], Objection | None] = {}

    def refused(self, entry: ModelEntry, engine: Engine, registry: Registry) -> list[Problem]:
        """Return what the engine refuses of a model's options, unless that has been told of it already."""
        if any(odd.model == entry.name and odd.severity is Severity.ERROR for odd in registry.problems):
            return []
        options = instance_options(entry, engine.options, UnixAddress("e.sock"), os.environ)
        tried = {name: value for name, value in options.items() if name not in NOT_TRIED | _UNREAD}
        words = (str(engine.path), *command_words(tried, engine.options))
        if words not in self._found:
            environ = instance_environment(os.environ, engine.options)
            self._found[words] = objection(engine, words[1:], environ)
        found = self._found[words]
        option = engine.options.of_key(found.name.lstrip("-")) if found else None
        if found is None or option is None:
            return []
        where = registry.origins[entry.name].get(option.canonical, f"[{entry.name}]")
        what = f"{option.canonical} = {options.get(option.canonical, '')}"
        return [
            Problem(Severity.ERROR, where, f"{what}: {engine.path} refuses it: {found.reason}", entry.name)
        ]


def _unreadable(entry: ModelEntry) -> list[Problem]:
    """Say what is wrong with the header of a model's file; a newer engine may read it all the same."""
    path = Path(entry.options.get("model", ""))
    if not path.is_file():
        return []  # not downloaded yet, or said to be missing already
    try:
        read_metadata(path)
    except GgufError as error:
        return [Problem(Severity.WARNING, entry.name, str(error))]
    return []


def none_found(sources: Sources) -> str:
    """Say where no model was found and how to name another place: no running herd is asked for its own."""
    places = [str(p) for p in (sources.models_preset, sources.models_dir, sources.hub_cache) if p]
    return (
        f"none found in {' and '.join(places) or 'any place'}; "
        "give --models-dir or --models-preset as `llamastead up` has them; "
        "`llamastead ps` lists those of a running herd"
    )


def _print(models: list[dict[str, Any]], problems: list[Problem]) -> None:
    for model in models:
        more = [*model["aliases"], *(["hidden"] if model["hidden"] else [])]
        print(f"{model['name']}  ({', '.join([model['source'], *more])})")
        # What somebody wrote stands before what every model gets.
        arguments = sorted(model["arguments"], key=lambda argument: argument["origin"] == OURS)
        print_table(("argument", "from"), [(f"  {a['text']}", a["origin"]) for a in arguments])
        print()
    for problem in problems:
        print(f"{problem.severity:<8} {problem}")
    errors = sum(problem.severity is Severity.ERROR for problem in problems)
    counts = {"model": len(models), "error": errors, "remark": len(problems) - errors}
    print(", ".join(f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items()))


def _refused(lines: list[str], as_json: bool) -> int:
    if as_json:
        print_json({"models": [], "problems": [{"severity": "error", "message": line} for line in lines]})
    else:
        print("\n".join(f"{Severity.ERROR:<8} {line}" for line in lines))
    return 1


def _shown(problem: Problem) -> dict[str, str]:
    return {"severity": problem.severity, "where": problem.where, "message": problem.message}
