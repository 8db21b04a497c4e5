"""The one planner: given what is free, what is going and what could go, what does one queue entry get?

Asked for new and queued entries alike, in queue order; `reserve` then takes the plan's share out of the
snapshot, so that the next entry plans with what is left. Nothing here changes state or is logged: the step
that commits a plan does that. All amounts are in one vector: instances under the key SLOT, bytes under the
device's name; a key that is missing from what is free has no limit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb, inf

from llamastead.shared.words import WaitReason
from llamastead.supervisor.core.reasons import RefuseReason, Verdict
from llamastead.supervisor.core.state import Wait

SLOT = "slot"
Amounts = Mapping[str, int]

# So many sets are tried for the smallest; beyond that the least recently used are taken until it is enough.
_MOST_SETS = 5_000


@dataclass(frozen=True)
class Candidate:
    """An instance that could make room.

    `spared` is the filter that protects it (None: it may go); `rank` orders candidates that may go,
    `busy_rank` those that would be drained; `held_until` is the end of its minimum residence, which
    started at `ready_at` and is at most half the asking entry's max-wait; `abandoned` says that it loads
    and nobody waits for it any more.
    """

    instance: str
    model: str
    frees: Amounts
    spared: Verdict | None
    rank: tuple[int, float, bool, str, str]
    ready_at: float = 0.0
    residence: float = 0.0
    abandoned: bool = False
    undecided: bool = False

    def held_until(self, max_wait: float) -> float:
        """Return when an entry with this max-wait may have it at the earliest."""
        return self.ready_at + min(self.residence, max_wait / 2)


@dataclass(frozen=True)
class Going:
    """An instance that is on its way out; its room belongs to `owner`, or to the first entry that can use it.

    `sure` False: it drains for its owner, and will be ready again if the owner does without it. `failed`: it
    is what a failed load leaves behind, or a measurement: not one more that went to make room.
    """

    instance: str
    frees: Amounts
    owner: str | None
    sure: bool = True
    failed: bool = False


@dataclass(frozen=True)
class Snapshot:
    """What the entry at hand may plan with. `capacity` is what a device has when everything of ours is gone,
    and `emptied` that as others use it just now; `debt` is what is held beyond what there is, before anything
    was promised to an entry.
    """

    now: float
    free: Amounts
    capacity: Amounts
    going: tuple[Going, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    debt: Amounts = field(default_factory=dict)
    emptied: Amounts = field(default_factory=dict)

    def with_candidate(self, candidate: Candidate) -> "Snapshot":
        """Return it with an instance in place of what was known of that one."""
        others = (c for c in self.candidates if c.instance != candidate.instance)
        return replace(self, candidates=(*others, candidate))


@dataclass(frozen=True)
class Need:
    """A queue entry as the planner sees it.

    `overdue_at` is when busy ones may be drained for it; `evict_more`: its start ran out of memory, so one
    more must go than the figures say; `may_choose` False: its own instance has yet to go, so no victim is
    picked for it yet. `place` is the one device it would be whole on, "" if there is none such; `grows` is
    what it takes beyond `amounts` where there is room.
    """

    model: str
    amounts: Amounts
    overdue_at: float
    max_wait: float
    evict_more: bool = False
    may_choose: bool = True
    place: str = ""
    grows: Amounts = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """There is room now."""


@dataclass(frozen=True)
class MakeRoom:
    """Room comes from `takes` (already going) and from stopping, draining or aborting these."""

    takes: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    drains: tuple[str, ...] = ()
    aborts: tuple[str, ...] = ()

    @property
    def victims(self) -> tuple[str, ...]:
        """Return the instances this plan newly sends away."""
        return self.aborts + self.stops + self.drains


@dataclass(frozen=True)
class Hold:
    """No plan yet, for this reason; `takes` is what already goes for the entry.

    `reserves` says that what is free is kept for it. Not so for one that nothing we may do can help: it
    would block those behind it for nothing.
    """

    wait: Wait
    takes: tuple[str, ...] = ()
    reserves: bool = True


@dataclass(frozen=True)
class Refuse:
    """No plan ever: `short` is what is missing per device beyond all there is."""

    reason: RefuseReason
    short: Amounts = field(default_factory=dict)


Plan = Start | MakeRoom | Hold | Refuse


def choose(snapshot: Snapshot, needs: Sequence[Need]) -> tuple[Need, Plan]:
    """Return which of its alternatives an entry gets, and the plan for that one.

    Those that are whole on one device come before the one that has no place, the last: that is for a model
    which is refused on each of them. Among them the one with room now that has most of it, else the one that
    asks for the fewest to go, else the one that waits for the least.
    """
    *whole, other = needs
    plans = [(need, plan(snapshot, need)) for need in whole]
    able = [each for each in plans if not isinstance(each[1], Refuse)]
    if not able:
        return other, plan(snapshot, other)
    return min(able, key=lambda each: _preference(snapshot, *each))


def _preference(snapshot: Snapshot, need: Need, decided: Plan) -> tuple[tuple[float, ...], str]:
    room = -float(snapshot.free.get(need.place, 0))
    match decided:
        case MakeRoom():
            asked = [c for c in snapshot.candidates if c.instance in decided.victims]
            latest = max((c.ready_at if c.spared else c.rank[1] for c in asked), default=0.0)
            return (1, len(decided.drains), len(asked), latest, room), need.place
        case Hold():
            until = inf if decided.wait.until is None else decided.wait.until
            return (2, not decided.reserves, -len(decided.takes), until, room), need.place
        case _:
            return (0, room, 0, 0, 0), need.place


def plan(snapshot: Snapshot, need: Need) -> Plan:
    """Decide what the entry gets. Pure and total: the same snapshot, in any order, gives the same plan."""
    too_big = _missing(need.amounts, snapshot.capacity)
    if too_big:
        return Refuse(RefuseReason.TOO_BIG, too_big)
    short = _missing(need.amounts, snapshot.free)
    beside = [c for c in snapshot.candidates if c.spared not in _NEVER and _is_beside(c, need)]
    others = bool(beside) or _makes_room(g for g in snapshot.going if _is_beside(g, need))
    more = need.evict_more and others
    if not short and not more:
        return Start()
    takes = _take(snapshot.going, need.model, short, more)
    short = _left(short, takes)
    more = more and not _makes_room(takes)
    names = tuple(g.instance for g in takes)
    if not short and not more:
        return MakeRoom(takes=names)
    if not need.may_choose:
        return Hold(Wait(WaitReason.LEAVING), names, reserves=False)
    never = [c for c in snapshot.candidates if c.spared in _NEVER]
    if _missing(need.amounts, _minus(snapshot.capacity, never)):
        return Hold(_fixed(never), names, reserves=False)
    if any(snapshot.free[key] < -snapshot.debt.get(key, 0) for key in short):
        return Hold(Wait(WaitReason.BEHIND), names)
    near = [c for c in snapshot.candidates if not more or _is_beside(c, need)]
    quiet = [c for c in near if _may_stop(c, need, snapshot.now)]
    chosen = _smallest(sorted(quiet, key=lambda c: c.rank), short, more)
    if chosen is None and need.overdue_at <= snapshot.now:
        busy = [c for c in near if _may_drain(c, need, snapshot.now)]
        ordered = sorted(quiet, key=lambda c: c.rank)
        ordered += sorted(busy, key=lambda c: (not c.undecided, c.ready_at, c.model, c.instance))
        chosen = _smallest(ordered, short, more)
    if chosen is None and _missing(need.amounts, snapshot.emptied):
        # Others use it just now, or a process of ours shows that is gone already: it may pass.
        return Hold(Wait(WaitReason.RELEASING), names, reserves=False)
    if chosen is None:
        return Hold(_why(snapshot, need, short), names)
    return MakeRoom(
        takes=names,
        stops=tuple(c.instance for c in chosen if c.spared is None and not c.abandoned),
        drains=tuple(c.instance for c in chosen if c.spared is not None),
        aborts=tuple(c.instance for c in chosen if c.abandoned),
    )


def reserve(snapshot: Snapshot, need: Need, decided: Plan) -> Snapshot:
    """Return what later entries may plan with: without what this plan uses, takes or counts on."""
    if isinstance(decided, Refuse):
        return snapshot
    if isinstance(decided, Start):
        given_back = tuple(
            replace(g, owner=None) if g.owner == need.model else g
            for g in snapshot.going
            if g.sure or g.owner != need.model
        )
        return replace(snapshot, free=_without(snapshot.free, need.amounts), going=given_back)
    victims = set(decided.victims) if isinstance(decided, MakeRoom) else set()
    mine = {*decided.takes, *victims}
    going = tuple(replace(g, owner=need.model) if g.instance in mine else g for g in snapshot.going)
    going += tuple(
        Going(c.instance, c.frees, need.model) for c in snapshot.candidates if c.instance in victims
    )
    if isinstance(decided, Hold) and not decided.reserves:
        return replace(snapshot, going=going)
    return replace(
        snapshot,
        free=_without(snapshot.free, _left(need.amounts, [g for g in going if g.instance in mine])),
        going=going,
        candidates=tuple(c for c in snapshot.candidates if c.instance not in victims),
    )


def verdict(candidate: Candidate, need: Need, decided: MakeRoom, now: float) -> Verdict:
    """Return what a decision did with a candidate: took it how, or which filter spared it."""
    for how, names in (
        (Verdict.STOP, decided.stops),
        (Verdict.DRAIN, decided.drains),
        (Verdict.ABORT, decided.aborts),
    ):
        if candidate.instance in names:
            return how
    if candidate.spared is not None:
        return candidate.spared
    return Verdict.RESIDENCE if candidate.held_until(need.max_wait) > now else Verdict.NOT_NEEDED


def _is_beside(other: Candidate | Going, need: Need) -> bool:
    """Whether it holds something of the one device the entry would be whole on; always, if there is none."""
    return not need.place or other.frees.get(need.place, 0) > 0


def _may_stop(candidate: Candidate, need: Need, now: float) -> bool:
    return candidate.spared is None and candidate.held_until(need.max_wait) <= now


def _may_drain(candidate: Candidate, need: Need, now: float) -> bool:
    if candidate.undecided:
        return True
    return candidate.spared is Verdict.BUSY and candidate.held_until(need.max_wait) <= now


def _take(going: Sequence[Going], model: str, short: Amounts, more: bool) -> list[Going]:
    """Return what already goes for this entry, and then what goes for nobody, as far as it is needed."""
    taken = [g for g in going if g.owner == model]
    for spare in (g for g in going if g.owner is None):
        left = _left(short, taken)
        if not left and (_makes_room(taken) or not more):
            break
        if (not left and not spare.failed) or any(spare.frees.get(k, 0) for k in left):
            taken.append(spare)
    return taken


def _makes_room(going: Iterable[Going]) -> bool:
    return any(not g.failed for g in going)


def _smallest(ordered: Sequence[Candidate], short: Amounts, more: bool) -> tuple[Candidate, ...] | None:
    """Return the smallest set that frees what is short, the first in order among equals, or None.

    `more` asks for at least one even if nothing is short.
    """
    useful = [c for c in ordered if any(c.frees.get(k, 0) for k in short)] if short else list(ordered)
    if not (short or more) or not useful or _left(short, useful):
        return None
    fewest = max((-(-n // max(c.frees.get(k, 0) for c in useful)) for k, n in short.items()), default=1)
    for size in range(max(1, fewest), len(useful) + 1):
        if comb(len(useful), size) > _MOST_SETS and set(short) != {SLOT}:
            return _greedy(useful, short)
        for chosen in combinations(useful, size):
            if not _left(short, chosen):
                return chosen
    return None


def _greedy(useful: Sequence[Candidate], short: Amounts) -> tuple[Candidate, ...]:
    chosen: list[Candidate] = []
    for candidate in useful:
        if not _left(short, chosen):
            break
        chosen.append(candidate)
    for candidate in reversed(tuple(chosen)):
        rest = [c for c in chosen if c is not candidate]
        if not _left(short, rest):
            chosen = rest
    return tuple(chosen)


_WHY = (
    (Verdict.BUSY, WaitReason.BUSY),
    (Verdict.WANTED, WaitReason.BUSY),
    (Verdict.SETTLING, WaitReason.BUSY),
    (Verdict.LOADING, WaitReason.STARTING_OTHERS),
    (Verdict.DRAINING, WaitReason.VICTIM),
)
_NEVER = frozenset({Verdict.PINNED, Verdict.STOP_FAILED})


def _why(snapshot: Snapshot, need: Need, short: Amounts) -> Wait:
    """Return the one reason: what ends first by itself, else who is in the way, else those before it in
    the queue.
    """
    near = [c for c in snapshot.candidates if not short or any(c.frees.get(k, 0) for k in short)]
    overdue = need.overdue_at <= snapshot.now
    held = [
        (c.held_until(need.max_wait), c.instance)
        for c in near
        if (c.spared is None or (overdue and c.spared is Verdict.BUSY))
        and c.held_until(need.max_wait) > snapshot.now
    ]
    if held:
        until = min(held)[0]
        if not overdue:
            until = min(until, need.overdue_at)
        return Wait(WaitReason.RESIDENCE, tuple(sorted(name for _, name in held)), until)
    for spared, reason in _WHY:
        blockers = tuple(sorted(c.instance for c in near if c.spared is spared))
        if blockers:
            until_drain = need.overdue_at if reason is WaitReason.BUSY and not overdue else None
            return Wait(reason, blockers, until_drain)
    return Wait(WaitReason.BEHIND)


def _fixed(never: Sequence[Candidate]) -> Wait:
    """Return the reason of an entry that waits for room which only a person can make."""
    stuck = tuple(sorted(c.instance for c in never if c.spared is Verdict.STOP_FAILED))
    pinned = tuple(sorted(c.instance for c in never if c.spared is Verdict.PINNED))
    return Wait(WaitReason.STOP_FAILED, stuck) if stuck else Wait(WaitReason.PINNED, pinned)


def _missing(wanted: Amounts, available: Amounts) -> dict[str, int]:
    """Return what is wanted beyond what is available, where there is a limit. Who wants nothing misses
    nothing, even where others have more than may be booked.
    """
    return {k: n - available[k] for k, n in wanted.items() if k in available and n > max(0, available[k])}


def _minus(amounts: Amounts, holders: Iterable[Candidate | Going]) -> dict[str, int]:
    """Return what is left of amounts beside these holders."""
    left = dict(amounts)
    for each in holders:
        _spend(left, each.frees)
    return left


def _without(free: Amounts, used: Amounts) -> dict[str, int]:
    """Return what is free once this is used; below 0 where more is promised than there is."""
    left = dict(free)
    _spend(left, used)
    return left


def _spend(left: dict[str, int], used: Amounts) -> None:
    for key, amount in used.items():
        if key in left:
            left[key] -= amount


def _left(short: Amounts, freed_by: Iterable[Candidate | Going]) -> dict[str, int]:
    """Return what is still short once these are gone."""
    return {key: amount for key, amount in _minus(short, freed_by).items() if amount > 0}
