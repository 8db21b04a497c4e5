"""What words of llama-server's command line mean here: our settings, options for instances, or an answer."""

import difflib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamastead.cli.flags import NEAR, setting_flags
from llamastead.shared.hub_cache import HubCache, hub_cache_folder
from llamastead.shared.settings import Settings, SettingsError, load_settings
from llamastead.shared.settings_fields import field_extra
from llamastead.supervisor.engine import Engine
from llamastead.supervisor.registry.options import OptionError, OptionTable
from llamastead.supervisor.registry.reserved import ACTIONS


def ended_by(words: Sequence[str], engine: Engine) -> int | None:
    """Answer a word that only prints something, such as --list-devices; the exit code, or None without one.

    Raises SettingsError for a word that is no option.
    """
    asked = [name for name in _parsed(words, engine.options) if name in ACTIONS]
    if not asked:
        return None
    if "cache-list" in asked:
        print(_cache_list())
        return 0
    if "usage" in asked:
        raise SettingsError(
            "--usage: see `llamastead up --help`, and `llama-server --help` for its own options"
        )
    return subprocess.run([engine.path, f"--{asked[0]}"], check=False).returncode


def with_engine_words(given: Mapping[str, Any], words: Sequence[str], engine: Engine) -> Settings:
    """Return the settings with what the words set of them (`-to 5`, `--no-webui`); the rest is for instances.

    `given` are the settings by their own flags, which win. Raises SettingsError.
    """
    _parsed(words, engine.options)
    meant, rest = take_settings(words, engine.options)
    return load_settings({**meant, **given, "instance_args": tuple(rest)})


def take_settings(words: Sequence[str], table: OptionTable) -> tuple[dict[str, str], list[str]]:
    """Part off what sets one of our settings by another of llama-server's names for it.

    Returns field → text, and the words that remain. Raises OptionError naming a word that is no option.
    """
    fields = {field_extra(info)["env"]: name for name, info in Settings.model_fields.items()}
    meant: dict[str, str] = {}
    rest: list[str] = []
    for option, value, own_words in table.items(words):
        if option.env and option.env in fields:
            meant[fields[option.env]] = value
        else:
            rest += own_words
    return meant, rest


def _parsed(words: Sequence[str], table: OptionTable) -> Mapping[str, str]:
    try:
        return table.parse(words)
    except OptionError as error:
        for word in words:
            close = difflib.get_close_matches(word, setting_flags(), n=1, cutoff=NEAR)
            if word.startswith("--") and close and word in str(error):
                raise SettingsError(f"argument {word} not recognized; did you mean '{close[0]}'?") from None
        raise SettingsError(f"{error}{_place_hint(words, str(error))}") from None


def _place_hint(words: Sequence[str], complaint: str) -> str:
    """Return the flag that a bare path lacks, empty when the complaint is about something else."""
    for word in words:
        path = Path(word).expanduser()
        if f"argument {word} " not in complaint or not path.exists():
            continue
        flag = {".ini": "--models-preset", ".gguf": "-m"}.get(path.suffix, "")
        if flag := "--models-dir" if path.is_dir() else flag:
            return f"; did you mean `{flag} {word}`?"
    return ""


def _cache_list() -> str:
    folder = hub_cache_folder(os.environ)
    repositories = HubCache(folder).repositories.values() if folder else ()
    names = [model.name for repository in repositories for model in repository.models()]
    lines = [f"{number:4}. {name}" for number, name in enumerate(names, 1)]
    return "\n".join([f"number of models in cache: {len(names)}", *lines])
