"""The registry's values: where models come from, what was found, and what was odd about it."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from llamastead.shared.words import Source

HUB_OPTIONS = frozenset({"hf-repo", "hf-file"})
"""Engine options that name the model of a hub repository."""


class RegistryError(Exception):
    """The sources as a whole can't be used; the message says where (`file:line`) and what to do."""


class Severity(StrEnum):
    """How much a problem matters: llama-server reads a `note` otherwise, a `warning` wants mending, and with
    an `error` a model can't be loaded.
    """

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Problem:
    """Something odd that stops nothing. `where` is `file:line`, a path, or an option; `model` the only one
    that it concerns, "" where it is not one's alone.
    """

    severity: Severity
    where: str
    message: str
    model: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class Sources:
    """What a registry is read from.

    `hub_cache` is the folder of the Hugging Face cache. `arguments` are llama-server options as typed on the
    command line, for all instances; they win over every other source.
    """

    models_dir: Path | None = None
    models_preset: Path | None = None
    arguments: tuple[str, ...] = ()
    hub_cache: Path | None = None


@dataclass(frozen=True)
class ModelEntry:
    """A model as configured. Times are seconds, sizes are MiB; None where nothing was said.

    `options` maps the last positive name of an engine option, without dashes (`ctx-size`), to its value as
    written; `held` are those that stand for its hub repository as far as the cache holds it. `files` are the
    files the instance will read, shards included; `revision` changes exactly when a started instance would
    come out differently. `unload_after` is 0 for never, a time-out 0 for none. `may_be_presets`: its
    repository stands on the command line, where presets that it holds go before a model.
    """

    name: str
    source: Source
    options: Mapping[str, str]
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    path: Path | None = None
    mmproj: Path | None = None
    files: tuple[Path, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    may_be_presets: bool = False
    revision: str = ""
    router_keys: Mapping[str, str] = field(default_factory=dict)
    load_on_startup: bool = False
    dedup_cache_models: bool = False
    stop_timeout: float | None = None
    hidden: bool = False
    pin: bool = False
    priority: int = 0
    unload_after: float | None = None
    max_wait: float | None = None
    first_byte_timeout: float | None = None
    idle_timeout: float | None = None
    total_timeout: float | None = None
    memory_max: int | None = None
    engine: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def start_options(self) -> Mapping[str, str]:
        """`options` as an instance gets them: with the paths of what is cached, so no network is asked."""
        if not self.held:
            return self.options
        return {
            **{name: value for name, value in self.options.items() if name not in HUB_OPTIONS},
            **self.held,
        }

    @property
    def sleeps(self) -> bool:
        """Whether the engine puts itself to sleep when idle (`sleep-idle-seconds`)."""
        value = self.options.get("sleep-idle-seconds", "-1").strip()
        return value.isdecimal() and int(value) > 0


@dataclass(frozen=True)
class Registry:
    """All models by canonical name, in order of name; `aliases` leads from each alias to its model's name.

    `origins` says of each model where each of its options and keys comes from.
    """

    entries: Mapping[str, ModelEntry]
    aliases: Mapping[str, str]
    problems: tuple[Problem, ...] = ()
    origins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @functools.cached_property
    def revision(self) -> str:
        """Return 12 hex digits that change when any entry does."""
        text = "\n".join(f"{entry!r}" for entry in self.entries.values())
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def resolve(self, name: str) -> ModelEntry | None:
        """Return the model of that name or alias."""
        return self.entries.get(self.aliases.get(name, name))
