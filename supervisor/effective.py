"""What a model's engine is started with, word by word, and who said each: what `llamastead check` shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamastead.shared.addresses import UnixAddress
from llamastead.supervisor.engine import Engine
from llamastead.supervisor.launch import instance_environment, instance_options
from llamastead.supervisor.registry.keys import OWN_KEYS, ROUTER_KEYS
from llamastead.supervisor.registry.model import ModelEntry

OURS = "Llamastead"
ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Word:
    """One option with its value as words of a command line, or a key of ours, and where it comes from."""

    text: str
    origin: str


def effective_words(
    entry: ModelEntry,
    origins: Mapping[str, str],
    engine: Engine,
    environ: Mapping[str, str],
    cache_ram_mib: int,
) -> list[Word]:
    """Return the engine's command line in its order, then variables that set options, then preset keys.

    What memory decides at the start, the context for one, is not known here. Where an instance listens stands
    as `e.sock`.
    """
    table = engine.options
    said = entry.start_options
    options = instance_options(entry, table, UnixAddress("e.sock"), environ, cache_ram_mib)
    words = [
        Word(
            " ".join(option.render(value)),
            origins.get(option.canonical, OURS) if said.get(option.canonical) == value else OURS,
        )
        for option, value in table.ordered(options)
    ]
    for name, value in sorted(instance_environment(environ, table).items()):
        option = table.of_variable(name)
        if name.startswith("LLAMA_ARG_") and option is not None and option.canonical not in options:
            words.append(Word(f"{name}={value}", ENVIRONMENT))
    keys = [key for key in (*ROUTER_KEYS, *OWN_KEYS) if key in origins]
    return [word for word in words if word.text] + [
        Word(f"{key} = {_shown(entry, key)}", origins[key]) for key in sorted(keys)
    ]


def _shown(entry: ModelEntry, key: str) -> str:
    value = entry.router_keys.get(key, getattr(entry, key.replace("-", "_"), ""))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return " ".join(sorted(value))  # names of variables: their values may be secrets
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, (int, str, Path)) else ""
