"""What is known of each model's memory: reckoned from its header, measured, and corrected by real loads.

A model that may go to one of several devices has two sets of figures: whole on one of them, which one being
all the same to the figures, and split over all, for when it is too big for each.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llamastead.shared import figures
from llamastead.shared.clock import wall_ms
from llamastead.shared.devices.device import HOST, MIB
from llamastead.shared.figures import Figures
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.core.state import ModelSpec, Place
from llamastead.supervisor.devices import Devices
from llamastead.supervisor.engine import EngineError
from llamastead.supervisor.known import Key, Known
from llamastead.supervisor.placement import Spot, Spots
from llamastead.supervisor.reckoning import Reckoned, Reckoner, measuring_order, sizes_of

PEAK_STEP = 4 * MIB
ANY_GPU = "gpu"
"""Stands for the one GPU a model goes to, in figures that are the same for each."""


@dataclass
class Book:
    """Figures of all models of the registry, by name; `learn` takes what a load showed.

    What `refresh` makes `stale` is worked out by `reckon`, which reads files and may run in a thread, and
    comes into force with `take`. Until then a model goes by the figures it had, a new one has none.
    """

    configuration: Configuration
    devices: Devices
    known: dict[str, Known] = field(default_factory=dict)
    worker_lives: bool = False
    stale: dict[str, int] = field(default_factory=dict)
    _refreshes: int = 0
    _specs: dict[str, ModelSpec] = field(default_factory=dict)
    _dirty: set[str] = field(default_factory=set)
    _missing: dict[str, str] = field(default_factory=dict)
    _to_measure: dict[str, None] = field(default_factory=dict)
    _named: dict[Key, dict[str, Known]] = field(default_factory=dict)
    _spots: dict[str, Spots] = field(default_factory=dict)
    _reckoned: dict[str, Known] = field(default_factory=dict)
    _split: dict[str, Known] = field(default_factory=dict)
    _measured: dict[Key, tuple[Figures, Figures, int]] = field(default_factory=dict)
    _failed: dict[Key, tuple[str, int]] = field(default_factory=dict)
    _forgiven: set[Key] = field(default_factory=set)
    _took: dict[Key, tuple[Figures, int, int]] = field(default_factory=dict)
    _peaks: dict[Key, dict[str, int]] = field(default_factory=dict)
    _wanted: dict[Key, Mapping[str, int]] = field(default_factory=dict)
    _untold: dict[Key, dict[str, int]] = field(default_factory=dict)

    def refresh(self, names: Iterable[str] | None = None) -> None:
        """Have these models reckoned anew, all of them by default, and those that had a problem; forget those
        that are gone.
        """
        entries = self.configuration.registry.entries
        for name in (self._specs.keys() | self._spots.keys() | self.stale.keys()) - entries.keys():
            self._forget(name)
        self._refreshes += 1
        odd = (name for name, spots in self._spots.items() if spots.problem)
        for name in list(entries) if names is None else [*names, *odd]:
            self.stale[name] = self._refreshes
            self._dirty.add(name)

    def reckon(self, names: Iterable[str]) -> list[Reckoned]:
        """Return the figures of models as their files, presets and devices are now. Changes nothing."""
        refreshes = self._refreshes  # before the rest: what is refreshed meanwhile stays stale
        entries = self.configuration.registry.entries
        reckoner = Reckoner(self.configuration, self.devices, self._same)
        found = (reckoner.reckon(entries[name]) for name in names if name in entries)
        return [replace(each, refreshes=refreshes) for each in found]

    def _same(self, key: Key) -> Known | None:
        named = list(self._named.get(key, {}).values())  # whole at once: this is asked from a thread
        return named[0] if named else None

    def take(self, found: Iterable[Reckoned]) -> None:
        """Put figures into force, but those of models that are configured otherwise by now. What was
        refreshed after they were begun stays stale.
        """
        for each in found:
            name = each.entry.name
            if self.configuration.registry.entries.get(name) == each.entry:
                self._forget_figures(name)
                self._spots[name] = each.spots
                if each.whole is not None:
                    self._reckoned[name] = each.whole
                    self._named.setdefault(each.whole.key, {})[name] = each.whole
                if each.split is not None:
                    self._split[name] = each.split
                    self._named.setdefault(each.split.key, {})[name] = each.split
                if self.stale.get(name, 0) <= each.refreshes:
                    self.stale.pop(name, None)
                self._enforce(name)

    def count_workers(self, number: int) -> bool:
        """Note how many workers may measure; True when that matters to those who wait for a measurement."""
        changed, self.worker_lives = bool(number) != self.worker_lives, bool(number)
        if changed:
            self._dirty.update(self._to_measure)
        return changed

    def next_to_measure(self, wanted: Iterable[str]) -> str | None:
        """Return the model to measure next, one that is `wanted` before all others."""
        first = next((name for name in wanted if name in self._to_measure), None)
        return first or next(iter(self._to_measure), None)

    def _forget(self, name: str) -> None:
        self._forget_figures(name)
        self.stale.pop(name, None)
        self._dirty.discard(name)
        for known in (self._specs, self._spots, self._to_measure, self._missing, self.known):
            known.pop(name, None)

    def _forget_figures(self, name: str) -> None:
        for figures_of in (self._reckoned, self._split):
            known = figures_of.pop(name, None)
            named = self._named.get(known.key, {}) if known is not None else {}
            named.pop(name, None)
            if known is not None and not named:
                self._named.pop(known.key, None)

    def _enforce(self, name: str) -> None:
        """Have a model's figures say what is known by now."""
        self._dirty.add(name)
        if name in self._reckoned:
            self.known[name] = self._in_force(name)
        else:
            self.known.pop(name, None)
        if self.is_open(name):
            self._to_measure.setdefault(name)
        else:
            self._to_measure.pop(name, None)

    def measured(self, key: Key, smallest: Figures, largest: Figures, at_ms: int) -> None:
        """Take what a measurement found at the smallest and at the largest context."""
        self._measured[key] = smallest, largest, at_ms
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
        self._apply(key)

    def took(self, key: Key, found: Figures, context: int, at_ms: int) -> None:
        """Take what a load took at this context."""
        self._took[key] = found, context, at_ms
        self._wanted.pop(key, None)
        self._apply(key)

    def peaked(self, key: Key, seen: Mapping[str, int]) -> bool:
        """Take what a process was seen to use; True when that is more than before by more than a trifle."""
        return self._raise(self._peaks, key, seen)

    def untold(self, key: Key, seen: Mapping[str, int]) -> bool:
        """Take what a process was seen to use of devices, by the names of its figures, beyond what its engine
        told; True when that is more than before by more than a trifle.
        """
        return self._raise(self._untold, key, seen)

    def untold_of(self, key: Key) -> dict[str, int]:
        """Return the most that was seen so."""
        return dict(self._untold.get(key, {}))

    def _raise(self, most: dict[Key, dict[str, int]], key: Key, seen: Mapping[str, int]) -> bool:
        before = most.get(key, {})
        higher = {name: max(amount, before.get(name, 0)) for name, amount in {**before, **seen}.items()}
        if all(amount < before.get(name, 0) + PEAK_STEP for name, amount in higher.items()):
            return False
        most[key] = higher
        self._apply(key)
        return True

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
        return measuring_order(entry, self.configuration, self.known[model])

    def models_of(self, key: Key) -> list[str]:
        """Return the models that a measurement is of."""
        return list(self._named.get(key, ()))

    def _apply(self, key: Key) -> None:
        for name in self.models_of(key):
            self._enforce(name)

    def _in_force(self, name: str) -> Known:
        """Return the figures that a model is measured and shown by: split ones once it is measured to be too
        big for each device.
        """
        whole = self._with_results(name, self._reckoned[name])
        if name not in self._split or whole.source != "measured":
            return whole
        fits = any(
            self._least(name, whole, spot).get(spot.place, 0) <= self.devices.size(spot.place)
            for spot in self._spots[name].whole
        )
        return whole if fits else self._split_known(name, whole)

    def _split_known(self, name: str, whole: Known) -> Known:
        """Return the figures of a model that is split; as long as that is not measured, those of the whole
        one, in proportion to the devices' sizes.
        """
        reckoned = self._split[name]
        if reckoned.key not in self._measured and whole.source == "measured":
            sizes = sizes_of(self.devices, self._spots[name], reckoned.spot)
            low, high = (figures.spread(each, sizes) for each in (whole.smallest, whole.largest))
            reckoned = replace(reckoned, smallest=low, largest=high)
        return self._with_results(name, reckoned)

    def _both(self, name: str) -> tuple[Known, Known] | None:
        """Return the figures of a model that is whole on one device, and of one that is started the other
        way: the same where there is no choice.
        """
        if name not in self._reckoned:
            return None
        whole = self._with_results(name, self._reckoned[name])
        return whole, self._split_known(name, whole) if name in self._split else whole

    def _known_at(self, name: str, place: str) -> Known | None:
        both = self._both(name)
        return both and both[0 if place else 1]

    def _with_results(self, name: str, reckoned: Known) -> Known:
        """Return what was reckoned, with what was measured in its place and what a load took beside it."""
        known = reckoned
        if reckoned.key in self._measured:
            mapped = any(parts.mapped for parts in reckoned.smallest.values())
            *found, at_ms = self._measured[reckoned.key]
            found = [_as_mapped(each) if mapped else each for each in found]
            low, high = (figures.added(each, reckoned.adapters) for each in found)
            known = replace(known, smallest=low, largest=high, source="measured", measured_ms=at_ms)
        why, failures = self._failed.get(reckoned.key, ("", 0))
        took, took_context, took_ms = self._took.get(reckoned.key, (None, 0, 0))
        peak = self._peaks.get(reckoned.key, {})
        wanted = self._wanted.get(reckoned.key, {})
        known = replace(known, failure=why, failures=failures, peak=peak, wanted=wanted)
        known = replace(known, untold=self._untold.get(reckoned.key, {}))
        known = replace(known, took=took, took_context=took_context, took_ms=took_ms)
        # A new registry counts at once, what is reckoned for it a little later: the model may be gone by now.
        entry = self.configuration.registry.entries.get(name)
        limit = entry.memory_max if entry else None
        return known if limit is None else known.within(limit * MIB)

    def specs(self) -> dict[str, ModelSpec]:
        """Return what the scheduler needs of every model, its memory included, as far as that is reckoned."""
        entries = self.configuration.registry.entries
        self._dirty |= entries.keys() - self._specs.keys()
        for name in self._dirty & entries.keys():
            spec = replace(self.configuration.spec(entries[name]), missing=self._missing.get(name, ""))
            self._specs[name] = self._with_memory(spec)
        self._dirty.clear()
        return {name: self._specs[name] for name in entries}

    def take_missing(self, found: Mapping[str, str]) -> bool:
        """Note model → its files that can't be found ("": all can); return whether that is news of any."""
        news = {name: missing for name, missing in found.items() if missing != self._missing.get(name, "")}
        self._missing |= news
        self._dirty |= news.keys()
        return bool(news)

    def learn(self, model: str, took: Figures, context: int, place: str) -> None:
        """Note what a model took in a real load at this context, whole on a device or not ("")."""
        known = self._known_at(model, place)
        if known is not None:
            alike = self._alike(model, place, known)
            found = figures.renamed(took, lambda name: alike.get(name, name))
            self.took(known.key, found, context, wall_ms())

    def ran_out(self, model: str, wanted: Mapping[str, int], place: str) -> None:
        """Note what a load that ran out of memory wanted at least: no less is reckoned with until another
        load shows better.
        """
        known = self._known_at(model, place)
        if known is not None and wanted:
            alike = self._alike(model, place, known)
            self._wanted[known.key] = {alike.get(name, name): size for name, size in wanted.items()}
            self._apply(known.key)

    def told(self, model: str, found: Figures, place: str) -> dict[str, int]:
        """Return by the ledger's GPUs what an engine told of them."""
        told = _renamed(figures.totals(found), self.spot(model, place))
        return {name: size for name, size in told.items() if name != HOST}

    def beyond(
        self, model: str, place: str, told: Mapping[str, int], seen: Mapping[str, int]
    ) -> tuple[Key, dict[str, int]] | None:
        """Return what a process is seen to use of GPUs beyond what its engine told, by the names of its
        figures, and whose figures these are; None where nothing is known of it.
        """
        known = self._known_at(model, place)
        if known is None:
            return None
        alike, names = self._alike(model, place, known), self.spot(model, place).names
        return known.key, {
            alike.get(name, name): seen[own] - told[own]
            for name, own in names.items()
            if own in told and seen.get(own, 0) > told[own]
        }

    def _alike(self, model: str, place: str, known: Known) -> dict[str, str]:
        """Return what devices are called in a model's figures, by what an instance there calls them."""
        here = self.spot(model, place).names if place else known.spot.names
        return dict(zip(here, known.spot.names, strict=False))

    def spot(self, model: str, place: str) -> Spot:
        """Return how a model is started whole on this device, or the other way ("")."""
        spots = self._spots.get(model)
        return spots.of(place) if spots else Spot()

    def problem(self, model: str) -> str:
        """Return why a model can't be started where its preset wants it, "" if it can."""
        spots = self._spots.get(model)
        return spots.problem if spots else ""

    def context(self, model: str, share: float, place: str) -> int | None:
        """Return the context to start a model with when `share` of its growth has room; None: no file of it
        is here to tell.
        """
        known = self._known_at(model, place)
        return known.context(share) if known else None

    def needs_no_fitting(self, model: str) -> bool:
        """Whether an engine that loads a model may go without `--fit`."""
        known = self.known.get(model)
        return known is not None and known.needs_no_fitting

    def amounts(
        self, model: str, found: Figures, spot: Spot, *, seen: bool = False, untold: Mapping[str, int] = {}
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return what an instance of a model, started there, holds by the ledger's devices when it took so
        much, its prompt cache included, and how much of that they show as used.

        What the driver takes beside it is reckoned, but where it is known (`untold`), or the instance is
        `seen`, running, by a device that tells what each process uses.
        """
        seen_by = (name for name in found if seen and self.devices.tells(spot.ledger_name(name)))
        found = figures.with_contexts(found, {**dict.fromkeys(seen_by, 0), **untold})
        entry = self.configuration.registry.entries.get(model)
        cache_ram = self.configuration.cache_ram(entry) if entry else self.configuration.cache_ram_mib
        held = figures.with_host_needs(found, cache_ram * MIB)
        shown = {name: parts.total - parts.mapped for name, parts in found.items()}
        shown[HOST] = shown.get(HOST, 0) + figures.PROCESS_OVERHEAD
        return _renamed(figures.totals(held), spot), _renamed(shown, spot)

    def shown_memory(self, names: Iterable[str]) -> dict[str, str]:
        """Return the field `memory` of models' hashes: what `show` returns, as JSON; not of stale ones."""
        return {name: json.dumps(self.show(name)) for name in names if name not in self.stale}

    def show(self, model: str) -> dict[str, Any]:
        """Return what people are shown of a model's memory: min, max and effective by device, in bytes."""
        known = self.known.get(model)
        if known is None:
            return {}
        shown: dict[str, Any] = {
            "min": self._shown(known, known.smallest),
            "max": self._shown(known, known.largest),
            "source": known.source,
        }
        if known.spot.place:
            shown["places"] = [spot.place for spot in self._spots[model].whole]
        if known.measured_ms:
            shown["measured_ms"] = known.measured_ms
        if known.contexts:
            shown["contexts"] = list(known.contexts)
        if known.took is not None:
            shown["effective"] = self._shown(known, known.took)
            shown["effective_context"] = known.took_context
            shown["effective_ms"] = known.took_ms
            shown["correction"] = _renamed(known.correction, _shown_at(known.spot))
        if known.peak:
            shown["peak"] = self._shown_peak(model, known)
        if known.untold:
            shown["untold"] = _renamed(known.untold, _shown_at(known.spot))
        if known.wanted:
            shown["ran_out"] = _renamed(known.wanted, _shown_at(known.spot))
        if known.failure:
            shown["failed"] = known.failure
        return shown

    def _shown_peak(self, model: str, known: Known) -> dict[str, int]:
        """Return the peak by the names that the other figures are shown by."""
        places = {spot.place for spot in self._spots[model].whole} if known.spot.place else set()
        shown: dict[str, int] = {}
        for name, amount in known.peak.items():
            word = ANY_GPU if name in places else name
            shown[word] = max(amount, shown.get(word, 0))
        return shown

    def _shown(self, known: Known, found: Figures) -> dict[str, dict[str, int]]:
        return figures.to_json(figures.renamed(found, _shown_at(known.spot).ledger_name))

    def _with_memory(self, spec: ModelSpec) -> ModelSpec:
        both = self._both(spec.name)
        if both is None:
            return spec
        whole, other = both
        spots = self._spots[spec.name]
        places = [
            Place(spot.place, self._least(spec.name, whole, spot), self._growth(spec.name, whole, spot))
            for spot in spots.whole
        ]
        return replace(
            spec,
            needs=self._least(spec.name, other, spots.other),
            grows=self._growth(spec.name, other, spots.other),
            measured=other.source == "measured",
            awaited=self.worker_lives and spec.name in self._to_measure,
            places=tuple(places),
        )

    def _least(self, model: str, known: Known, spot: Spot) -> dict[str, int]:
        return self._corrected(model, known, known.smallest, spot)

    def _growth(self, model: str, known: Known, spot: Spot) -> dict[str, int]:
        least, most = (self._corrected(model, known, f, spot) for f in (known.smallest, known.largest))
        grows = {name: amount - least.get(name, 0) for name, amount in most.items()}
        return {name: amount for name, amount in grows.items() if amount > 0}

    def _corrected(self, model: str, known: Known, found: Figures, spot: Spot) -> dict[str, int]:
        """Return what figures of a model say for this spot by the ledger's devices, with the correction."""
        here = replace(spot, names=dict(zip(known.spot.names, spot.names.values(), strict=False)))
        amounts, _ = self.amounts(model, found, here, untold=known.untold)
        for name, amount in _renamed(known.correction, here).items():
            amounts[name] = max(0, amounts.get(name, 0) + amount)
        for name, amount in _renamed(known.wanted, here).items():
            amounts[name] = max(amount, amounts.get(name, 0))
        return amounts


def _renamed(amounts: Mapping[str, int], spot: Spot) -> dict[str, int]:
    renamed: dict[str, int] = {}
    for name, amount in amounts.items():
        ledger_name = spot.ledger_name(name)
        renamed[ledger_name] = renamed.get(ledger_name, 0) + amount
    return renamed


def _shown_at(spot: Spot) -> Spot:
    """Return the spot for people: which device a model is whole on is not said, as figures are for any."""
    if not spot.place:
        return spot
    return replace(spot, names={e: ANY_GPU if own == spot.place else own for e, own in spot.names.items()})


def _as_mapped(found: Figures) -> Figures:
    """Return figures whose weights on the host are pages of their file."""
    host = found.get(HOST)
    return found if host is None else {**found, HOST: replace(host, mapped=host.model)}
