"""Histories of scheduling as steps of the core; see tests/histories.md for what each id stands for."""

import pytest
from core_herd import Herd, kinds, ready, spec

from llamastead.shared.words import EndClass, InstanceState, WaitReason
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core.reasons import Verdict
from llamastead.supervisor.core.state import Claims, Demand, Leaving, Wait

S = InstanceState


def test_the_worked_example_of_a_busy_an_idle_and_a_waiting_model() -> None:
    """Two slots, A busy (used at 100), B idle (used at 90), C asked for: B goes, then C starts; A is not
    touched.
    """
    herd = Herd("a", "b", "c", models_max=2)
    ready(herd, "b", at=60.0, used=90.0)
    ready(herd, "a", at=60.0, used=100.0)
    a, b = herd.of("a").id, herd.of("b").id
    herd.t = 100.0
    herd.lease("a", 1)
    before = herd.state

    actions = herd.ask("c", at=110.0)
    weighed = (act.Weighed(b, "b", Verdict.STOP), act.Weighed(a, "a", Verdict.BUSY))
    assert actions == (act.Decide("c", weighed), act.TryStop(b, EndClass.EVICTED, "c"))
    assert herd.last.wake_at == 110.0 + 600.0
    assert herd.state.waits == {"c": Wait(WaitReason.VICTIM, (b,))}
    assert herd.state.instances[a] == before.instances[a]

    assert herd.do(ev.StopGranted(b), at=110.1) == ()
    assert herd.of("b").state is S.STOPPING
    assert herd.state.instances[a] == before.instances[a]

    actions = herd.exit(b, at=110.2)
    c = herd.of("c")
    assert actions == (
        act.Ended(b, "b", S.STOPPED, EndClass.EVICTED, "stopped: made room for c", None),
        act.Start(c.id, "c", "rev-c"),
    )
    assert herd.last.wake_at == 110.2 + 120.0
    assert [i.model for i in herd.state.instances.values()] == ["a", "c"]


def test_the_one_used_longest_ago_goes_when_both_are_idle() -> None:
    """The example with A idle too and B used more recently: the victim is A."""
    herd = Herd("a", "b", "c", models_max=2)
    ready(herd, "a", at=0.0, used=90.0)
    ready(herd, "b", at=0.0, used=100.0)
    assert herd.ask("c", at=110.0)[-1] == act.TryStop(herd.of("a").id, EndClass.EVICTED, "c")


def test_c01_r3_two_entries_never_share_a_victim() -> None:
    """One slot, A idle, B and C asked for in one look: A goes for B, C waits its turn and then gets B's
    place.
    """
    herd = Herd("a", "b", "c", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    actions = herd.ask("b", "c", at=10.0)
    assert [x for x in actions if isinstance(x, act.TryStop)] == [act.TryStop(a, EndClass.EVICTED, "b")]
    assert herd.state.waits["c"].reason is WaitReason.BEHIND
    herd.do(ev.StopGranted(a))
    assert herd.exit(a)[-1] == act.Start(herd.of("b").id, "b", "rev-b")
    herd.serve("b", at=11.0)
    b = herd.of("b").id
    assert herd.state.waits["c"] == Wait(WaitReason.RESIDENCE, (b,), 13.0)
    assert herd.tick(13.0)[-1] == act.TryStop(b, EndClass.EVICTED, "c")
    herd.do(ev.StopGranted(b))
    assert herd.exit(b)[-1] == act.Start(herd.of("c").id, "c", "rev-c")


def test_r3_two_entries_two_victims() -> None:
    """Two slots, both idle, two entries at once: each gets a victim of its own, and no third goes."""
    herd = Herd("a", "b", "c", "d", models_max=2)
    ready(herd, "a", "b")
    stops = [x for x in herd.ask("c", "d", at=10.0) if isinstance(x, act.TryStop)]
    assert {(x.instance, x.for_model) for x in stops} == {(herd.of("a").id, "c"), (herd.of("b").id, "d")}
    assert herd.see() == ()


def test_c03_r2_a_loading_model_counts_but_is_never_the_victim() -> None:
    """One slot, A loading with a client: B waits, A answers, and only then A is asked to stop, not killed."""
    herd = Herd("a", "b", models_max=1)
    assert kinds(herd.ask("a", at=0.0)) == [act.Start]
    a = herd.of("a").id
    assert herd.ask("b", at=1.0) == ()
    herd.do(ev.Started(a))
    herd.do(ev.Loading(a, 0.5), at=10.0)
    assert herd.tick(40.0) == ()
    assert herd.why("b") == "waits for a to finish loading"
    assert herd.do(ev.BecameReady(a), at=50.0) == (act.Grant(a, "a"),)
    del herd.waiting["a"]
    herd.do(ev.Granted(a, 1))
    herd.claims[a] = Claims(1, 50.0)
    assert herd.see() == ()
    herd.claims[a] = Claims(0, 75.0)
    assert herd.see(at=75.0)[-1] == act.TryStop(a, EndClass.EVICTED, "b")


def test_c06_every_load_serves_those_it_was_made_for() -> None:
    """One slot, endless demand for A and B: each load's tickets become leases before the other may have
    the slot.
    """
    herd = Herd("a", "b", models_max=1, min_residence=0.0)
    herd.ask("a", "b", at=0.0)
    for turn in range(6):
        model = "ab"[turn % 2]
        own = herd.of(model).id
        assert kinds(herd.do(ev.BecameReady(own), at=herd.t + 1)) == [act.Grant]
        del herd.waiting[model]
        herd.do(ev.Granted(own, 1))
        herd.claims[own] = Claims(1, herd.t)
        assert herd.see() == ()
        herd.claims[own] = Claims(0, herd.t + 1)
        assert herd.see(at=herd.t + 1)[-1] == act.TryStop(own, EndClass.EVICTED, "ba"[turn % 2])
        herd.ask(model)
        herd.do(ev.StopGranted(own))
        assert kinds(herd.exit(own)) == [act.Ended, act.Start]


def test_c07_a_ticket_enrolled_as_the_model_turned_ready_is_granted() -> None:
    """A ready instance with a ticket that missed the edge: the grant runs again, once per look, until it
    is served.
    """
    herd = Herd("a", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    assert herd.ask("a", at=1.0) == (act.Grant(a, "a"),)
    assert herd.see() == ()
    herd.do(ev.Granted(a, 1))
    assert herd.see() == (act.Grant(a, "a"),)
    del herd.waiting["a"]
    herd.do(ev.Granted(a, 0))
    assert herd.see() == ()


def test_c13_a_streaming_model_is_drained_late_and_stopped_only_when_it_is_done() -> None:
    """One slot, A streams: B waits for max-wait, then A is drained; A is stopped at its last byte and no
    sooner.
    """
    herd = Herd("a", "b", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    herd.lease("a", 1)
    assert herd.ask("b", at=5.0) == (act.Want(a),)
    assert herd.why("b") == "waits for a, in use, drains in 30 s"
    assert herd.last.wake_at == 35.0
    assert herd.tick(34.9) == ()
    assert herd.tick(35.0)[-1] == act.TryDrain(a, "b")
    herd.do(ev.Drained(a, 1))
    assert herd.of("a").state is S.DRAINING
    assert herd.tick(500.0) == ()
    herd.claims[a] = Claims(0, 500.0)
    assert herd.see() == (act.TryStop(a, EndClass.EVICTED, "b"),)


def test_who_holds_what_an_entry_waits_for_is_told_so_once() -> None:
    """B waits for A's room: A's holders are told, not again at each look, but again when there is a new one
    and when B's successor waits after A was free.
    """
    herd = Herd("a", "b", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    herd.lease("a", 1)
    assert herd.ask("b", at=5.0) == (act.Want(a),)
    assert herd.tick(6.0) == ()
    herd.claims[a] = Claims(1, 6.0)
    assert herd.see() == ()
    herd.claims[a] = Claims(2, 7.0)
    assert herd.see() == (act.Want(a),)
    herd.claims[a] = Claims(1, 8.0)
    assert herd.see() == ()


def test_r1_a_victim_that_became_busy_is_given_up_and_the_entry_planned_anew() -> None:
    """A is chosen and turns busy before its stop: it is let go and B, idle too, goes instead."""
    herd = Herd("a", "b", "c", models_max=2)
    ready(herd, "a", used=1.0)
    ready(herd, "b", used=2.0)
    a, b = herd.of("a").id, herd.of("b").id
    assert herd.ask("c", at=10.0)[-1] == act.TryStop(a, EndClass.EVICTED, "c")
    assert herd.do(ev.StopRefused(a, 1))[-1] == act.TryStop(b, EndClass.EVICTED, "c")
    assert herd.of("a").leaving is None
    assert herd.of("a").leases == 1


def test_a_victim_whose_entry_was_cancelled_goes_back_to_the_planner() -> None:
    """C's client leaves while A stops for it: A's place goes to D, which takes no victim of its own."""
    herd = Herd("a", "b", "c", "d", models_max=2)
    ready(herd, "a", "b")
    a = herd.of("a").id
    herd.ask("c", at=10.0)
    herd.do(ev.StopGranted(a))
    herd.give_back("c")
    assert herd.ask("d", at=11.0) == ()
    assert herd.state.waits["d"] == Wait(WaitReason.VICTIM, (a,))
    assert herd.exit(a)[-1] == act.Start(herd.of("d").id, "d", "rev-d")


def test_a_drain_is_undone_when_its_entry_ends_first() -> None:
    """A drains for B, whose client leaves: A serves again, its own tickets first."""
    herd = Herd("a", "b", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    herd.lease("a", 1)
    herd.ask("b", at=0.0)
    herd.tick(30.0)
    herd.do(ev.Drained(a, 1))
    herd.ask("a")
    assert herd.state.waits["a"].reason is WaitReason.LEAVING
    assert herd.give_back("b", at=31.0) == (act.TryUndrain(a),)
    herd.waiting.clear()
    herd.do(ev.Undrained(a, 1))
    assert herd.of("a").state is S.READY
    assert herd.of("a").leases == 2
    assert herd.see() == ()


def test_a_ticket_enrolled_after_the_drain_began_protects_nothing() -> None:
    """A drains for B and gets a new ticket: it is stopped all the same once its last lease is gone, then
    reloaded.
    """
    herd = Herd("a", "b", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    herd.lease("a", 1)
    herd.ask("b", at=0.0)
    herd.tick(30.0)
    herd.do(ev.Drained(a, 1))
    herd.ask("a", at=31.0)
    herd.claims[a] = Claims(0, 40.0)
    assert herd.see(at=40.0) == (act.TryStop(a, EndClass.EVICTED, "b"),)
    herd.do(ev.StopGranted(a))
    assert herd.exit(a)[-1] == act.Start(herd.of("b").id, "b", "rev-b")


def test_r8_a_hot_model_starves_nobody() -> None:
    """One slot, A never idle: B is served within max-wait and what A had admitted before its drain."""
    herd = Herd("a", "b", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    herd.ask("b", at=0.0)
    for second in range(1, 31):
        herd.claims[a] = Claims(3, float(second))
        herd.see(at=float(second))
    assert herd.last.actions[-1] == act.TryDrain(a, "b")


def test_c16_the_idle_clock_starts_when_the_last_claim_ends() -> None:
    """Unload after 10 s, a 30 s answer, a follow-up 3 s later: the model is there for it and ends 10 s
    after it.
    """
    herd = Herd(spec("a", unload_after=10.0))
    ready(herd, "a")
    a = herd.of("a").id
    herd.t = 1.0
    herd.lease("a", 1)
    assert herd.last.wake_at is None
    assert herd.tick(31.0) == ()
    herd.lease("a", 0)
    assert herd.last.wake_at == 41.0
    herd.t = 34.0
    herd.lease("a", 1)
    assert herd.tick(45.0) == ()
    herd.lease("a", 0)
    assert herd.tick(54.9) == ()
    assert herd.tick(55.0) == (act.TryStop(a, EndClass.IDLE),)
    herd.do(ev.StopGranted(a))
    assert herd.exit(a) == (
        act.Ended(a, "a", S.STOPPED, EndClass.IDLE, "stopped: nobody used it for its unload-after", None),
    )


def test_c79_reads_hold_an_instance_and_are_no_use_of_it() -> None:
    """A model is read every 5 s and never used: its idle end comes on time, between two reads."""
    herd = Herd(spec("a", unload_after=20.0))
    ready(herd, "a")
    a = herd.of("a").id
    for second in (5.0, 10.0, 15.0):
        herd.claims[a] = Claims(1, 0.0)
        herd.see(at=second)
        herd.claims[a] = Claims(0, 0.0)
        assert herd.see() == ()
        assert herd.last.wake_at == 20.0
    assert herd.tick(20.0) == (act.TryStop(a, EndClass.IDLE),)


def test_c18_pinned_models_are_never_victims() -> None:
    """Two pinned models fill both slots: a third waits and says so, neither is touched, not even past
    max-wait.
    """
    herd = Herd(spec("p", pinned=True), spec("q", pinned=True), "c", models_max=2)
    ready(herd, "p", "q")
    assert herd.ask("c", at=10.0) == ()
    assert herd.why("c") == "waits for room; all that could make it is pinned (p, q)"
    herd.lease("p", 1)
    assert herd.tick(100.0) == ()


def test_c21_minimum_residence_keeps_a_model_for_several_turns() -> None:
    """One slot, loads of 10 s, B waits: A, ready at 10, may not go before 15, however short its requests
    are.
    """
    herd = Herd("a", "b", models_max=1)
    herd.ask("a", "b", at=0.0)
    herd.serve("a", at=10.0)
    a = herd.of("a").id
    assert herd.state.waits["b"] == Wait(WaitReason.RESIDENCE, (a,), 15.0)
    assert herd.last.wake_at == 15.0
    assert herd.tick(14.9) == ()
    assert herd.tick(15.0)[-1] == act.TryStop(a, EndClass.EVICTED, "b")


def test_minimum_residence_is_at_most_half_of_max_wait() -> None:
    """A load of 100 s with max-wait 30: the instance stays 15 s, not 50."""
    herd = Herd("a", "b", models_max=1, stall_timeout=1000.0)
    herd.ask("a", "b", at=0.0)
    herd.serve("a", at=100.0)
    assert herd.state.waits["b"].until == 115.0


def test_an_instance_without_tickets_may_go_at_once() -> None:
    """A was loaded by hand and served nobody: it has no minimum residence."""
    herd = Herd("a", "b", models_max=1)
    herd.do(ev.LoadOrdered("a", "c1"), at=0.0)
    herd.serve("a", at=10.0)
    assert herd.ask("b", at=10.0)[-1] == act.TryStop(herd.of("a").id, EndClass.EVICTED, "b")


def test_of_equal_age_the_never_used_one_goes_first_and_a_sleeper_before_any() -> None:
    """A used at 5, B ready at 5 and never used, C asleep: victims are C, then B, then A."""
    herd = Herd("a", "b", "c", "x", "y", "z", models_max=3)
    ready(herd, "c", at=0.0, used=50.0)
    herd.ask("a", at=0.0)
    herd.serve("a", at=5.0, used=5.0)
    herd.do(ev.LoadOrdered("b", "c1"), at=0.0)
    herd.serve("b", at=5.0)
    c = herd.of("c").id
    assert herd.do(ev.FellAsleep(c), at=60.0) == (act.TrySleep(c),)
    herd.do(ev.Slept(c))
    stops = [x.instance for x in herd.ask("x", "y", "z", at=60.0) if isinstance(x, act.TryStop)]
    assert stops == [c, herd.of("b").id, herd.of("a").id]


def test_c27_a_load_nobody_waits_for_is_aborted_when_another_waits() -> None:
    """One slot, A loads and its client leaves; B comes: A is aborted without back-off, B starts when A is
    gone.
    """
    herd = Herd("a", "b", models_max=1)
    herd.ask("a", at=0.0)
    a = herd.of("a").id
    assert herd.give_back("a", at=3.0) == ()
    assert herd.ask("b", at=4.0)[-1] == act.AbortLoad(a, EndClass.ABANDONED, "b")
    actions = herd.exit(a, at=4.1)
    assert actions[0] == act.Ended(
        a, "a", S.STOPPED, EndClass.ABANDONED, "stopped: made room for b before it was loaded", None
    )
    assert kinds(actions) == [act.Ended, act.Start]
    assert herd.state.troubles == {}


def test_a_load_nobody_waits_for_goes_on_when_nobody_else_waits() -> None:
    """A's client leaves and nobody else waits, or there is another slot: the load is left alone."""
    herd = Herd("a", "b", models_max=2)
    herd.ask("a", at=0.0)
    assert herd.give_back("a", at=1.0) == ()
    assert kinds(herd.ask("b", at=2.0)) == [act.Start]


def test_c33_unload_during_a_load_aborts_it_and_is_no_failure() -> None:
    """A loads by order and is unloaded: answered at once, aborted, ends as stopped; B starts in its place."""
    herd = Herd("a", "b", models_max=1)
    herd.do(ev.LoadOrdered("a", "c1"), at=0.0)
    a = herd.of("a").id
    herd.ask("b", at=1.0)
    actions = herd.do(ev.UnloadOrdered("a", "c2"), at=5.0)
    assert actions == (act.Answer("c2"), act.AbortLoad(a, EndClass.STOPPED))
    actions = herd.exit(a, at=5.1, end_class=EndClass.KILLED, code=-15)
    assert actions[0] == act.Ended(a, "a", S.STOPPED, EndClass.STOPPED, "stopped", -15)
    assert kinds(actions) == [act.Ended, act.Start]


@pytest.mark.parametrize("moment", ["asked", "draining", "stopping", "stop_failed", "gone"])
def test_r6_a_request_at_any_point_of_a_stop_is_settled(moment: str) -> None:
    """A is unloaded; a request for A comes at one point of its stop: A is loaded again once it is gone."""
    herd = Herd("a", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    if moment == "draining":
        herd.lease("a", 1)
    herd.do(ev.UnloadOrdered("a", "c1"), at=10.0)
    if moment == "asked":
        herd.ask("a")
    if moment == "draining":
        herd.do(ev.Drained(a, 1))
        herd.ask("a")
        herd.claims[a] = Claims(0, 11.0)
        assert herd.see() == (act.TryStop(a, EndClass.STOPPED),)
    herd.do(ev.StopGranted(a))
    if moment in {"stopping", "stop_failed"}:
        herd.ask("a")
    if moment == "stop_failed":
        herd.do(ev.StopFailed(a))
    actions = herd.exit(a)
    if moment == "gone":
        actions = herd.ask("a")
    assert actions[-1] == act.Start(herd.of("a").id, "a", "rev-a")


def test_priority_is_a_head_start_and_age_wins_in_the_end() -> None:
    """One slot: a later entry of a higher class goes first, unless the other has waited longer than the
    head start.
    """
    herd = Herd("a", "low", spec("high", priority=1), models_max=1, max_wait=1000.0)
    ready(herd, "a")
    herd.lease("a", 1)
    herd.ask("low", at=0.0)
    herd.ask("high", at=20.0)
    herd.lease("a", 0)
    assert herd.of("a").leaving == Leaving(EndClass.EVICTED, "high")
    late = Herd("a", "low", spec("high", priority=1), models_max=1, max_wait=1000.0)
    ready(late, "a")
    late.lease("a", 1)
    late.ask("low", at=0.0)
    late.ask("high", at=40.0)
    late.lease("a", 0)
    assert late.of("a").leaving == Leaving(EndClass.EVICTED, "low")


def test_expired_tickets_end_with_the_limit_named_and_the_others_stay() -> None:
    """Two of three tickets are past the queue time-out: those two are failed by name, the third goes on
    waiting.
    """
    herd = Herd("a", "b", models_max=1)
    ready(herd, "a")
    herd.lease("a", 1)
    herd.waiting["b"] = Demand(0.0, 3, ("t1", "t2"))
    actions = herd.see(at=600.0)
    assert isinstance(actions[0], act.FailTickets)
    assert actions[0].tickets == ("t1", "t2")
    assert actions[0].error.status == 503
    assert actions[0].error.fields["limit"] == "queue-timeout"
    assert herd.state.demands["b"].tickets == 1


def test_before_recovery_is_done_nothing_starts_and_nobody_is_refused() -> None:
    """Demands for a known and an unknown model during recovery: they wait; a found instance keeps its
    slot.
    """
    herd = Herd("a", "b", recover=False, models_max=1)
    herd.do(ev.Found("old-1", "a", "rev-a"))
    assert herd.ask("b", "nobody", at=1.0) == ()
    assert herd.state.waits["b"].reason is WaitReason.RECOVERING
    adopted = ev.Adopted("old-1", "a", "rev-a", S.READY, 0.0, 0.5, 0.5, leases=1)
    assert herd.do(adopted, at=1.5) == (act.Grant("old-1", "a"),)
    herd.claims["old-1"] = Claims(1)
    actions = herd.do(ev.RecoveryDone(), at=2.0)
    assert kinds(actions) == [act.FailTickets, act.Want]
    assert herd.why("b").startswith("waits for a")
    assert herd.exit("old-1", end_class=EndClass.LOST)[-1] == act.Start("h-1-1", "b", "rev-b")


def test_an_adopted_drain_that_nobody_needs_any_more_is_undone() -> None:
    """A draining instance is adopted: one drained for a forgotten entry serves again, an ordered one goes
    on.
    """
    for ordered, first in ((False, act.TryUndrain("old-1")), (True, act.TryStop("old-1", EndClass.STOPPED))):
        herd = Herd("a", recover=False)
        herd.do(ev.Adopted("old-1", "a", "rev-a", S.DRAINING, 0.0, 0.5, 0.5, ordered=ordered))
        assert herd.do(ev.RecoveryDone(preload=False)) == (first,)


def test_c58_an_instance_that_hangs_while_it_stops_is_hurried() -> None:
    """Report a stopping instance as silent: its stop is forced, what it is stopped for stays as it was."""
    herd = Herd("a", "b", models_max=1)
    herd.ask("a")
    herd.serve("a")
    a = herd.of("a").id
    herd.lease("a", 0)
    herd.ask("b", at=100.0)
    herd.do(ev.StopGranted(a), at=100.0)
    silent = ev.Unresponsive(a, "did not answer")
    assert herd.do(silent, at=101.0) == (act.ForceStop(a, EndClass.EVICTED, "did not answer"),)
    assert herd.of("a").state is S.STOPPING
