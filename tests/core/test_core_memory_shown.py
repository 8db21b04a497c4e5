"""Admission by memory, what devices show: late, by halves, of strangers, more than reckoned, or nothing."""

import pytest
from core_herd import Herd, spec, started, stopped
from core_memory import GIB, account, error_of, gpu, needs, stop

from llamastead.shared.words import EndClass, InstanceState, WaitReason
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core import ledger
from llamastead.supervisor.core.ledger import RELEASE_AWAITED_S
from llamastead.supervisor.core.state import Claims, Device, Place


@pytest.mark.parametrize("stays", [False, True])
def test_what_others_use_just_now_refuses_nobody_until_it_lasts(stays: bool) -> None:
    """A stranger shows up: a model of 16 waits for it to pass, and starts; or it stays, and it is refused."""
    herd = Herd(needs("a", 4), needs("b", 16))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    seen = {herd.of("a").id: {"gpu0": 4 * GIB}}
    herd.t = 60.0
    herd.read(seen, gpu0=gpu(24, 8))
    assert account(herd).external == 12 * GIB
    herd.lease("a")
    herd.ask("b")
    assert herd.state.waits["b"].reason is WaitReason.RELEASING
    herd.t = 62.0
    if not stays:
        assert started(herd.read(seen, gpu0=gpu(24, 20))) == ["b"]
        return
    assert started(herd.read(seen, gpu0=gpu(24, 8))) == []
    herd.t = 60.0 + RELEASE_AWAITED_S
    herd.read(seen, gpu0=gpu(24, 8))
    assert error_of(herd.last).error.fields["reason"] == "too_big"


def test_c55_bytes_that_never_show_are_put_on_record_and_the_measured_value_counts() -> None:
    """A stops and its bytes do not show within the wait: a discrepancy, and from then on they are others'."""
    herd = Herd(needs("a", 10), needs("b", 16))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    herd.read(seen={herd.of("a").id: {"gpu0": 10 * GIB}}, gpu0=gpu(24, 14))
    herd.ask("b", at=60.0)
    herd.exit(stop(herd, "a"), at=61.0)
    herd.t = 61.0 + RELEASE_AWAITED_S / 2
    assert started(herd.read(gpu0=gpu(24, 14))) == []
    assert herd.state.waits["b"].reason is WaitReason.RELEASING
    herd.t = 61.0 + RELEASE_AWAITED_S
    actions = herd.read(gpu0=gpu(24, 14))
    assert act.Discrepancy("gpu0", 10 * GIB) in actions
    assert account(herd).external == 10 * GIB
    assert account(herd).releasing == {}


def test_c55_bytes_that_show_late_are_waited_for() -> None:
    """The driver shows them after 8 s: until then nothing starts, at once afterwards it does."""
    herd = Herd(needs("a", 20), needs("b", 16))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    herd.ask("b", at=60.0)
    herd.exit(stop(herd, "a"), at=61.0)
    herd.t = 65.0
    assert started(herd.read(gpu0=gpu(24, 4))) == []
    herd.t = 69.0
    assert started(herd.read(gpu0=gpu(24, 24))) == ["b"]


def test_c75_a_model_that_takes_more_than_reckoned_corrects_the_figure_and_evicts_nobody() -> None:
    """Reckoned 1 GiB, real 2, alone on 40: it stays, and the ledger holds 2."""
    herd = Herd(needs("a", 1, measured=False))
    herd.read(gpu0=gpu(40, 40))
    herd.ask("a")
    own = herd.of("a").id
    herd.do(ev.Took(own, {"gpu0": 2 * GIB}, {"gpu0": 2 * GIB}))
    herd.serve("a", at=1.0)
    actions = herd.read(seen={own: {"gpu0": 2 * GIB}}, gpu0=gpu(40, 38))
    assert actions == ()
    assert account(herd).held == {"a": 2 * GIB}
    assert account(herd).external == 0


def test_mapped_pages_of_ours_are_not_free_although_the_host_says_so() -> None:
    """A's weights are pages of its file, which the host shows as available: B does not get them."""
    herd = Herd(spec("a", needs={"host": 10 * GIB}), spec("b", needs={"host": 8 * GIB}, measured=True))
    herd.read(host=Device(16 * GIB, 16 * GIB))
    herd.ask("a")
    own = herd.of("a").id
    herd.do(ev.Took(own, {"host": 10 * GIB}, {"host": GIB}))
    herd.serve("a", at=1.0)
    herd.read(seen={own: {"host": GIB}}, host=Device(16 * GIB, 15 * GIB))
    assert account(herd).external == 0
    assert stopped(herd, herd.ask("b", at=60.0)) == ["a"]


def test_c51_a_sleeper_is_booked_with_what_it_keeps() -> None:
    """It sleeps and 600 MiB stay: those are held, waking books the rest again, and its slot stays."""
    herd = Herd(needs("a", 8))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    own = herd.of("a").id
    herd.do(ev.FellAsleep(own))
    herd.do(ev.Slept(own))
    herd.read(seen={own: {"gpu0": 600 << 20}}, gpu0=gpu(24, 23.4))
    assert account(herd).held == {"a": 600 << 20}
    herd.ask("a", at=60.0)
    assert account(herd).held == {"a": 8 * GIB}


def test_a_sleeper_that_wakes_before_its_gpu_was_read_sends_nobody_away() -> None:
    """A of 14 GiB sleeps beside B of 8 on 24 and is asked for while the GPU shows both: it wakes, B stays."""
    herd = Herd(needs("a", 14), needs("b", 8))
    herd.read(gpu0=gpu(24, 24))
    for at, name in enumerate("ab"):
        herd.ask(name)
        herd.serve(name, at=float(at + 1))
    a, b = herd.of("a").id, herd.of("b").id
    herd.read(seen={a: {"gpu0": 14 * GIB}, b: {"gpu0": 8 * GIB}}, gpu0=gpu(24, 2))
    herd.do(ev.FellAsleep(a), at=60.0)
    herd.do(ev.Slept(a))
    assert herd.ask("a", at=61.0) == (act.Wake(a, "a"),)
    assert account(herd).held == {"a": 14 * GIB, "b": 8 * GIB}


def test_what_a_waking_instance_kept_is_booked_and_used_once() -> None:
    """A kept 2 of its 14 GiB asleep, as the GPU shows: while it wakes there is room for B's 9 beside it."""
    herd = Herd(needs("a", 14), needs("b", 9))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    a = herd.of("a").id
    herd.do(ev.FellAsleep(a), at=60.0)
    herd.do(ev.Slept(a))
    herd.read(seen={a: {"gpu0": 2 * GIB}}, gpu0=gpu(24, 22))
    assert herd.ask("a", at=61.0) == (act.Wake(a, "a"),)
    assert started(herd.ask("b")) == ["b"]


def test_a_crash_leaves_no_ghost() -> None:
    """A dies by itself: its bytes are awaited, then free, and nothing is held."""
    herd = Herd(needs("a", 8))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    herd.exit(herd.of("a").id, at=60.0, end_class=EndClass.CRASHED)
    herd.read(gpu0=gpu(24, 24))
    assert (account(herd).held, account(herd).releasing, account(herd).free) == ({}, {}, 24 * GIB)


def test_an_adopted_instance_is_not_taken_for_a_stranger() -> None:
    """A device that tells of no processes shows its bytes as used: they are held, and nobody else's."""
    herd = Herd(needs("a", 8), recover=False)
    herd.read(gpu0=gpu(24, 15))
    herd.do(ev.Found("h-0-1", "a", "rev-a"))
    herd.do(
        ev.Adopted("h-0-1", "a", "rev-a", InstanceState.READY, 0.0, ready_at=0.0, needs={"gpu0": 8 * GIB})
    )
    herd.do(ev.RecoveryDone())
    herd.read(gpu0=gpu(24, 15))
    assert account(herd).held == {"a": 8 * GIB}
    assert account(herd).external == GIB


def test_what_loads_and_does_not_show_yet_is_nobody_else_s() -> None:
    """A loads, 10 booked and nothing of it shown, while a stranger takes 10 of 24: what the device shows as
    free is A's, so B waits; nor is the margin for it once A shows.
    """
    herd = Herd(needs("a", 10), needs("b", 3))
    herd.read(gpu0=gpu(24, 24, margin=2 * GIB))
    herd.ask("a")
    own = herd.of("a").id
    herd.do(ev.Loading(own, 0.1))
    herd.read(gpu0=gpu(24, 14, margin=2 * GIB))
    assert started(herd.ask("b")) == []
    assert started(herd.read(seen={own: {"gpu0": 10 * GIB}}, gpu0=gpu(24, 4, margin=2 * GIB))) == []
    assert started(herd.read(seen={own: {"gpu0": 10 * GIB}}, gpu0=gpu(24, 5, margin=2 * GIB))) == ["b"]


def test_what_an_ended_one_took_since_the_last_reading_is_not_free_before_the_next() -> None:
    """A stranger takes 10 of 24 while A loads, 5 of its 10 shown: 9 are free. A takes the rest and ends: B,
    of 6, starts once a reading shows that room.
    """
    herd = Herd(needs("a", 10), needs("b", 6))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    own = herd.of("a").id
    herd.do(ev.Loading(own, 0.5))
    herd.read(seen={own: {"gpu0": 5 * GIB}}, gpu0=gpu(24, 9))
    herd.serve("a", at=1.0)
    herd.exit(own, end_class=EndClass.CRASHED)
    assert started(herd.ask("b")) == []
    assert started(herd.read(gpu0=gpu(24, 4))) == []
    assert started(herd.read(gpu0=gpu(24, 14))) == ["b"]


def test_bytes_that_show_by_halves_are_waited_for_whole() -> None:
    """A's 20 come back in two steps: B needs less than the first of them and starts after the second."""
    herd = Herd(needs("a", 20), needs("b", 12))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    herd.read(seen={herd.of("a").id: {"gpu0": 20 * GIB}}, gpu0=gpu(24, 4))
    herd.ask("b", at=60.0)
    herd.exit(stop(herd, "a"))
    assert started(herd.read(gpu0=gpu(24, 14))) == []
    assert account(herd).releasing == {"a": 20 * GIB}
    assert started(herd.read(gpu0=gpu(24, 24))) == ["b"]


def test_a_measurement_s_booking_counts_where_a_device_shows_nothing() -> None:
    """8 GiB of a device that tells only its size, 6 booked for a measurement: a model of 4 waits for it."""
    herd = Herd(spec("c", needs={"host": 4 * GIB}, measured=True))
    herd.read(host=Device(8 * GIB, None))
    herd.do(ev.MeasuringBegan("b", {"host": 6 * GIB}))
    assert started(herd.ask("c")) == []
    assert started(herd.do(ev.MeasuringEnded("b"))) == ["c"]


def test_the_most_a_process_was_seen_to_use_is_held_from_then_on() -> None:
    """Booked with 4, seen to use 6, then 5: 6 are held, and none of it is a stranger's."""
    herd = Herd(needs("a", 4))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    for used in (6, 5):
        herd.read(seen={herd.of("a").id: {"gpu0": used * GIB}}, gpu0=gpu(24, 24 - used))
        assert (account(herd).held, account(herd).external) == ({"a": 6 * GIB}, 0)


def test_an_adopted_instance_is_held_where_it_lies_with_what_was_booked() -> None:
    """It was put on gpu1 with 9, the figures say 6 and split by now: 9 are held, also after it slept."""
    places = tuple(Place(name, {name: 6 * GIB}) for name in ("gpu0", "gpu1"))
    herd = Herd(spec("a", needs={"gpu0": 3 * GIB, "gpu1": 3 * GIB}, places=places), recover=False)
    herd.do(ev.Found("h-0-1", "a", "rev-a"))
    lies = {"needs": {"gpu1": 9 * GIB}, "place": "gpu1"}
    herd.do(ev.Adopted("h-0-1", "a", "rev-a", InstanceState.READY, 0.0, ready_at=0.0, **lies))
    herd.do(ev.RecoveryDone())
    herd.do(ev.Granted("h-0-1", 0))

    def held() -> dict[str, dict[str, int]]:
        return {each.device: dict(each.held) for each in ledger.account(herd.state)}

    herd.read(gpu0=gpu(24, 24), gpu1=gpu(24, 15))
    assert held() == {"gpu0": {}, "gpu1": {"a": 9 * GIB}}
    herd.do(ev.FellAsleep("h-0-1"))
    herd.do(ev.Slept("h-0-1"))
    herd.read(seen={"h-0-1": {"gpu1": GIB}}, gpu0=gpu(24, 24), gpu1=gpu(24, 23))
    assert held() == {"gpu0": {}, "gpu1": {"a": GIB}}
    herd.ask("a", at=60.0)
    assert held() == {"gpu0": {}, "gpu1": {"a": 9 * GIB}}
    assert herd.of("a").place == "gpu1"


def taken_over(*, ours: bool) -> Herd:
    """Return a herd that was taken over with 16 of 24 GiB in use, by A or by a stranger."""
    herd = Herd(needs("a", 16), needs("b", 16), recover=False)
    herd.do(ev.DevicesRead({"gpu0": gpu(24, 8)}, complete=False))
    if ours:
        herd.do(ev.Found("h-0-1", "a", "rev-a"))
        own = {"gpu0": 16 * GIB}
        herd.do(ev.Adopted("h-0-1", "a", "rev-a", InstanceState.READY, 0.0, ready_at=0.0, needs=own))
        herd.do(ev.Granted("h-0-1", 0))
        herd.claims["h-0-1"] = Claims(0, 0.0)
    return herd


def test_what_ours_use_at_a_take_over_is_nobody_elses() -> None:
    """Lead over A, which fills the GPU, and ask for B before and after it is read again: A goes for B."""
    for read_again in (False, True):
        herd = taken_over(ours=True)
        if read_again:
            herd.read({"h-0-1": {"gpu0": 16 * GIB}}, gpu0=gpu(24, 8))
        herd.do(ev.RecoveryDone())
        assert stopped(herd, herd.ask("b", at=60.0)) == ["a"]
        assert account(herd).external == 0


def test_what_strangers_use_at_a_take_over_is_there_for_good() -> None:
    """Lead where a stranger fills the GPU: once it is read again that is known to be nobody of ours."""
    herd = taken_over(ours=False)
    assert account(herd).external == 0
    herd.read(gpu0=gpu(24, 8))
    assert (account(herd).external, herd.state.devices["gpu0"].lasting) == (16 * GIB, 16 * GIB)
