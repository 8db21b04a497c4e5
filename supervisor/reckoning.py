"""What a model takes before anybody measured it, reckoned from its files' headers, and how it is measured."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamastead.shared import estimate, figures
from llamastead.shared.devices.device import HOST
from llamastead.shared.estimate import Use
from llamastead.shared.figures import Parts
from llamastead.shared.gguf import GgufError
from llamastead.shared.jobs import file_identity
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.devices import Devices
from llamastead.supervisor.engine import EngineError
from llamastead.supervisor.known import Key, Known
from llamastead.supervisor.launch import DEVICE_PREFIXES, instance_environment
from llamastead.supervisor.placement import PlacementError, Spot, Spots, find_spots
from llamastead.supervisor.registry.files import adapter_files
from llamastead.supervisor.registry.model import ModelEntry
from llamastead.supervisor.registry.render import command_words
from llamastead.supervisor.registry.reserved import SILENCING

# What of an instance's variables a measurement gets: options, devices, and where the engine's libraries are.
_MEASURED_WITH = ("LLAMA_ARG_", "LD_LIBRARY_PATH", *DEVICE_PREFIXES)


@dataclass(frozen=True)
class Reckoned:
    """What was worked out of one model: where it may lie, and what it takes `whole` on a device, or as it is
    started where it has no choice, and `split` where it has; None where its files tell nothing. `refreshes`
    is how many the book had seen when the work began.
    """

    entry: ModelEntry
    spots: Spots
    whole: Known | None
    split: Known | None
    refreshes: int = 0


class Reckoner:
    """Reads files and changes nothing, so it may run in a thread."""

    def __init__(
        self, configuration: Configuration, devices: Devices, same: Callable[[Key], Known | None]
    ) -> None:
        """`same` returns what was worked out before of the same files with the same preset."""
        self._configuration = configuration
        self._devices = devices
        self._same = same

    def reckon(self, entry: ModelEntry) -> Reckoned:
        """Return what the files, the preset and the devices say of a model as they are now."""
        spots = self._spots_of(entry)
        usual = max(spots.whole, key=lambda spot: self._devices.size(spot.place), default=spots.other)
        files = functools.cache(lambda: _Files(entry, self._configuration.options_in_force(entry)))
        whole = self._known(entry, files, spots, usual)
        split = self._known(entry, files, spots, spots.other) if whole and usual.place else None
        return Reckoned(entry, spots, whole, split)

    def _spots_of(self, entry: ModelEntry) -> Spots:
        """Return where a model may lie. One that can't be started, its preset being wrong, lies nowhere: its
        start will say why.
        """
        try:
            engine = self._configuration.engine_of(entry)
            return find_spots(
                self._configuration.options_in_force(entry),
                entry.env,
                self._devices.seen_by(engine),
                engine.options,
                self._configuration.environ,
            )
        except (EngineError, PlacementError) as error:
            return Spots(Spot(), (HOST,), problem=str(error))

    def _known(
        self, entry: ModelEntry, files_of: Callable[[], "_Files"], spots: Spots, spot: Spot
    ) -> Known | None:
        if entry.path is None:
            return None
        try:
            key = (file_identity(entry.files), self._preset(entry, spot))
        except (OSError, EngineError):
            # Its start will say what is missing; without it there is nothing to reckon.
            return None
        if (same := self._same(key)) is not None:
            return replace(same, spot=spot)
        options = self._configuration.options_in_force(entry)
        use = estimate.read_use(options)
        sizes = sizes_of(self._devices, spots, spot)
        try:
            files = files_of()
            low, high = _contexts(use, options, files.model.training_context or estimate.FIT_CONTEXT)
            smallest, largest = (files.estimate(replace(use, context=each), sizes) for each in (low, high))
        except (OSError, GgufError):
            return None
        contexts = (low, high) if smallest.context is not None else None
        adapters = files.adapters(sizes)
        least, most = (figures.added(each.figures, adapters) for each in (smallest, largest))
        return Known(key, least, most, contexts, smallest.source, spot, adapters=adapters)

    def _preset(self, entry: ModelEntry, spot: Spot) -> str:
        """Return the name of what a model is started with. On which of several devices it is whole does not
        matter.
        """
        engine = self._configuration.engine_of(entry)
        lies = ["whole"] if spot.place else sorted(spot.names.values())
        options = sorted(self._configuration.options_in_force(entry).items())
        facts = [entry.revision, engine.version, options, lies]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class _Estimated:
    figures: dict[str, Parts]
    context: int | None
    source: str


class _Files:
    """The files of a model, each opened once. Raises OSError or GgufError."""

    def __init__(self, entry: ModelEntry, options: Mapping[str, str]) -> None:
        assert entry.path is not None
        self.model = estimate.Weights(entry.path)
        self._projector = estimate.projector_parts(entry.mmproj) if entry.mmproj is not None else Parts()
        self._adapters = sum(file.stat().st_size for file in adapter_files(options))
        draft = options.get("model-draft")
        self._draft = estimate.Weights(Path(draft)) if draft else None

    def estimate(self, use: Use, sizes: Mapping[str, int]) -> _Estimated:
        """Return what the model takes when used so, spread over devices of these sizes."""
        found = self.model.estimate(use)
        parts = found.parts + self._projector
        if self._draft is not None:
            parts += self._draft.estimate(use).parts.as_draft()
        if not sizes:
            return _Estimated({HOST: parts}, found.context, found.source)
        host = found.on_host
        rest = replace(parts, model=parts.model - host.model, context=parts.context - host.context, mapped=0)
        split = {HOST: host, next(iter(sizes)): rest} if host.total else {next(iter(sizes)): rest}
        return _Estimated(figures.spread(split, sizes), found.context, found.source)

    def adapters(self, sizes: Mapping[str, int]) -> dict[str, Parts]:
        """Return what the adapters take of these devices, over which they are spread as the layers are."""
        if not self._adapters:
            return {}
        parts = Parts(model=self._adapters)
        return figures.spread({next(iter(sizes)): parts}, sizes) if sizes else {HOST: parts}


def sizes_of(devices: Devices, spots: Spots, spot: Spot) -> dict[str, int]:
    """Return by the engine's names the sizes of the devices that a model started there lies on."""
    lies_on = (spot.place,) if spot.place else spots.lies_on
    return {engine: devices.size(own) for engine, own in spot.names.items() if own in lies_on and own != HOST}


def _contexts(use: Use, options: Mapping[str, str], train: int) -> tuple[int, int]:
    """Return the smallest and the largest context the options leave to the engine."""
    if use.context:
        return use.context, use.context
    if options.get("fit", "on") in {"off", "0", "false"}:
        return train, train
    try:
        least = int(options.get("fit-ctx", estimate.FIT_CONTEXT))
    except ValueError:
        least = estimate.FIT_CONTEXT
    return min(train, least * (1 if use.unified else use.sequences)), train


def measuring_order(entry: ModelEntry, configuration: Configuration, known: Known) -> dict[str, Any]:
    """Return what a worker is to run for a measurement: command lines, and variables to set for them."""
    assert known.contexts is not None
    commands = [
        _measuring_command(entry, configuration, each, known.spot) for each in dict.fromkeys(known.contexts)
    ]
    return {"commands": commands, "variables": _measuring_variables(entry, configuration, known.spot)}


def _measuring_command(
    entry: ModelEntry, configuration: Configuration, context: int, spot: Spot
) -> list[str]:
    """Return the command line of an engine that is to tell what it would take there at this context."""
    engine = configuration.engine_of(entry)
    options = {
        name: value for name, value in spot.placed(entry.start_options).items() if name not in SILENCING
    }
    options |= {"fit": "on", "ctx-size": str(context), "log-verbosity": "4", "log-colors": "off"}
    return [str(engine.path), *command_words(options, engine.options)]


def _measuring_variables(entry: ModelEntry, configuration: Configuration, spot: Spot) -> dict[str, str]:
    """Return the variables that matter to a measurement; nothing secret is among them."""
    table = configuration.engine_of(entry).options
    found = spot.environment(instance_environment(configuration.environ, table), table) | dict(entry.env)
    return {name: value for name, value in found.items() if name.startswith(_MEASURED_WITH)}
