"""Loads that fail, engines that crash, hang or are told to stop by others, stops that fail."""

from typing import Any

from core_herd import Herd, exited, kinds, ready, spec

from llamastead.shared.words import EndClass, InstanceState
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev

S = InstanceState


def test_c39_a_passing_start_failure_is_tried_once_more() -> None:
    """The first start fails, the second works: nobody hears of it. Two failures are told to all, once."""
    herd = Herd("a", models_max=1)
    herd.ask("a", at=0.0, tickets=2)
    failed: dict[str, Any] = {"end_class": EndClass.FAILED_TO_START, "reason": "driver hiccup", "code": 1}
    assert kinds(herd.exit(herd.of("a").id, at=1.0, **failed)) == [act.Ended, act.Start]
    actions = herd.exit(herd.of("a").id, at=2.0, log=("last line",), **failed)
    assert kinds(actions) == [act.Ended, act.FailTickets]
    told = actions[1]
    assert isinstance(told, act.FailTickets)
    assert told.tickets is None
    assert told.error.status == 500
    assert told.error.message == "model name=a failed to load: driver hiccup"
    assert told.error.fields["log"] == ["last line"]
    herd.waiting.clear()
    assert herd.see() == ()


def test_c42_the_limit_is_on_lack_of_progress() -> None:
    """A load that shows progress every 5 s for 12 minutes goes on; one that stops moving ends after the
    stall timer.
    """
    herd = Herd("a", models_max=1)
    herd.ask("a", at=0.0)
    a = herd.of("a").id
    for turn in range(144):
        herd.do(ev.Moved(a) if turn % 2 else ev.Loading(a, turn / 200), at=5.0 * turn)
        assert herd.last.actions == () or turn * 5 >= 600
    stuck_since = herd.t
    assert herd.do(ev.Loading(a, 142 / 200), at=stuck_since + 60) == ()
    assert herd.last.wake_at == stuck_since + 120
    actions = herd.tick(stuck_since + 120)
    assert actions[0] == act.AbortLoad(
        a, EndClass.FAILED_TO_START, reason="no progress for 120 s (stall-timeout)"
    )
    assert isinstance(actions[1], act.FailTickets)
    assert "stall-timeout" in actions[1].error.message
    ended = herd.exit(a, end_class=EndClass.KILLED, code=-9)[0]
    assert isinstance(ended, act.Ended)
    assert (ended.state, ended.end_class) == (S.FAILED, EndClass.FAILED_TO_START)


def test_c37_a_failed_load_is_tried_again_by_the_next_request() -> None:
    """A stalled load failed its clients: the next request starts the model at once."""
    herd = Herd("a", models_max=1)
    herd.ask("a", at=0.0)
    herd.tick(120.0)
    herd.waiting.clear()
    herd.exit(herd.of("a").id, at=121.0)
    assert kinds(herd.ask("a", at=122.0)) == [act.Start]


def test_c45_a_lost_ready_line_is_made_good_by_the_next_look() -> None:
    """The ready line is told late and twice, or only as sleeping: the instance is ready once, tickets
    granted once.
    """
    herd = Herd("a", models_max=1)
    herd.ask("a", at=0.0)
    a = herd.of("a").id
    assert herd.do(ev.BecameReady(a), at=5.0) == (act.Grant(a, "a"),)
    assert herd.do(ev.BecameReady(a), at=10.0) == ()
    other = Herd("a", models_max=1)
    other.ask("a", at=0.0)
    assert other.do(ev.FellAsleep(other.of("a").id), at=9.0) == (act.Grant(other.of("a").id, "a"),)
    assert other.of("a").state is S.READY


def test_c34_c36_a_crash_in_service_is_reloaded_once_by_those_who_come() -> None:
    """A ready model dies and twenty requests come: one load, at once, and nobody is failed."""
    herd = Herd("a", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    herd.lease("a", 1)
    actions = herd.exit(a, at=10.0, end_class=EndClass.KILLED, reason="killed by signal 9", code=-9)
    assert actions == (act.Ended(a, "a", S.FAILED, EndClass.KILLED, "killed by signal 9", -9),)
    assert kinds(herd.ask("a", at=10.1, tickets=20)) == [act.Start]
    assert herd.see() == ()


def test_a_model_that_crashes_again_and_again_backs_off() -> None:
    """Three crashes soon after ready: the first reload is immediate, later ones wait, ever longer, and say
    so.
    """
    herd = Herd("a", models_max=1)
    waits = []
    for _ in range(4):
        herd.ask("a")
        if herd.state.instance_of("a") is None:
            until = herd.state.waits["a"].until
            assert until is not None
            assert herd.last.wake_at == until
            waits.append(until - herd.t)
            assert kinds(herd.tick(until)) == [act.Start]
        herd.serve("a", at=herd.t + 1)
        herd.exit(herd.of("a").id, at=herd.t + 1, end_class=EndClass.CRASHED, reason="abort")
    assert 1.0 <= waits[0] <= 1.2
    assert 2.0 <= waits[1] <= 2.4
    assert len(waits) == 2


def test_a_doomed_start_fails_fast_and_is_remembered_until_its_model_changes() -> None:
    """The model's file is missing: no retry, the next request is refused at once, a new revision is tried
    at once.
    """
    herd = Herd("a", models_max=1)
    herd.ask("a", at=0.0)
    failed: dict[str, Any] = {"end_class": EndClass.FAILED_TO_START, "reason": "no such file", "doomed": True}
    assert kinds(herd.exit(herd.of("a").id, at=1.0, **failed)) == [act.Ended, act.FailTickets]
    herd.waiting.clear()
    actions = herd.ask("a", at=2.0)
    assert kinds(actions) == [act.FailTickets]
    assert isinstance(actions[0], act.FailTickets)
    assert actions[0].error.retry_after in {4, 5}
    assert actions[0].error.fields["reason"] == "doomed"
    herd.waiting.clear()
    herd.see()
    herd.change(a=spec("a", revision="other"))
    assert kinds(herd.ask("a", at=2.1)) == [act.Start]


def test_nobody_is_sent_away_for_a_model_whose_files_are_missing() -> None:
    """B's file is gone, A takes the only place: B is refused at once and A stays; where there is room the
    start itself says why.
    """
    herd = Herd("a", spec("b", missing="/models/b.gguf"), models_max=1)
    ready(herd, "a", used=1.0)
    refused, shown = herd.ask("b", at=20.0)
    assert isinstance(refused, act.FailTickets)
    assert shown == act.ShowFailed("b", "/models/b.gguf not found")
    assert refused.error.status == 500
    assert refused.error.message == "model name=b failed to load: /models/b.gguf not found"
    assert herd.of("a").state is S.READY
    assert herd.of("a").leaving is None
    alone = Herd(spec("b", missing="/models/b.gguf"), models_max=1)
    assert kinds(alone.ask("b", at=1.0)) == [act.Start]


def test_a_load_that_ran_out_of_memory_evicts_one_more_and_tries_once() -> None:
    """Two slots, A idle, B's start runs out of memory: A goes, B starts again; the second time all are
    told.
    """
    herd = Herd("a", "b", models_max=2)
    ready(herd, "a")
    a = herd.of("a").id
    herd.ask("b", at=10.0)
    memory: dict[str, Any] = {"end_class": EndClass.OUT_OF_MEMORY, "reason": "no room for the cache"}
    actions = herd.exit(herd.of("b").id, at=11.0, **memory)
    assert actions[-1] == act.TryStop(a, EndClass.EVICTED, "b")
    herd.do(ev.StopGranted(a))
    assert kinds(herd.exit(a)) == [act.Ended, act.Start]
    actions = herd.exit(herd.of("b").id, at=12.0, **memory)
    assert kinds(actions) == [act.Ended, act.FailTickets]
    assert isinstance(actions[1], act.FailTickets)
    assert actions[1].error.status == 503
    assert actions[1].error.fields["reason"] == "out_of_memory"


def test_out_of_memory_with_nobody_else_there_is_told_at_once() -> None:
    """The only model runs out of memory: nothing can be evicted, so the same start is not repeated."""
    herd = Herd("a", models_max=2)
    herd.ask("a", at=0.0)
    assert kinds(herd.exit(herd.of("a").id, end_class=EndClass.OUT_OF_MEMORY)) == [act.Ended, act.FailTickets]


def test_c25_an_unresponsive_instance_is_ended_as_crashed() -> None:
    """A accepts and never answers: it is ended by force with the reason, B is not touched, A's next
    request reloads.
    """
    herd = Herd("a", "b", models_max=2)
    ready(herd, "a", "b")
    a, before = herd.of("a").id, herd.of("b")
    herd.lease("a", 5)
    assert herd.do(ev.Unresponsive(a, "no answer to 3 probes"), at=10.0) == (
        act.ForceStop(a, EndClass.CRASHED, "no answer to 3 probes"),
    )
    ended = herd.exit(a, end_class=EndClass.KILLED, code=-9)[0]
    assert ended == act.Ended(a, "a", S.FAILED, EndClass.CRASHED, "no answer to 3 probes", -9)
    assert herd.of("b") == before
    assert kinds(herd.ask("a", at=11.0)) == [act.Start]


def test_an_instance_told_to_stop_from_outside_finishes_and_its_model_is_loaded_again() -> None:
    """Somebody stops A, which is busy: it drains uncut, who comes now waits for a fresh load of A."""
    herd = Herd("a", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    herd.lease("a", 1)
    assert herd.do(ev.TurnsAway(a), at=10.0) == (act.TryDrain(a, None, True),)
    assert herd.do(ev.Drained(a, 1)) == ()
    assert herd.ask("a", at=11.0) == ()
    assert herd.do(ev.TurnsAway(a)) == ()
    actions = herd.exit(a, end_class=EndClass.CRASHED, code=0)
    assert kinds(actions) == [act.Ended, act.Start]


def test_an_idle_instance_told_to_stop_from_outside_is_stopped_once() -> None:
    """Somebody stops A, which is idle: it ends as killed, with the reason."""
    herd = Herd("a")
    ready(herd, "a")
    a = herd.of("a").id
    assert herd.do(ev.TurnsAway(a), at=10.0) == (act.TryStop(a, EndClass.KILLED, None),)
    herd.do(ev.StopGranted(a))
    assert herd.do(ev.TurnsAway(a)) == ()
    ended = herd.exit(a, code=0)[0]
    assert ended == act.Ended(a, "a", S.FAILED, EndClass.KILLED, "told to stop from outside", 0)


def test_a_crash_that_is_seen_first_as_a_refused_connection_is_told_as_one() -> None:
    """A gateway is refused by A, which is just crashing: the end has the class and reason of the crash."""
    herd = Herd("a")
    ready(herd, "a")
    a = herd.of("a").id
    herd.do(ev.TurnsAway(a), at=10.0)
    herd.do(ev.StopGranted(a))
    ended = herd.do(ev.Exited(a, EndClass.CRASHED, "segmentation fault", -11))[0]
    assert ended == act.Ended(a, "a", S.FAILED, EndClass.CRASHED, "segmentation fault", -11)


def test_c58_a_stop_that_failed_keeps_its_place_and_nobody_else_waits_for_it() -> None:
    """Two slots, A's stop for C fails: A counts on, C takes the other idle one, A loads after its late
    end.
    """
    herd = Herd("a", "b", "c", models_max=2)
    ready(herd, "a", used=1.0)
    ready(herd, "b", used=2.0)
    a, b = herd.of("a").id, herd.of("b").id
    herd.ask("c", at=10.0)
    herd.do(ev.StopGranted(a))
    actions = herd.do(ev.StopFailed(a), at=30.0)
    assert actions[-1] == act.TryStop(b, EndClass.EVICTED, "c")
    assert herd.of("a").state is S.STOP_FAILED
    herd.ask("a", at=31.0)
    assert herd.why("a") == "waits for a, which could not be stopped"
    herd.do(ev.StopGranted(b))
    assert herd.exit(b)[-1] == act.Start(herd.of("c").id, "c", "rev-c")
    assert kinds(herd.exit(a, at=90.0, code=-9)) == [act.Ended, act.Start]


def test_news_of_an_instance_that_is_gone_changes_nothing() -> None:
    """Late outcomes and lines of an unknown instance: the state is the same and nothing is done."""
    herd = Herd("a")
    before = herd.state
    for event in (ev.BecameReady("x"), ev.StopGranted("x"), exited("x"), ev.Granted("x", 3), ev.Moved("x")):
        assert herd.do(event) == ()
        assert herd.state == before


def test_an_engine_that_outlives_its_holder_is_stop_failed():
    """C58: report a ready instance as beyond KILL, as when its holder died: it counts, others wait."""
    herd = Herd("a", "b", models_max=1)
    herd.ask("a")
    herd.serve("a")
    own = herd.of("a").id
    herd.do(ev.StopFailed(own), at=30.0)
    herd.ask("b")
    assert herd.state.instances[own].state is InstanceState.STOP_FAILED
    assert list(herd.state.instances) == [own]
