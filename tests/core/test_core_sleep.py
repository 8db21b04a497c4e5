"""Sleepers: woken through admission, and only asleep for all when nobody holds them."""

from core_herd import Herd, ready, spec

from llamastead.shared.words import EndClass, InstanceState
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core import ledger
from llamastead.supervisor.core.state import Claims, Device

S = InstanceState


def test_a_sleeper_is_woken_through_admission() -> None:
    """A sleeps and is asked for: WAKING with its tickets granted; with nobody left to wake it, it sleeps
    on.
    """
    herd = Herd("a", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    herd.do(ev.FellAsleep(a), at=10.0)
    herd.do(ev.Slept(a))
    assert herd.do(ev.FellAsleep(a), at=15.0) == ()
    assert herd.ask("a", at=20.0) == (act.Wake(a, "a"),)
    assert herd.of("a").state is S.WAKING
    herd.waiting.clear()
    herd.do(ev.Granted(a, 1))
    herd.claims[a] = Claims(1, 20.0)
    herd.see()
    assert herd.do(ev.FellAsleep(a)) == ()
    herd.do(ev.Loading(a, 0.0), at=20.1)
    assert herd.do(ev.BecameReady(a), at=21.0) == (act.Grant(a, "a"),)

    other = Herd("a", models_max=1)
    ready(other, "a")
    other.do(ev.FellAsleep(a), at=10.0)
    other.do(ev.Slept(a))
    other.ask("a", at=20.0)
    other.waiting.clear()
    assert other.do(ev.Granted(a, 0)) == (act.TrySleep(a),)
    assert other.of("a").state is S.SLEEPING


def test_a_sleeper_whose_wakers_have_left_sleeps_on() -> None:
    """A is woken for one who leaves before its engine notices; B falls asleep while a read holds it: both are
    asleep as soon as nobody holds them, without another word of their engines.
    """
    herd = Herd("a", "b")
    ready(herd, "a")
    ready(herd, "b")
    a, b = herd.of("a").id, herd.of("b").id
    herd.do(ev.FellAsleep(a), at=10.0)
    herd.do(ev.Slept(a))
    herd.ask("a", at=20.0)
    herd.waiting.clear()
    herd.claims[a] = herd.claims[b] = Claims(1)
    herd.do(ev.Granted(a, 1))
    herd.see()
    assert herd.do(ev.FellAsleep(b), at=21.0) == ()
    assert (herd.of("a").state, herd.of("b").state) == (S.WAKING, S.READY)
    herd.claims.clear()
    assert set(herd.see(at=22.0)) == {act.TrySleep(a), act.TrySleep(b)}
    herd.do(ev.Slept(a))
    herd.do(ev.SleepRefused(b, 1))
    assert (herd.of("a").state, herd.of("b").state) == (S.SLEEPING, S.READY)
    assert herd.see(at=23.0) == (act.TrySleep(b),)


def test_a_sleeper_that_is_wanted_is_nobodys_victim() -> None:
    """A sleeps, lacks the bytes to wake and is asked for; B needs a slot: B takes the idle C, not the
    wanted A.
    """
    specs = [spec("a", needs={"g": 4}), spec("d", needs={"g": 4}), "b", "c"]
    herd = Herd(*specs, models_max=3, capacity={"g": 4})
    ready(herd, "a", used=1.0)
    a = herd.of("a").id
    herd.do(ev.FellAsleep(a), at=5.0)
    herd.do(ev.Slept(a))
    herd.read(seen={a: {}})
    ready(herd, "d", at=6.0, used=6.0)
    ready(herd, "c", at=7.0, used=7.0)
    herd.lease("d", 1)
    assert herd.ask("a", at=20.0) == (act.Want(herd.of("d").id),)
    assert herd.why("a").startswith("waits for d, in use")
    assert herd.ask("b", at=21.0)[-1] == act.TryStop(herd.of("c").id, EndClass.EVICTED, "b")


def asleep_as_others_come(herd: Herd) -> str:
    """Have A asleep when others take all of its device, and return its instance."""
    herd.read(g=Device(4, 4))
    ready(herd, "a", used=1.0)
    a = herd.of("a").id
    herd.do(ev.FellAsleep(a), at=5.0)
    herd.do(ev.Slept(a))
    herd.read(seen={a: {"g": 0}}, g=Device(4, 0))
    return a


def test_a_sleeper_whose_entry_is_refused_makes_room_at_once() -> None:
    """B waits for the one slot, which A sleeps in; A is asked for, too, and is too big to wake by now since
    others use its device for good: with that refusal A goes for B.
    """
    herd = Herd(spec("a", needs={"g": 4}), "b", models_max=1)
    a = asleep_as_others_come(herd)
    assert herd.ask("a", "b", at=20.0) == ()
    herd.t += ledger.RELEASE_AWAITED_S
    refused, _, stop = herd.read(seen={a: {"g": 0}})
    assert isinstance(refused, act.FailTickets)
    assert (refused.model, stop) == ("a", act.TryStop(a, EndClass.EVICTED, "b"))
    assert herd.tick(herd.t) == ()


def test_a_sleeper_whose_entry_is_refused_goes_at_once_if_it_was_idle_for_long() -> None:
    """A sleeps past its unload-after while a request waits for its bytes: when that is refused, it goes."""
    herd = Herd(spec("a", needs={"g": 4}, unload_after=10.0))
    a = asleep_as_others_come(herd)
    assert herd.ask("a", at=9.0) == ()
    herd.t += ledger.RELEASE_AWAITED_S
    refused, stop = herd.read(seen={a: {"g": 0}})
    assert isinstance(refused, act.FailTickets)
    assert stop == act.TryStop(a, EndClass.IDLE, None)


def test_sleep_is_refused_while_somebody_holds_the_instance() -> None:
    """The engine fell asleep as a request came: it stays ready for all, and the request wakes it."""
    herd = Herd("a", models_max=1)
    ready(herd, "a")
    a = herd.of("a").id
    herd.do(ev.FellAsleep(a), at=10.0)
    herd.do(ev.SleepRefused(a, 1))
    assert herd.of("a").state is S.READY
    herd.do(ev.Loading(a, 0.0), at=10.1)
    assert herd.of("a").state is S.WAKING
    assert herd.do(ev.BecameReady(a), at=11.0) == (act.Grant(a, "a"),)
