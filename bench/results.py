"""What was measured, figure by figure, and what it must reach."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

Values = Mapping[str, float]
GENERATOR = "load generator"
"""Ends the names of the figures that tell how busy the load generator was, in percent of a core."""


@dataclass(frozen=True)
class Gate:
    """What a figure must reach: `text` for people, `holds` of the medians by subject."""

    text: str
    holds: Callable[[Values], bool]


def at_most(share: float) -> Gate:
    """Llamastead's figure is at most this share of the router's."""
    return Gate(f"≤ {share:.2g} × router", lambda v: v["llamastead"] <= share * v["router"])


def at_least(share: float) -> Gate:
    """Llamastead's figure is at least this multiple of the router's."""
    return Gate(f"≥ {share:.2g} × router", lambda v: v["llamastead"] >= share * v["router"])


def at_most_above(extra: float, unit: str) -> Gate:
    """Llamastead's figure is at most the router's and this much."""
    return Gate(f"≤ router + {extra:g} {unit}", lambda v: v["llamastead"] <= v["router"] + extra)


def below(limit: float, unit: str) -> Gate:
    """Llamastead's figure is at most a limit of its own."""
    return Gate(f"≤ {limit:g} {unit}".rstrip(), lambda v: v["llamastead"] <= limit)


@dataclass
class Figure:
    """One row: the values each subject gave, round by round."""

    name: str
    unit: str
    gate: Gate | None = None
    values: dict[str, list[float]] = field(default_factory=dict)

    @property
    def medians(self) -> dict[str, float]:
        """Return each subject's median."""
        return {subject: median(values) for subject, values in self.values.items()}

    @property
    def ratio(self) -> float | None:
        """Return Llamastead's figure over the router's."""
        found = self.medians
        if "llamastead" not in found or not found.get("router"):
            return None
        return found["llamastead"] / found["router"]

    @property
    def holds(self) -> bool | None:
        """Tell whether the gate is met; None without a gate or without the values it compares."""
        try:
            return self.gate.holds(self.medians) if self.gate else None
        except KeyError:
            return None


@dataclass
class Results:
    """All figures in the order in which they were first noted, and remarks for the reader."""

    figures: dict[str, Figure] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    cut: Counter[str] = field(default_factory=Counter)
    """Streams that ended before their end, by subject."""

    def note(self, name: str, unit: str, subject: str, value: float, gate: Gate | None = None) -> None:
        """Add one value of a figure; a gate once given stays."""
        figure = self.figures.setdefault(name, Figure(name, unit))
        figure.gate = gate or figure.gate
        figure.values.setdefault(subject, []).append(value)

    @property
    def failed(self) -> list[Figure]:
        """Return the figures whose gate is not met."""
        return [figure for figure in self.figures.values() if figure.holds is False]
