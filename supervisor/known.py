"""Figures of one model: what it takes at two contexts, and what that says of those between."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from llamastead.shared import figures
from llamastead.shared.estimate import FIT_CONTEXT
from llamastead.shared.figures import Figures
from llamastead.supervisor.placement import Spot

_CONTEXT_STEP = 256
Key = tuple[str, str]
"""Names a measurement: file identity and preset."""


@dataclass(frozen=True)
class Known:
    """What a model started at `spot` takes at its smallest and at its largest context, by the engine's
    names of devices.

    `contexts` are those two in tokens, None where nothing but the file's size is known. `took` is what a real
    load took at `took_context`. `key` is the measurement's name in Redis: file identity and preset. `failure`
    says why the last of so many `failures` of a measurement told nothing. `peak` is the most, by the ledger's
    devices, that a process was seen to use. Times are milliseconds since the epoch, 0 for never. `wanted` is
    what a load that ran out of memory wanted at least, in bytes per device; `untold` the most that a process
    was seen to use of a device beyond what its engine had told; `adapters` what no measurement tells of, and
    is in the figures all the same.
    """

    key: Key
    smallest: Figures
    largest: Figures
    contexts: tuple[int, int] | None
    source: str
    spot: Spot = field(default_factory=Spot)
    took: Figures | None = None
    took_context: int = 0
    wanted: Mapping[str, int] = field(default_factory=dict)
    failure: str = ""
    failures: int = 0
    measured_ms: int = 0
    took_ms: int = 0
    peak: Mapping[str, int] = field(default_factory=dict)
    untold: Mapping[str, int] = field(default_factory=dict)
    adapters: Figures = field(default_factory=dict)

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
        )

    def context(self, share: float) -> int:
        """Return the context that takes `share` of the growth: decided here, not left to the engine.

        Of a file that is known by its size only no context has a price, so it gets the smallest usual one.
        """
        if self.contexts is None:
            return FIT_CONTEXT
        low, high = self.contexts
        if share >= 1 or low >= high:
            return high
        return max(_CONTEXT_STEP, int(low + (high - low) * share) // _CONTEXT_STEP * _CONTEXT_STEP)

    @property
    def needs_no_fitting(self) -> bool:
        """Whether the engine has nothing to work out, for which it would load the vocabulary once more: it is
        measured, and nowhere but on the host.
        """
        return self.source == "measured" and not self.spot.names
