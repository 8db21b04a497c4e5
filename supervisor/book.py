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
from llamastead.supervisor.engine import EngineError
from llamastead.supervisor.launch import instance_environment
from llamastead.supervisor.registry.model import ModelEntry
from llamastead.supervisor.registry.render import command_words
from llamastead.supervisor.registry.reserved import SILENCING

MIB = 1 << 20
_CONTEXT_STEP = 256
Key = tuple[str, str]
"""Names a measurement: file identity and preset."""
_DEVICE_VARIABLES = ("LLAMA_ARG_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "VK_", "GGML_")


@dataclass(frozen=True)
class Known:
    """What a model takes at its smallest and at its largest context, by the engine's names of devices.

    `contexts` are those two in tokens, None where nothing but the file's size is known. `took` is what a real
    load took at `took_context`. `key` is the measurement's name in Redis: file identity and preset. `failure`
    says why the last of so many `failures` of a measurement told nothing.
    """

    key: Key
    smallest: Figures
    largest: Figures
    contexts: tuple[int, int] | None
    source: str
    took: Figures | None = None
    took_context: int = 0
    failure: str = ""
    failures: int = 0
    limited: bool = False

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

    def within(self, limit: int) -> "Known":
        """Return the figures with a largest context that takes no more than so many bytes in all."""
        low, high = (sum(figures.totals(each).values()) for each in (self.smallest, self.largest))
        if high <= limit or self.contexts is None:
            return self
        share = max(0.0, (limit - low) / (high - low)) if high > low else 0.0
        least, most = self.contexts
        cut = max(least, int(least + (most - least) * share) // _CONTEXT_STEP * _CONTEXT_STEP)
        return replace(
            self,
            largest=figures.between(self.smallest, self.largest, self._share(cut)),
            contexts=(least, cut),
            limited=True,
        )

    def context(self, share: float) -> int | None:
        """Return the context that takes `share` of the growth, None when there is nothing to choose."""
        if self.contexts is None or (share >= 1 and not self.limited):
            return None
        low, high = self.contexts
        if low >= high and not self.limited:
            return None
        return max(_CONTEXT_STEP, int(low + (high - low) * share) // _CONTEXT_STEP * _CONTEXT_STEP)


@dataclass
class Book:
    """Figures of all models of the registry, by name. `refresh` reckons; `learn` takes what a load showed."""

    configuration: Configuration
    devices: Devices
    known: dict[str, Known] = field(default_factory=dict)
    worker_lives: bool = False
    _reckoned: dict[str, Known] = field(default_factory=dict)
    _measured: dict[Key, tuple[Figures, Figures]] = field(default_factory=dict)
    _failed: dict[Key, tuple[str, int]] = field(default_factory=dict)
    _forgiven: set[Key] = field(default_factory=set)
    _took: dict[Key, tuple[Figures, int]] = field(default_factory=dict)

    def refresh(self) -> None:
        """Reckon the figures of every model anew where its files or its preset changed. Reads files."""
        entries = self.configuration.registry.entries
        fresh = {name: self._reckon(entry) for name, entry in entries.items()}
        self._reckoned = {name: known for name, known in fresh.items() if known is not None}
        self.known = {name: self._with_results(name, known) for name, known in self._reckoned.items()}

    def measured(self, key: Key, smallest: Figures, largest: Figures) -> None:
        """Take what a measurement found at the smallest and at the largest context."""
        self._measured[key] = smallest, largest
        self._failed.pop(key, None)
        self._apply(key)

    def fail(self, key: Key, why: str, failures: int = 1) -> None:
        """Note that a measurement found nothing; what was reckoned stays."""
        self._failed[key] = why, failures
        self._forgiven.discard(key)
        self._apply(key)

    def forget_failure(self, key: Key) -> None:
        """Have a measurement that failed tried once more."""
        self._forgiven.add(key)

    def took(self, key: Key, found: Figures, context: int) -> None:
        """Take what a load took at this context."""
        self._took[key] = found, context
        self._apply(key)

    def is_open(self, model: str) -> bool:
        """Whether a model is yet to be measured, and can be."""
        known, entry = self.known.get(model), self.configuration.registry.entries.get(model)
        if known is None or entry is None or known.key in self._measured or known.contexts is None:
            return False
        if known.key in self._failed and known.key not in self._forgiven:
            return False
        try:
            return "fit" in self.configuration.engine_of(entry).options
        except EngineError:
            return False

    def order(self, model: str) -> dict[str, Any]:
        """Return what a worker is to run for a measurement: command lines, and variables to set for them."""
        entry = self.configuration.registry.entries[model]
        contexts = self.known[model].contexts
        assert contexts is not None
        commands = [measuring_command(entry, self.configuration, each) for each in dict.fromkeys(contexts)]
        return {"commands": commands, "variables": measuring_variables(entry, self.configuration)}

    def models_of(self, key: Key) -> list[str]:
        """Return the models that a measurement is of."""
        return [name for name, known in self._reckoned.items() if known.key == key]

    def _apply(self, key: Key) -> None:
        for name in self.models_of(key):
            self.known[name] = self._with_results(name, self._reckoned[name])

    def _with_results(self, name: str, reckoned: Known) -> Known:
        """Return what was reckoned, with what was measured in its place and what a load took beside it."""
        known = reckoned
        if reckoned.key in self._measured:
            mapped = any(parts.mapped for parts in reckoned.smallest.values())
            low, high = (_as_mapped(f) if mapped else f for f in self._measured[reckoned.key])
            known = replace(known, smallest=low, largest=high, source="measured")
        why, failures = self._failed.get(reckoned.key, ("", 0))
        took, took_context = self._took.get(reckoned.key, (None, 0))
        known = replace(known, failure=why, failures=failures, took=took, took_context=took_context)
        limit = self.configuration.registry.entries[name].memory_max
        return known if limit is None else known.within(limit * MIB)

    def specs(self) -> dict[str, ModelSpec]:
        """Return what the scheduler needs of every model, its memory included."""
        return {name: self._with_memory(spec) for name, spec in self.configuration.specs().items()}

    def learn(self, model: str, took: Figures, context: int) -> None:
        """Note what a model took in a real load at this context."""
        if model in self.known:
            self.took(self.known[model].key, took, context)

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
        if known.failure:
            shown["failed"] = known.failure
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
            measured=known.source == "measured",
            awaited=self.worker_lives and self.is_open(spec.name),
        )

    def _reckon(self, entry: ModelEntry) -> Known | None:
        if entry.path is None:
            return None
        try:
            key = (file_identity(entry.files), self._preset(entry))
        except (OSError, EngineError):
            # Its start will say what is missing; without it there is nothing to reckon.
            return None
        before = self._reckoned.get(entry.name)
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
        return Known(key, smallest.figures, largest.figures, contexts, smallest.source)

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


def measuring_command(entry: ModelEntry, configuration: Configuration, context: int) -> list[str]:
    """Return the command line of an engine that is to tell what it would take at this context."""
    engine = configuration.engine_of(entry)
    options = {name: value for name, value in entry.options.items() if name not in SILENCING}
    options |= {"fit": "on", "ctx-size": str(context), "log-verbosity": "4", "log-colors": "off"}
    return [str(engine.path), *command_words(options, engine.options)]


def measuring_variables(entry: ModelEntry, configuration: Configuration) -> dict[str, str]:
    """Return the variables that matter to a measurement; nothing secret is among them."""
    variables = instance_environment(configuration.environ, configuration.engine_of(entry).options)
    found = {**variables, **entry.env}
    return {name: value for name, value in found.items() if name.startswith(_DEVICE_VARIABLES)}


def _as_mapped(found: Figures) -> Figures:
    """Return figures whose weights on the host are pages of their file."""
    host = found.get(HOST)
    return found if host is None else {**found, HOST: replace(host, mapped=host.model)}
