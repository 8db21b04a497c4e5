"""The herd stops: nothing new begins, idle instances go, busy ones when they are done or when forced."""

from llamastead.shared.words import EndClass
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from tests.core.core_herd import Herd


def failed(actions: tuple[act.Action, ...]) -> dict[str, int]:
    """Return model → HTTP status of the tickets that these actions fail."""
    return {action.model: action.error.status for action in actions if isinstance(action, act.FailTickets)}


def test_shutting_down_stops_the_idle_and_drains_the_busy():
    """Load two models, hold one, shut down: one is stopped, the other closed to newcomers."""
    herd = Herd("a", "b")
    herd.ask("a", "b")
    herd.serve("a")
    herd.serve("b")
    herd.lease("b", 1)
    actions = herd.do(ev.ShutDown(), at=10.0)
    assert act.TryStop(herd.of("a").id, EndClass.STOPPED) in actions
    assert any(isinstance(action, act.TryDrain) and action.instance == herd.of("b").id for action in actions)


def test_shutting_down_by_force_cuts_the_busy():
    """Hold a model, shut down by force: its instance is ended at once."""
    herd = Herd("a")
    herd.ask("a")
    herd.serve("a")
    herd.lease("a", 1)
    assert act.ForceStop(herd.of("a").id, EndClass.STOPPED) in herd.do(ev.ShutDown(force=True), at=1.0)


def test_a_load_is_aborted_and_its_tickets_are_told():
    """Start a load, shut down: the load ends, its tickets fail with 503, nothing counts as a failure."""
    herd = Herd("a")
    herd.ask("a")
    own = herd.of("a").id
    actions = herd.do(ev.ShutDown())
    assert act.AbortLoad(own, EndClass.STOPPED) in actions
    assert failed(actions) == {"a": 503}
    ended = next(action for action in herd.exit(own) if isinstance(action, act.Ended))
    assert ended.end_class is EndClass.STOPPED


def test_nothing_new_begins():
    """Shut down an idle herd, ask for a model and order another: both are refused with 503, none starts."""
    herd = Herd("a", "b")
    herd.do(ev.ShutDown())
    asked = herd.ask("a")
    ordered = herd.do(ev.LoadOrdered("b", "command-1"))
    assert failed(asked) == {"a": 503}
    refusals = [action.error for action in ordered if isinstance(action, act.Answer)]
    assert [error.status for error in refusals if error] == [503]
    assert not any(isinstance(action, act.Start) for action in (*asked, *ordered))
    assert herd.state.instances == {}
