"""Replays traces against policies and says what came of it: figures per run, verdicts over all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from bench.policy.bound import bounded
from bench.policy.others import Router, StrictFifo
from bench.policy.ours import Ours
from bench.policy.traces import PING_PONG
from bench.policy.world import Herd, Trace
from bench.policy.world import Policy as Scheduler
from llamastead.supervisor.core.state import Policy

# The limits that bounds are made of, whatever the policy under test is given.
PROMISED = Policy()


@dataclass(frozen=True)
class Worst:
    """The entry of the queue that came nearest to its bound, or passed it; seconds."""

    model: str
    wait: float
    bound: float

    @property
    def kept(self) -> bool:
        """Whether it was served in time."""
        return self.wait <= self.bound


@dataclass(frozen=True)
class Outcome:
    """One trace under one policy. Waits are seconds from a request's arrival until a ready engine got it.

    `swaps` counts engines stopped to make room, `per_second` answers until the last one; `worst` is known of
    ours only.
    """

    trace: str
    policy: str
    requests: int
    loads: int
    swaps: int
    p50: float
    p95: float
    longest: float
    per_second: float
    worst: Worst | None = None


@dataclass(frozen=True)
class Verdict:
    """Something that must hold, and whether it does."""

    text: str
    holds: bool


def ours(herd: Herd) -> Ours:
    """Return our policy with the product's defaults."""
    return Ours(herd, Policy(models_max=herd.trace.models_max))


POLICIES: Mapping[str, Callable[[Herd], Scheduler]] = {
    "strict FIFO": StrictFifo,
    "llama-server": Router,
    "ours": ours,
}


def replay(trace: Trace, name: str, make: Callable[[Herd], Scheduler]) -> Outcome:
    """Run one policy through one trace. Raises BrokenPolicyError."""
    herd = Herd(trace)
    policy = make(herd)
    herd.run(policy)
    waits = sorted(r.admitted - r.arrived for r in herd.requests if r.admitted is not None)
    return Outcome(
        trace.name,
        name,
        len(waits),
        herd.loads,
        herd.swaps,
        _percentile(waits, 0.50),
        _percentile(waits, 0.95),
        waits[-1],
        len(waits) / herd.answered_at,
        _worst(policy) if isinstance(policy, Ours) else None,
    )


def verdicts(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Return what must hold: few swaps where agents alternate, and no wait beyond its bound."""
    by_run = {(outcome.trace, outcome.policy): outcome for outcome in outcomes}
    found = []
    for trace in PING_PONG:
        mine, fifo = by_run.get((trace, "ours")), by_run.get((trace, "strict FIFO"))
        if mine and fifo:
            text = f"{trace}: {mine.swaps} swaps, at most a third of strict FIFO's {fifo.swaps}"
            found.append(Verdict(text, 3 * mine.swaps <= fifo.swaps))
    for outcome in outcomes:
        if outcome.worst:
            worst = outcome.worst
            text = f"{outcome.trace}: {worst.model} waited {worst.wait:.2f} s, at most {worst.bound:.2f} s"
            found.append(Verdict(text, worst.kept))
    return found


def _worst(policy: Ours) -> Worst | None:
    rows = bounded(policy.stays, PROMISED)
    if not rows:
        return None
    worst = max(rows, key=lambda row: row.stay.wait / row.bound)
    return Worst(worst.stay.model, worst.stay.wait, worst.bound)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of all does not exceed."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
