"""The registry's values: where models come from, what was found, and what was odd about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from llamastead.shared.words import Source


class RegistryError(Exception):
    """The sources as a whole can't be used; the message says where (`file:line`) and what to do."""


class Severity(StrEnum):
    """How much a problem matters: llama-server reads a `note` otherwise; a `warning` wants mending."""

    NOTE = "note"
    WARNING = "warning"


@dataclass(frozen=True)
class Problem:
    """Something odd that stops nothing. `where` is `file:line`, a path, or an option."""

    severity: Severity
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class Sources:
    """What a registry is read from.

    `arguments` are llama-server options as typed on the command line, for all instances; they win over every
    other source.
    """

    models_dir: Path | None = None
    models_preset: Path | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelEntry:
    """A model as configured. Times are seconds, sizes are MiB; None where nothing was said.

    `options` maps the last positive name of an engine option, without dashes (`ctx-size`), to its value as
    written. `files` are the files the instance will read, shards included; `revision` changes exactly when
    a started instance would come out differently. `unload_after` is 0 for never.
    """

    name: str
    source: Source
    options: Mapping[str, str]
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    path: Path | None = None
    mmproj: Path | None = None
    files: tuple[Path, ...] = ()
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
    memory_max: int | None = None
    engine: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def sleeps(self) -> bool:
        """Whether the engine puts itself to sleep when idle (`sleep-idle-seconds`)."""
        value = self.options.get("sleep-idle-seconds", "-1").strip()
        return value.isdecimal() and int(value) > 0


@dataclass(frozen=True)
class Registry:
    """All models by canonical name, in order of name; `aliases` leads from each alias to its model's name."""

    entries: Mapping[str, ModelEntry]
    aliases: Mapping[str, str]
    problems: tuple[Problem, ...] = ()

    def resolve(self, name: str) -> ModelEntry | None:
        """Return the model of that name or alias."""
        return self.entries.get(self.aliases.get(name, name))
