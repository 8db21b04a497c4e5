"""Engine and registry as this supervisor read them last."""

import logging
import os
from collections.abc import Mapping
from importlib.metadata import version

from llamastead.shared.devices.host import read_host
from llamastead.shared.settings import Settings, SettingsError
from llamastead.supervisor.core.orders import preload_problem
from llamastead.supervisor.core.state import ModelSpec
from llamastead.supervisor.engine import Engine, EngineError, find_engine
from llamastead.supervisor.launch import CACHE_RAM_MIB, instance_environment
from llamastead.supervisor.publish import model_spec, registry_revision
from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import ModelEntry, Registry, RegistryError, Sources

log = logging.getLogger(__name__)

CACHE_RAM_SHARE = 32  # of the host's memory for one model's prompt cache, within the bounds
CACHE_RAM_LEAST_MIB = 128
ENGINE_CACHE_RAM_MIB = 8192  # what an unlimited cache is reckoned with: the engine's own default


class Configuration:
    """What can be served and with which engine. `registry` is replaced whole by `reload`, or stays whole."""

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        """Find the engine and read the registry.

        Raises EngineError, RegistryError or OptionError, and SettingsError when more is to be loaded at start
        than may be.
        """
        self.environ = environ
        self._settings = settings
        self.engine = find_engine(settings.engine, environ)
        self._engines: dict[str, Engine] = {}
        self.registry = self._read()
        # A prompt cache grows up to its limit: a share of what the host has, so that several have room.
        host_mib = read_host().total >> 20
        self.cache_ram_mib = min(CACHE_RAM_MIB, max(CACHE_RAM_LEAST_MIB, host_mib // CACHE_RAM_SHARE))

        if problem := preload_problem(settings.models_max, self.specs()):
            raise SettingsError(problem)

    def options_in_force(self, entry: ModelEntry) -> dict[str, str]:
        """Return an entry's engine options, those that variables set for all instances below them."""
        table = self.engine_of(entry).options
        variables = instance_environment(self.environ, table)
        found = ((table.of_variable(name), value) for name, value in variables.items())
        return {option.canonical: value for option, value in found if option is not None} | dict(
            entry.options
        )

    def cache_ram(self, entry: ModelEntry) -> int:
        """Return the MiB that a model's prompt cache may take."""
        try:
            asked = int(self.options_in_force(entry).get("cache-ram", self.cache_ram_mib))
        except (ValueError, EngineError):
            return self.cache_ram_mib
        return asked if asked >= 0 else ENGINE_CACHE_RAM_MIB

    def _read(self) -> Registry:
        sources = Sources(
            self._settings.models_dir, self._settings.models_preset, self._settings.instance_args
        )
        registry = load_registry(sources, self.engine.options)
        for problem in registry.problems:
            log.warning("registry: %s", problem)
        return registry

    def reload(self) -> bool:
        """Read the registry again; False (and the old one stays) when it is broken, which is logged."""
        try:
            self.registry = self._read()
        except RegistryError as error:
            log.error("registry not reloaded, the old one stays: %s", error)
            return False
        log.info("registry reloaded", extra={"models": len(self.registry.entries)})
        return True

    def engine_of(self, entry: ModelEntry) -> Engine:
        """Return the engine an entry names, else the herd's. Raises EngineError."""
        if entry.engine is None:
            return self.engine
        path = str(entry.engine)
        if path not in self._engines:
            self._engines[path] = find_engine(entry.engine, self.environ)
        return self._engines[path]

    def specs(self) -> dict[str, ModelSpec]:
        """Return what the scheduler needs of every model."""
        return {
            name: model_spec(entry, self._settings.unload_after)
            for name, entry in self.registry.entries.items()
        }

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
            "registry_revision": registry_revision(self.registry.entries),
        }
