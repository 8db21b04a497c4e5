"""What persons order: each command is answered at once, as the real router words it, and nothing ordered
is lost.
"""

from core_herd import Herd, spec

from llamastead.shared.errors import ApiError
from llamastead.shared.words import EndClass, InstanceState, WaitReason
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core.orders import preload_problem
from llamastead.supervisor.core.state import Claims

S = InstanceState
RUNNING = ApiError(400, "model is already running")
NOT_RUNNING = ApiError(400, "model is not running")


def loaded(*models: str, **policy: int) -> Herd:
    """Return a herd with these models loaded, idle, and `x` and `y` unloaded."""
    herd = Herd(*models, "x", "y", **policy)
    for model in models:
        herd.ask(model)
        herd.serve(model)
    return herd


def test_a_load_is_answered_at_once_and_an_unknown_or_running_model_refused() -> None:
    """Order loads of an unloaded, an unknown, a loading and a loaded model: ok, 404, 400, 400."""
    herd = Herd("a")
    assert herd.do(ev.LoadOrdered("a", "1")) == (act.Answer("1"), act.Start("h-1-1", "a", "rev-a"))
    assert herd.do(ev.LoadOrdered("nobody", "2")) == (act.Answer("2", ApiError(404, "model is not found")),)
    assert herd.do(ev.LoadOrdered("a", "3")) == (act.Answer("3", RUNNING),)
    herd.serve("a", at=1.0)
    assert herd.do(ev.LoadOrdered("a", "4")) == (act.Answer("4", RUNNING),)


def test_loads_queue_like_any_demand_instead_of_failing() -> None:
    """All slots are busy: an ordered load is accepted, waits its turn by arrival, and is made when there
    is room.
    """
    herd = loaded("a", models_max=1)
    herd.lease("a", 1)
    assert herd.do(ev.LoadOrdered("x", "1"), at=5.0) == (act.Answer("1"), act.Want(herd.of("a").id))
    assert herd.do(ev.LoadOrdered("x", "2"), at=6.0) == (act.Answer("2"),)
    herd.ask("y", at=7.0)
    assert herd.why("x").startswith("waits for a, in use")
    assert herd.state.waits["y"].reason is WaitReason.BEHIND
    herd.lease("a", 0)
    assert herd.of("a").leaving is not None
    assert herd.of("a").leaving.for_model == "x"


def test_a_load_ordered_right_after_an_unload_waits_until_the_old_one_is_gone() -> None:
    """Unload, then load at once: both are accepted, and the load starts after the exit."""
    herd = loaded("a", models_max=1)
    a = herd.of("a").id
    assert herd.do(ev.UnloadOrdered("a", "1")) == (act.Answer("1"), act.TryStop(a, EndClass.STOPPED))
    assert herd.do(ev.LoadOrdered("a", "2")) == (act.Answer("2"),)
    assert herd.state.waits["a"].reason is WaitReason.LEAVING
    herd.do(ev.StopGranted(a))
    assert herd.state.waits["a"].reason is WaitReason.LEAVING
    assert herd.exit(a)[-1] == act.Start("h-1-2", "a", "rev-a")


def test_a_queued_load_can_be_taken_back_and_takes_no_ticket_with_it() -> None:
    """A queued load is unloaded: the order is gone, others' tickets for the model go on waiting."""
    herd = loaded("a", models_max=1)
    herd.lease("a", 1)
    herd.ask("x", at=1.0)
    herd.do(ev.LoadOrdered("x", "1"), at=2.0)
    assert herd.do(ev.UnloadOrdered("x", "2")) == (act.Answer("2"),)
    assert herd.state.orders == {}
    assert herd.state.demands["x"].tickets == 1
    assert herd.do(ev.UnloadOrdered("x", "3")) == (act.Answer("3", NOT_RUNNING),)


def test_unload_of_what_is_not_there_is_refused() -> None:
    """Unload an unloaded, an unknown model, and an instance that is not current: 400 each, and nothing
    happens.
    """
    herd = loaded("a")
    assert herd.do(ev.UnloadOrdered("x", "1")) == (act.Answer("1", NOT_RUNNING),)
    assert herd.do(ev.UnloadOrdered("nobody", "2")) == (act.Answer("2", ApiError(400, "model is not found")),)
    assert herd.do(ev.UnloadOrdered("a", "3", instance="h-0-9")) == (act.Answer("3", NOT_RUNNING),)
    assert herd.of("a").leaving is None


def test_unload_of_a_busy_model_answers_at_once_and_drains() -> None:
    """A busy model is unloaded: answered, drained, stopped at its last lease, class stopped, never
    undrained.
    """
    herd = loaded("a")
    a = herd.of("a").id
    herd.lease("a", 2)
    assert herd.do(ev.UnloadOrdered("a", "1")) == (act.Answer("1"), act.TryDrain(a, None, ordered=True))
    herd.do(ev.Drained(a, 2))
    assert herd.see() == ()
    herd.claims[a] = Claims(0, herd.t)
    assert herd.see() == (act.TryStop(a, EndClass.STOPPED),)
    herd.do(ev.StopGranted(a))
    assert herd.exit(a)[0] == act.Ended(a, "a", S.STOPPED, EndClass.STOPPED, "stopped: as asked", None)


def test_unload_by_force_cuts() -> None:
    """A busy model is unloaded by force: ended now; and a stop under way is made one."""
    herd = loaded("a")
    a = herd.of("a").id
    herd.lease("a", 2)
    assert herd.do(ev.UnloadOrdered("a", "1", force=True)) == (
        act.Answer("1"),
        act.ForceStop(a, EndClass.STOPPED),
    )
    other = loaded("a")
    other.do(ev.UnloadOrdered("a", "1"))
    other.do(ev.StopGranted(a))
    assert other.do(ev.UnloadOrdered("a", "2")) == (act.Answer("2"),)
    assert other.do(ev.UnloadOrdered("a", "3", force=True)) == (
        act.Answer("3"),
        act.ForceStop(a, EndClass.STOPPED),
    )


def test_an_idle_victim_that_a_person_unloads_turns_busy_and_is_drained() -> None:
    """The stop of an ordered unload is refused: it is not given up, but drained."""
    herd = loaded("a")
    a = herd.of("a").id
    herd.do(ev.UnloadOrdered("a", "1"))
    assert herd.do(ev.StopRefused(a, 1)) == (act.TryDrain(a, None, ordered=True),)


def test_an_unload_during_a_load_settles_those_who_wait_for_it() -> None:
    """A model with tickets is unloaded while it loads: they are told why instead of loading it again at
    once.
    """
    herd = Herd("a")
    herd.ask("a", at=0.0)
    actions = herd.do(ev.UnloadOrdered("a", "1"), at=1.0)
    assert actions[:2] == (act.Answer("1"), act.AbortLoad("h-1-1", EndClass.STOPPED))
    assert isinstance(actions[2], act.FailTickets)
    assert (actions[2].error.status, actions[2].error.fields["reason"]) == (503, "unloaded")
    herd.waiting.clear()
    assert [type(x) for x in herd.exit("h-1-1")] == [act.Ended]


def test_a_persons_order_overrides_a_back_off() -> None:
    """A doomed model is in its back-off: a request is refused, an ordered load is tried."""
    herd = Herd("a")
    herd.do(ev.LoadOrdered("a", "1"))
    herd.exit("h-1-1", end_class=EndClass.FAILED_TO_START, reason="no such file", doomed=True)
    assert herd.state.orders == {}
    assert herd.do(ev.LoadOrdered("a", "2"))[-1] == act.Start("h-1-2", "a", "rev-a")


def test_preload_at_the_start_of_a_new_herd_only() -> None:
    """Recovery ends: load-on-startup models that are not there are loaded; after a take-over they are not."""
    specs = [spec("a", load_on_startup=True), spec("b", load_on_startup=True), spec("c")]
    herd = Herd(*specs, recover=False)
    herd.do(ev.Adopted("old-1", "b", "rev-b", S.READY, 0.0, 1.0, 1.0))
    assert herd.do(ev.RecoveryDone(preload=True)) == (act.Start("h-1-1", "a", "rev-a"),)
    other = Herd(*specs, recover=False)
    assert other.do(ev.RecoveryDone(preload=False)) == ()


def test_loads_ordered_of_an_earlier_leader_are_done_by_the_next() -> None:
    """Recovery ends with three ordered loads, of a living, a missing and an unknown model: one is started."""
    herd = Herd("a", "b", recover=False)
    herd.do(ev.Adopted("old-1", "b", "rev-b", S.READY, 0.0, 1.0, 1.0))
    done = ev.RecoveryDone(preload=False, ordered=("a", "b", "nobody"))
    assert herd.do(done) == (act.Start("h-1-1", "a", "rev-a"),)


def test_c178_an_order_read_again_that_was_done_before_is_no_mistake() -> None:
    """Read a load of a running model and an unload of a stopped one again, after a take-over: both are
    done.
    """
    herd = loaded("a")
    assert herd.do(ev.LoadOrdered("a", "1", again=True)) == (act.Answer("1"),)
    assert herd.do(ev.UnloadOrdered("x", "2", again=True)) == (act.Answer("2"),)


def test_too_many_to_preload_is_said_at_start() -> None:
    """Three load-on-startup models and two slots: a problem that names both numbers; none without a limit."""
    models = {name: spec(name, load_on_startup=True) for name in "abc"}
    assert preload_problem(2, models) == "number of models to load on startup (3) exceeds models_max (2)"
    assert preload_problem(3, models) is None
    assert preload_problem(0, models) is None


def test_a_model_that_left_the_registry_drains_and_its_tickets_fail() -> None:
    """A busy, an idle, a loading and a waiting model vanish: drained, stopped, aborted, 404."""
    herd = loaded("a", "b", models_max=3)
    herd.lease("a", 1)
    herd.do(ev.LoadOrdered("x", "1"))
    herd.ask("y")
    names = {model: i.id for i in herd.state.instances.values() for model in [i.model]}
    actions = herd.change(a=None, b=None, x=None, y=None)
    assert set(actions[1:]) == {
        act.TryDrain(names["a"], None, ordered=True),
        act.TryStop(names["b"], EndClass.STOPPED),
        act.AbortLoad(names["x"], EndClass.STOPPED),
    }
    assert isinstance(actions[0], act.FailTickets)
    assert (actions[0].model, actions[0].error.status) == ("y", 404)


def test_a_changed_model_runs_on_and_starts_anew_only_with_its_next_load() -> None:
    """A loaded model's revision changes: nothing happens, and its next start has the new one."""
    herd = loaded("a", models_max=1)
    assert herd.change(a=spec("a", revision="two")) == ()
    assert herd.of("a").revision == "rev-a"
    herd.do(ev.UnloadOrdered("a", "1"))
    herd.do(ev.StopGranted("h-1-1"))
    herd.ask("a")
    assert herd.exit("h-1-1")[-1] == act.Start("h-1-2", "a", "two")


def test_outdated_instances_start_anew_by_order_and_others_stay() -> None:
    """Change an idle, a busy, a loading and a sleeping model beside one that stays; order the restart."""
    herd = loaded("a", "b", "c", "z", models_max=0)
    herd.lease("b", 1)
    herd.ask("x")
    herd.do(ev.FellAsleep(herd.of("c").id))
    herd.do(ev.Slept(herd.of("c").id))
    ids = {instance.model: instance.id for instance in herd.state.instances.values()}
    assert herd.change(**{model: spec(model, revision="two") for model in "abcx"}) == ()
    assert set(herd.do(ev.RestartOrdered())) >= {
        act.TryStop(ids["a"], EndClass.STOPPED),
        act.TryDrain(ids["b"], None, ordered=True),
        act.AbortLoad(ids["x"], EndClass.STOPPED),
    }
    assert sorted(herd.state.orders) == ["a", "b", "x"]
    assert herd.of("z").leaving is None
    herd.do(ev.StopGranted(ids["a"]))
    assert herd.exit(ids["a"])[-1] == act.Start("h-1-6", "a", "two")
    assert herd.exit(ids["x"])[-1] == act.Start("h-1-7", "x", "two")
    assert herd.state.demands["x"].tickets == 1
    assert herd.do(ev.RestartOrdered()) == ()


def test_shutting_down_stops_all_and_starts_none() -> None:
    """The herd closes with a busy, an idle and a loading model and a ticket: all go, the ticket is told,
    no start.
    """
    herd = loaded("a", "b", models_max=3)
    herd.lease("a", 1)
    herd.ask("x", "y")
    actions = herd.do(ev.ShutDown())
    assert [type(x) for x in actions] == [
        act.AbortLoad,
        act.FailTickets,
        act.FailTickets,
        act.TryDrain,
        act.TryStop,
    ]
    herd.waiting.clear()
    herd.do(ev.StopGranted(herd.of("b").id))
    assert [type(x) for x in herd.exit(herd.of("b").id)] == [act.Ended]
    answer = herd.do(ev.LoadOrdered("x", "1"))[0]
    assert isinstance(answer, act.Answer)
    assert answer.error is not None
    assert answer.error.status == 503
