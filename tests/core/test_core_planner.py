"""The planner by itself: the smallest set, whose room is whose, and that order never matters."""

import random
from dataclasses import replace

from core_herd import Herd, spec
from hypothesis import given
from hypothesis import strategies as st

from llamastead.shared.words import EndClass, WaitReason
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core.planner import (
    SLOT,
    Candidate,
    Going,
    Hold,
    MakeRoom,
    Need,
    Refuse,
    Snapshot,
    Start,
    plan,
    reserve,
)
from llamastead.supervisor.core.reasons import RefuseReason, Verdict
from llamastead.supervisor.core.state import Demand

NOW = 100.0


def idle(name: str, used: float, spared: Verdict | None = None, **frees: int) -> Candidate:
    """Return a candidate named like its model, last used then."""
    return Candidate(name, name, {SLOT: 1, **frees}, spared, (2, used, True, name, name), ready_at=used)


def need(model: str = "n", overdue_at: float = 1000.0, **amounts: int) -> Need:
    """Return an entry that needs a slot and so much."""
    return Need(model, {SLOT: 1, **amounts}, overdue_at, 30.0)


def test_room_at_once_starts() -> None:
    """A slot and enough bytes are free: start; a device without a limit never stands in the way."""
    assert plan(Snapshot(NOW, {SLOT: 1, "gpu": 5}, {SLOT: 2, "gpu": 9}), need(gpu=5, other=10**12)) == Start()


def test_the_smallest_set_wins_over_the_oldest() -> None:
    """Short of 8: one newer instance of 8 goes, not two older ones of 4."""
    seen = Snapshot(
        NOW,
        {SLOT: 3, "gpu": 0},
        {"gpu": 16},
        (),
        (idle("a", 1, gpu=4), idle("b", 2, gpu=4), idle("c", 3, gpu=8)),
    )
    assert plan(seen, need(gpu=8)) == MakeRoom(stops=("c",))


def test_of_equal_sets_the_least_recently_used_goes() -> None:
    """Short of 8 where any two of three will do: the two oldest."""
    seen = Snapshot(
        NOW,
        {SLOT: 3, "gpu": 0},
        {"gpu": 12},
        (),
        (idle("c", 3, gpu=4), idle("b", 2, gpu=4), idle("a", 1, gpu=4)),
    )
    assert plan(seen, need(gpu=8)) == MakeRoom(stops=("a", "b"))


def test_only_what_frees_a_short_device_goes() -> None:
    """Short on one device: the oldest holds the other one and stays."""
    seen = Snapshot(
        NOW, {SLOT: 3, "g0": 0, "g1": 0}, {"g0": 4, "g1": 4}, (), (idle("a", 1, g1=4), idle("b", 2, g0=4))
    )
    assert plan(seen, need(g0=4)) == MakeRoom(stops=("b",))


def test_what_is_going_already_is_counted_once() -> None:
    """One goes for nobody: the first entry takes it, the second needs a victim of its own."""
    seen = Snapshot(NOW, {SLOT: 0}, {SLOT: 2}, (Going("x", {SLOT: 1}, None),), (idle("a", 1),))
    first = plan(seen, need("m"))
    assert first == MakeRoom(takes=("x",))
    assert plan(reserve(seen, need("m"), first), need("n")) == MakeRoom(stops=("a",))


def test_an_entry_that_found_room_gives_its_victims_back() -> None:
    """A slot is free though one goes for the entry: it starts, and the next entry gets what goes."""
    seen = Snapshot(NOW, {SLOT: 1}, {SLOT: 2}, (Going("x", {SLOT: 1}, "m"),))
    first = plan(seen, need("m"))
    assert first == Start()
    assert plan(reserve(seen, need("m"), first), need("n")) == MakeRoom(takes=("x",))


def test_a_later_entry_starts_only_if_it_needs_nothing_that_is_kept() -> None:
    """The first waits for bytes of one device: a small model there waits behind it, one on the other
    device starts.
    """
    free = {SLOT: 4, "g0": 4, "g1": 4}
    busy = idle("a", 1, Verdict.BUSY, g0=8)
    seen = Snapshot(NOW, free, {"g0": 12, "g1": 4}, (), (busy,))
    first = plan(seen, need("m", g0=10))
    assert isinstance(first, Hold)
    left = reserve(seen, need("m", g0=10), first)
    behind = plan(left, need("n", g0=2))
    assert isinstance(behind, Hold)
    assert behind.wait.reason is WaitReason.BEHIND
    assert plan(left, need("n", g1=2)) == Start()


def test_an_entry_that_only_a_person_can_help_keeps_nothing() -> None:
    """The first needs what a pinned one holds: it waits, and a small model behind it starts."""
    seen = Snapshot(NOW, {SLOT: 4, "g0": 4}, {"g0": 12}, (), (idle("a", 1, Verdict.PINNED, g0=8),))
    first = plan(seen, need("m", g0=10))
    assert first == Hold(replace(first.wait, reason=WaitReason.PINNED), reserves=False)
    assert plan(reserve(seen, need("m", g0=10), first), need("n", g0=2)) == Start()


def test_too_big_for_the_device_is_refused_with_the_numbers() -> None:
    """A model needs more than a device has: refused with what is missing, and nobody goes for it."""
    seen = Snapshot(NOW, {SLOT: 0, "g0": 0}, {SLOT: 1, "g0": 8}, (), (idle("a", 1, g0=8),))
    assert plan(seen, need(g0=10)) == Refuse(RefuseReason.TOO_BIG, {"g0": 2})


def test_past_max_wait_idle_ones_still_go_first_then_those_longest_there() -> None:
    """Two of three must go, one is idle: it is stopped, and of the busy ones the longest resident is
    drained.
    """
    busy = [replace(idle(n, 0, Verdict.BUSY, g=4), ready_at=at) for n, at in (("b", 9.0), ("c", 5.0))]
    seen = Snapshot(NOW, {SLOT: 0, "g": 0}, {SLOT: 3, "g": 12}, (), (*busy, idle("a", 90, g=4)))
    assert plan(seen, need(overdue_at=NOW, g=8)) == MakeRoom(stops=("a",), drains=("c",))
    assert isinstance(plan(seen, need(overdue_at=NOW + 1, g=8)), Hold)


candidates = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 6), st.integers(0, 6), st.sampled_from([None, None, *Verdict])
    ),
    max_size=9,
)


@given(candidates, st.integers(-2, 2), st.integers(0, 12), st.integers(0, 12), st.booleans(), st.integers())
def test_any_order_of_the_same_snapshot_gives_the_same_minimal_plan(
    drawn: list[tuple[int, int, int, Verdict | None]], slots: int, g0: int, g1: int, overdue: bool, seed: int
) -> None:
    """Shuffle random snapshots: the plan is the same; its victims were free to go, suffice, and none is
    superfluous.
    """
    some = [idle(f"i{k}", float(age), spared, g0=a, g1=b) for k, (age, a, b, spared) in enumerate(drawn)]
    capacity = {SLOT: 20, "g0": 60, "g1": 60}
    free = {SLOT: slots, "g0": g0 - 6, "g1": g1 - 6}
    asked = need(overdue_at=0.0 if overdue else 1e9, g0=4, g1=4)
    decided = plan(Snapshot(NOW, free, capacity, (), tuple(some)), asked)
    random.Random(seed).shuffle(some)
    assert plan(Snapshot(NOW, free, capacity, (), tuple(some)), asked) == decided
    if isinstance(decided, MakeRoom):
        gone = [c for c in some if c.instance in decided.victims]
        assert all(c.spared is None or (overdue and c.spared is Verdict.BUSY) for c in gone)
        keys = (SLOT, "g0", "g1")
        assert all(free[k] + sum(c.frees[k] for c in gone) >= asked.amounts[k] for k in keys)
        for spare in gone:
            rest = [c for c in gone if c is not spare]
            assert any(free[k] + sum(c.frees[k] for c in rest) < asked.amounts[k] for k in keys)


def test_c12_a_slow_stop_is_counted_and_no_second_model_is_evicted() -> None:
    """Eight models of 1 fill a device, a ninth comes, its victim stops slowly: one goes, and no more at
    later looks.
    """
    herd = Herd(*(spec(n, needs={"g": 1}) for n in "abcdefghi"), models_max=0, capacity={"g": 8})
    for name in "abcdefgh":
        herd.ask(name)
        herd.serve(name)
    actions = herd.ask("i", at=50.0)
    assert [x for x in actions if isinstance(x, act.TryStop)] == [act.TryStop("h-1-1", EndClass.EVICTED, "i")]
    herd.do(ev.StopGranted("h-1-1"))
    for second in range(51, 56):
        assert herd.see(at=float(second)) == ()
    assert herd.exit("h-1-1")[-1] == act.Start("h-1-9", "i", "rev-i", needs={"g": 1})


def test_every_wait_is_explained_with_its_position() -> None:
    """Two entries behind a busy one: the queue tells position, age, reason and when it drains."""
    from llamastead.supervisor.core.explain import explain

    herd = Herd("a", "b", "c", models_max=1)
    herd.ask("a")
    herd.serve("a")
    herd.lease("a", 2)
    herd.ask("b", at=10.0, tickets=3)
    herd.ask("c", at=12.0)
    first, second = explain(herd.state, 28.0)
    assert (first.position, first.model, first.tickets, first.age, first.until) == (1, "b", 3, 18.0, 40.0)
    assert first.text == "waits for a, in use, drains in 12 s"
    assert (second.position, second.reason) == (2, WaitReason.BEHIND)


def test_a_decision_names_the_requests_it_was_taken_for() -> None:
    """An entry with two known requests takes an idle victim: the recorded decision carries their ids."""
    herd = Herd("a", "b", models_max=1)
    herd.ask("a")
    herd.serve("a")
    herd.waiting["b"] = Demand(20.0, 3, requests=("req-1", "req-2"))
    actions = herd.see(at=20.0)
    (decided,) = (action for action in actions if isinstance(action, act.Decide))
    assert (decided.model, decided.requests) == ("b", ("req-1", "req-2"))
