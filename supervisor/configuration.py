"""Engine and registry as this supervisor read them last."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from llamastead.shared.devices.host import read_host
from llamastead.shared.disk import unusable
from llamastead.shared.files import is_file
from llamastead.shared.hub_cache import hub_cache_folder
from llamastead.shared.settings import Settings, SettingsError
from llamastead.shared.settings_fields import field_extra
from llamastead.supervisor.core.orders import preload_problem
from llamastead.supervisor.core.state import ModelSpec
from llamastead.supervisor.engine import Engine, EngineError, SilentEngineError, find_engine, objection
from llamastead.supervisor.launch import CACHE_RAM_MIB, instance_environment
from llamastead.supervisor.publish import model_spec
from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import (
    ModelEntry,
    Problem,
    Registry,
    RegistryError,
    Severity,
    Sources,
)
from llamastead.supervisor.registry.options import OptionTable
from llamastead.supervisor.registry.reserved import RESERVED, SILENCING, why_not_for_all
from llamastead.supervisor.registry.watch import Marks, has_vanished, look
from llamastead.supervisor.web_ui import ui_identity

log = logging.getLogger(__name__)

CACHE_RAM_SHARE = 32  # of the host's memory for one model's prompt cache, within the bounds
CACHE_RAM_LEAST_MIB = 128
NOT_TRIED = frozenset({*RESERVED, *SILENCING, "log-file", "rpc"})
"""Options that do not reach instances, and those that an engine acts on while it reads them."""
ENGINE_CACHE_RAM_MIB = 8192  # what an unlimited cache is reckoned with: the engine's own default


def sources_of(settings: Settings, environ: Mapping[str, str]) -> Sources:
    """Return where these settings have models come from."""
    return Sources(
        settings.models_dir, settings.models_preset, settings.instance_args, hub_cache_folder(environ)
    )


def check_variables(environ: Mapping[str, str], table: OptionTable) -> None:
    """Raise RegistryError for a variable of all instances with a value that their engine refuses."""
    for name, value in instance_environment(environ, table).items():
        option = table.of_variable(name)
        if option is not None and name == option.env and (expected := option.doubt(value)):
            raise RegistryError(f"environment: {name}={value}: {expected}")


def check_words(words: Sequence[str], environ: Mapping[str, str], engine: Engine) -> None:
    """Raise RegistryError for an option for all instances that the engine refuses: each load would fail."""
    given = engine.options.items(words)
    read = [word for option, _, own in given if option.canonical not in NOT_TRIED for word in own]
    variables = instance_environment(environ, engine.options)
    if not read and not any(name.startswith("LLAMA_ARG_") for name in variables):
        return
    if found := objection(engine, read, variables):
        where = "command line" if found.name in read else "environment"
        raise RegistryError(f"{where}: llama-server refuses {found.name}: {found.reason}")


def ignored_variables(environ: Mapping[str, str], table: OptionTable) -> list[Problem]:
    """Return a warning for each variable of an option that is neither a setting nor for all models."""
    settings = {field_extra(info)["env"] for info in Settings.model_fields.values()}
    passed = instance_environment(environ, table)
    found = ((name, table.of_variable(name)) for name in sorted(environ.keys() - passed.keys() - settings))
    return [
        Problem(Severity.WARNING, "environment", f"{name} is ignored: {why_not_for_all(option.canonical)}")
        for name, option in found
        if option is not None and option.env not in settings
    ]


def unread_config(environ: Mapping[str, str], table: OptionTable) -> list[Problem]:
    """Return a warning for the user's own file of options, where the engine is one that has such a file.

    Instances are kept from it: what it says of addresses and keys would not be ours.
    """
    folder = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else "")
    file = Path(folder) / "llama.cpp" / "config.ini"
    if not folder or "log-jsonl" not in table or not is_file(file):
        return []
    text = "not read: put its options into [*] of a preset file, or on the command line"
    return [Problem(Severity.WARNING, str(file), text)]


def cache_ram_share_mib() -> int:
    """Return the MiB of a prompt cache where nobody said: a share of the host, so that several have room."""
    host_mib = read_host().total >> 20
    return min(CACHE_RAM_MIB, max(CACHE_RAM_LEAST_MIB, host_mib // CACHE_RAM_SHARE))


class Configuration:
    """What can be served and with which engine. `registry` is replaced whole by `reload`, or stays whole.

    `error` is why it was not read again last time, "" when it was.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        """Find the engine and read the registry.

        Raises EngineError, RegistryError or OptionError, and SettingsError when more is to be loaded at start
        than may be.
        """
        self.environ = environ
        self._settings = settings
        self.engine = find_engine(settings.engine, environ)
        self.web_ui = ui_identity(self.engine) if settings.ui else ""
        self._engines: dict[str, Engine] = {}
        self._silent: dict[str, SilentEngineError] = {}
        self._variables: dict[Path, dict[str, str]] = {}
        self._sources = sources_of(settings, environ)
        self._marks: Marks = {}
        # Models that are being removed: as if their files were gone already.
        self.withheld: set[str] = set()
        self.error = ""
        self.registry = Registry({}, {})
        self.registry = self.read_again()
        check_words(settings.instance_args, environ, self.engine)
        table = self.engine.options
        for odd in (*ignored_variables(environ, table), *unread_config(environ, table)):
            log.warning("%s", odd)
        self.cache_ram_mib = cache_ram_share_mib()

        if problem := preload_problem(settings.models_max, self.specs()):
            raise SettingsError(problem)

    def options_in_force(self, entry: ModelEntry) -> dict[str, str]:
        """Return an entry's engine options, those that variables set for all instances below them."""
        engine = self.engine_of(entry)
        if engine.path not in self._variables:  # the same for all its models, of which there may be thousands
            table = engine.options
            variables = instance_environment(self.environ, table)
            found = ((table.of_variable(name), value) for name, value in variables.items())
            self._variables[engine.path] = {
                option.canonical: value for option, value in found if option is not None
            }
        return self._variables[engine.path] | dict(entry.start_options)

    def cache_ram(self, entry: ModelEntry) -> int:
        """Return the MiB that a model's prompt cache may take."""
        try:
            asked = int(self.options_in_force(entry).get("cache-ram", self.cache_ram_mib))
        except (ValueError, EngineError):
            return self.cache_ram_mib
        return asked if asked >= 0 else ENGINE_CACHE_RAM_MIB

    def read_again(self) -> Registry:
        """Return the registry as its sources are now; new problems are logged. Changes nothing but the marks.

        Raises RegistryError when it is broken, or more is to be loaded at start than may be.
        """
        earlier = self._marks
        try:
            # Marked before it is read: what is written meanwhile shows as a change at the next look.
            before = self._marks = self.look()
            check_variables(self.environ, self.engine.options)
            registry = self._without_withheld(load_registry(self._sources, self.engine.options))
            after = look(self._sources, registry)
        except OSError as error:
            self._marks = earlier  # nothing was learned: a change is still to be read
            raise RegistryError(unusable(error.filename or "the registry", error)) from error
        self._marks = {path: before.get(path, mark) for path, mark in after.items()}
        if problem := preload_problem(self._settings.models_max, self._specs(registry)):
            raise RegistryError(problem)
        log.debug("registry read", extra={"revision": registry.revision})
        for odd in registry.problems:
            if odd not in self.registry.problems:
                log.warning("registry: %s", odd)
        return registry

    def _without_withheld(self, registry: Registry) -> Registry:
        entries = {name: entry for name, entry in registry.entries.items() if name not in self.withheld}
        aliases = {alias: name for alias, name in registry.aliases.items() if name not in self.withheld}
        return replace(registry, entries=entries, aliases=aliases)

    def catch_up(self) -> None:
        """Read the registry again; a broken one is logged and the old one stays."""
        try:
            self.registry = self.read_again()
            self.error = ""
        except RegistryError as error:
            log.error("registry not reloaded, the old one stays: %s", error)
            self.error = str(error)

    def look(self) -> Marks:
        """Return the marks of all files and folders that the registry depends on."""
        return look(self._sources, self.registry)

    def sources_changed(self) -> bool:
        """Whether a source is another than when it was read last; one that is gone for now is not."""
        now = self.look()
        return now != self._marks and not has_vanished(self._sources, self._marks, now)

    def engine_of(self, entry: ModelEntry) -> Engine:
        """Return the engine an entry names, else the herd's. Raises EngineError.

        One that did not answer is not asked again before `ask_silent_engines`: callers can't wait each time.
        """
        if entry.engine is None:
            return self.engine
        path = str(entry.engine)
        if path in self._silent:
            raise self._silent[path]
        if path not in self._engines:
            try:
                self._engines[path] = find_engine(entry.engine, self.environ)
            except SilentEngineError as error:
                self._silent[path] = error
                raise
        return self._engines[path]

    def ask_silent_engines(self) -> None:
        """Ask those that did not answer again; each that still does not takes its time."""
        for path in list(self._silent):
            try:
                self._engines[path] = find_engine(Path(path), self.environ)
            except SilentEngineError:
                continue
            except EngineError:
                pass
            del self._silent[path]

    def spec(self, entry: ModelEntry) -> ModelSpec:
        """Return what the scheduler needs of a model, but its memory."""
        return model_spec(entry, self._settings.unload_after)

    def specs(self) -> dict[str, ModelSpec]:
        """Return what the scheduler needs of every model, but its memory."""
        return self._specs(self.registry)

    def _specs(self, registry: Registry) -> dict[str, ModelSpec]:
        return {name: self.spec(entry) for name, entry in registry.entries.items()}

    def herd_fields(self) -> dict[str, str | int]:
        """Return the herd's limits and versions, as /props shows them and `acquire` obeys them."""
        settings = self._settings
        return {
            "version": version("llamastead"),
            "host": settings.host_id,
            "models_max": settings.models_max,
            "autoload": int(settings.models_autoload),
            "max_wait": str(settings.max_wait),
            "min_residence": str(settings.min_residence),
            "queue_limit": settings.queue_limit,
            "queue_limit_total": settings.queue_limit_total,
            "queue_timeout": str(settings.queue_timeout),
            "stop_timeout": str(settings.stop_timeout),
            "engine": str(self.engine.path),
            "engine_version": self.engine.version,
            "web_ui": self.web_ui,
            "registry_revision": self.registry.revision,
            "registry_error": self.error,
        }
