"""What is known of each model's memory: reckoned from its header, measured, and corrected by real loads."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamastead.shared import estimate, figures
from llamastead.shared.devices.device import HOST
from llamastead.shared.estimate import Use
from llamastead.shared.figures import Figures, Parts
from llamastead.shared.gguf import GgufError
from llamastead.shared.jobs import file_identity
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.core.state import ModelSpec
from llamastead.supervisor.devices import Devices
from llamastead.supervisor.registry.model import ModelEntry

MIB = 1 << 20
_CONTEXT_STEP = 256


@dataclass(frozen=True)
class Known:
    """What a model takes at its smallest and at its largest context, by the engine's names of devices.

    `contexts` are those two in tokens, None where nothing but the file's size is known. `took` is what a real
    load took at `took_context`. `key` is the measurement's name in Redis: file identity and preset.
    """

    key: tuple[str, str]
    smallest: Figures
    largest: Figures
    contexts: tuple[int, int] | None
    source: str
    took: Figures | None = None
    took_context: int = 0

    @property
    def correction(self) -> dict[str, int]:
        """Return bytes per device by which a real load differed from these figures."""
        if self.took is None:
            return {}
        expected = figures.totals(
            figures.between(self.smallest, self.largest, self._share(self.took_context))
        )
        took = figures.totals(self.took)
        differ = {name: took.get(name, 0) - expected.get(name, 0) for name in {*took, *expected}}
        return {name: amount for name, amount in sorted(differ.items()) if amount}

    def _share(self, context: int) -> float:
        if self.contexts is None or self.contexts[0] >= self.contexts[1]:
            return 0.0
        low, high = self.contexts
        return min(1.0, max(0.0, (context - low) / (high - low)))

    def context(self, share: float) -> int | None:
        """Return the context that takes `share` of the growth, None when there is nothing to choose."""
        if self.contexts is None or self.contexts[0] >= self.contexts[1] or share >= 1:
            return None
        low, high = self.contexts
        return max(_CONTEXT_STEP, int(low + (high - low) * share) // _CONTEXT_STEP * _CONTEXT_STEP)


@dataclass
class Book:
    """Figures of all models of the registry, by name. `refresh` reckons; `learn` takes what a load showed."""

    configuration: Configuration
    devices: Devices
    known: dict[str, Known] = field(default_factory=dict)
    _took: dict[tuple[str, str], tuple[Figures, int]] = field(default_factory=dict)

    def refresh(self) -> None:
        """Reckon the figures of every model anew where its files or its preset changed. Reads files."""
        entries = self.configuration.registry.entries
        fresh = {name: self._reckon(entry) for name, entry in entries.items()}
        self.known = {name: known for name, known in fresh.items() if known is not None}

    def specs(self) -> dict[str, ModelSpec]:
        """Return what the scheduler needs of every model, its memory included."""
        return {name: self._with_memory(spec) for name, spec in self.configuration.specs().items()}

    def learn(self, model: str, took: Figures, context: int) -> None:
        """Note what a model took in a real load at this context."""
        known = self.known.get(model)
        if known is not None:
            self._took[known.key] = took, context
            self.known[model] = replace(known, took=took, took_context=context)

    def context(self, model: str, share: float) -> int | None:
        """Return the context to start a model with when `share` of its growth has room; None: leave it."""
        known = self.known.get(model)
        return known.context(share) if known else None

    def amounts(self, model: str, found: Figures) -> tuple[dict[str, int], dict[str, int]]:
        """Return what an instance of a model holds by the ledger's devices when it took so much, its prompt
        cache included, and how much of that they show as used.
        """
        entry = self.configuration.registry.entries.get(model)
        cache_ram = self.configuration.cache_ram(entry) if entry else self.configuration.cache_ram_mib
        held = figures.with_host_needs(found, cache_ram * MIB)
        shown = {name: parts.total - parts.mapped for name, parts in found.items()}
        shown[HOST] = shown.get(HOST, 0) + figures.PROCESS_OVERHEAD
        return self._renamed(figures.totals(held)), self._renamed(shown)

    def shown_memory(self) -> dict[str, str]:
        """Return the field `memory` of every model's hash: what `show` returns, as JSON."""
        return {name: json.dumps(self.show(name)) for name in self.configuration.registry.entries}

    def show(self, model: str) -> dict[str, Any]:
        """Return what people are shown of a model's memory: min, max and effective by device, in bytes."""
        known = self.known.get(model)
        if known is None:
            return {}
        shown: dict[str, Any] = {
            "min": self._shown(known.smallest),
            "max": self._shown(known.largest),
            "source": known.source,
        }
        if known.contexts:
            shown["contexts"] = list(known.contexts)
        if known.took is not None:
            shown["effective"] = self._shown(known.took)
            shown["effective_context"] = known.took_context
            shown["correction"] = self._renamed(known.correction)
        return shown

    def _shown(self, found: Figures) -> dict[str, dict[str, int]]:
        return {self.devices.ledger_name(name): parts for name, parts in figures.to_json(found).items()}

    def _with_memory(self, spec: ModelSpec) -> ModelSpec:
        known = self.known.get(spec.name)
        if known is None:
            return spec
        smallest, _ = self.amounts(spec.name, known.smallest)
        largest, _ = self.amounts(spec.name, known.largest)
        for name, amount in self._renamed(known.correction).items():
            smallest[name] = max(0, smallest.get(name, 0) + amount)
            largest[name] = max(0, largest.get(name, 0) + amount)
        grows = {name: amount - smallest.get(name, 0) for name, amount in largest.items()}
        return replace(
            spec,
            needs=smallest,
            grows={name: amount for name, amount in grows.items() if amount > 0},
        )

    def _reckon(self, entry: ModelEntry) -> Known | None:
        if entry.path is None:
            return None
        try:
            identity = file_identity(entry.files)
        except OSError:
            return None
        key = (identity, self._preset(entry))
        before = self.known.get(entry.name)
        if before is not None and before.key == key:
            return before
        options = self.configuration.options_in_force(entry)
        use = estimate.read_use(options)
        train = estimate.training_context(entry.path) or estimate.FIT_CONTEXT
        low, high = _contexts(use, options, train)
        try:
            smallest = self._estimate(entry, options, replace(use, context=low))
            largest = self._estimate(entry, options, replace(use, context=high))
        except (OSError, GgufError):
            return None
        contexts = (low, high) if smallest.context is not None else None
        low_figures, high_figures = smallest.figures, largest.figures
        if entry.memory_max is not None and contexts:
            share = _share_within(low_figures, high_figures, entry.memory_max * MIB)
            high_figures = figures.between(low_figures, high_figures, share)
            contexts = (low, low + int((high - low) * share) // _CONTEXT_STEP * _CONTEXT_STEP)
        took, took_context = self._took.get(key, (None, 0))
        return Known(key, low_figures, high_figures, contexts, smallest.source, took, took_context)

    def _estimate(self, entry: ModelEntry, options: Mapping[str, str], use: Use) -> "_Reckoned":
        assert entry.path is not None
        found = estimate.estimate(entry.path, use)
        parts = found.parts
        if entry.mmproj is not None:
            parts += estimate.projector_parts(entry.mmproj)
        if draft := options.get("model-draft"):
            parts += estimate.estimate(Path(draft), use).parts.as_draft()
        place = self._place(options)
        if place != HOST:
            parts = replace(parts, mapped=0)
        return _Reckoned({place: parts}, found.context, found.source)

    def _place(self, options: Mapping[str, str]) -> str:
        """Return where a model lies, as far as options tell: on the first GPU whole, if there is one."""
        on_host = options.get("n-gpu-layers") == "0" or options.get("device") == "none"
        return HOST if on_host or self.devices.first_gpu is None else self.devices.first_gpu

    def _preset(self, entry: ModelEntry) -> str:
        engine = self.configuration.engine_of(entry)
        facts = [entry.revision, engine.version, sorted(self.configuration.options_in_force(entry).items())]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]

    def _renamed(self, amounts: Mapping[str, int]) -> dict[str, int]:
        renamed: dict[str, int] = {}
        for name, amount in amounts.items():
            ledger_name = self.devices.ledger_name(name)
            renamed[ledger_name] = renamed.get(ledger_name, 0) + amount
        return renamed


@dataclass(frozen=True)
class _Reckoned:
    figures: dict[str, Parts]
    context: int | None
    source: str


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


def _share_within(smallest: Figures, largest: Figures, limit: int) -> float:
    low, high = (sum(figures.totals(each).values()) for each in (smallest, largest))
    return 1.0 if high <= limit else max(0.0, (limit - low) / (high - low)) if high > low else 0.0
