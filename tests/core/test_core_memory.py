"""Admission by memory: the cases of other routers, each on devices that a test sets as it likes."""

from core_herd import Herd, exited, spec

from llamastead.shared.words import EndClass, WaitReason
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core import ledger
from llamastead.supervisor.core.ledger import RELEASE_AWAITED_S
from llamastead.supervisor.core.state import Device, ModelSpec
from llamastead.supervisor.core.step import Step

GIB = 1 << 30


def needs(name: str, gib: float, **fields: object) -> ModelSpec:
    """Return a model that needs so much of gpu0, measured unless said otherwise."""
    fields.setdefault("measured", True)
    return spec(name, needs={"gpu0": int(gib * GIB)}, **fields)


def gpu(total: int, free: float | None = None, **fields: object) -> Device:
    """Return a device of so many GiB that frees late."""
    fields.setdefault("frees_late", True)
    return Device(total * GIB, None if free is None else int(free * GIB), **fields)  # type: ignore[arg-type]


def started(actions: tuple[act.Action, ...]) -> list[str]:
    """Return the models that a step starts."""
    return [action.model for action in actions if isinstance(action, act.Start)]


def stopped(herd: Herd, actions: tuple[act.Action, ...]) -> list[str]:
    """Return the models that a step asks to stop."""
    return [herd.state.instances[a.instance].model for a in actions if isinstance(a, act.TryStop)]


def error_of(done: Step) -> act.FailTickets:
    """Return the refusal of a step."""
    (failed,) = [action for action in done.actions if isinstance(action, act.FailTickets)]
    return failed


def account(herd: Herd) -> ledger.Account:
    """Return the account of the one device."""
    (only,) = ledger.account(herd.state)
    return only


def stop(herd: Herd, model: str) -> str:
    """Let an asked stop be granted and return the instance."""
    own = herd.of(model).id
    herd.do(ev.StopGranted(own))
    return own


def test_c09_room_is_made_by_memory_and_a_load_waits_until_it_is_confirmed() -> None:
    """140 GiB, A holds 100, B needs 60 and slots are free: A goes, and B starts when its bytes show."""
    herd = Herd(needs("a", 100), needs("b", 60))
    herd.read(gpu0=gpu(140, 140))
    herd.ask("a")
    herd.serve("a", at=10.0)
    herd.read(seen={herd.of("a").id: {"gpu0": 100 * GIB}}, gpu0=gpu(140, 40))
    assert stopped(herd, herd.ask("b", at=60.0)) == ["a"]
    own = stop(herd, "a")
    assert started(herd.exit(own)) == []
    assert herd.state.waits["b"].reason is WaitReason.RELEASING
    assert account(herd).releasing == {"a": 100 * GIB}
    assert started(herd.read(gpu0=gpu(140, 140))) == ["b"]


def test_c09_a_load_that_fails_for_memory_evicts_one_more_and_then_says_so() -> None:
    """B fits by the figures and fails twice for memory: once A goes for it, then it is told, with the log."""
    herd = Herd(needs("a", 10), needs("b", 10))
    herd.read(gpu0=gpu(140, 140, frees_late=False))
    herd.ask("a")
    herd.serve("a", at=10.0)
    assert started(herd.ask("b", at=60.0)) == ["b"]
    out = {"end_class": EndClass.OUT_OF_MEMORY, "reason": "out of memory", "log": ("cudaMalloc failed",)}
    assert stopped(herd, herd.exit(herd.of("b").id, **out)) == ["a"]
    assert started(herd.exit(stop(herd, "a"))) == ["b"]
    herd.exit(herd.of("b").id, **out)
    told = error_of(herd.last).error
    assert told.fields["reason"] == "out_of_memory"
    assert told.fields["log"] == ["cudaMalloc failed"]


def test_what_a_failed_load_leaves_is_not_one_more_that_went() -> None:
    """The failed load's own bytes are awaited too: they do not spare the victim of its retry."""
    herd = Herd(needs("a", 10), needs("b", 10))
    herd.read(gpu0=gpu(140, 140))
    herd.ask("a")
    herd.serve("a", at=10.0)
    herd.ask("b", at=60.0)
    out = exited(herd.of("b").id, end_class=EndClass.OUT_OF_MEMORY)
    assert stopped(herd, herd.do(out)) == ["a"]


def test_c12_one_victim_for_one_need_and_its_bytes_are_counted_once() -> None:
    """Eight of 1 GiB fill the device: a ninth takes one; while that stops slowly no look takes more."""
    herd = Herd(*(needs(name, 1) for name in "abcdefghi"), models_max=0)
    herd.read(gpu0=gpu(8, 8))
    for at, name in enumerate("abcdefgh"):
        herd.ask(name, at=float(at))
        herd.serve(name, at=at + 0.5)
    assert stopped(herd, herd.ask("i", at=100.0)) == ["a"]
    own = stop(herd, "a")
    assert stopped(herd, herd.tick(102.0)) == []
    assert stopped(herd, herd.read(gpu0=gpu(8, 0))) == []
    assert stopped(herd, herd.exit(own, at=105.0)) == []
    assert stopped(herd, herd.read(gpu0=gpu(8, 0))) == []
    assert started(herd.read(gpu0=gpu(8, 1))) == ["i"]


def test_c54_a_refusal_says_what_others_hold() -> None:
    """A stranger holds 12 of 24 GiB: a model of 16 is refused with numbers; once that is gone it starts."""
    herd = Herd(needs("b", 16))
    herd.read(gpu0=gpu(24, 12, margin=GIB))
    herd.ask("b")
    herd.exit(herd.of("b").id, end_class=EndClass.OUT_OF_MEMORY, doomed=False)
    herd.waiting.clear()
    herd.ask("b", at=100.0)
    told = error_of(herd.last).error
    assert told.status == 503
    assert told.message == (
        "model name=b is too big: needs 16384 MiB on gpu0, which has 24576 MiB: "
        "12288 MiB are used by others, 1024 MiB are kept free"
    )
    assert told.fields["memory"]["gpu0"]["external"] == 12 * GIB
    herd.waiting.clear()
    herd.read(gpu0=gpu(24, 24, margin=GIB))
    assert started(herd.ask("b", at=200.0)) == ["b"]


def test_a_measured_model_too_big_is_tried_once_and_evicts_nobody() -> None:
    """Too big for the device: beside another it is refused and nobody goes; alone it is tried once."""
    herd = Herd(needs("a", 4), needs("b", 32))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    assert stopped(herd, herd.ask("b", at=60.0)) == []
    assert error_of(herd.last).model == "b"
    herd.waiting.clear()
    herd.do(ev.UnloadOrdered("a", "c1"))
    herd.exit(stop(herd, "a"))
    herd.read(gpu0=gpu(24, 24))
    assert started(herd.ask("b", at=90.0)) == ["b"]
    assert account(herd).held == {"b": 24 * GIB}
    herd.exit(herd.of("b").id, end_class=EndClass.OUT_OF_MEMORY)
    herd.waiting.clear()
    assert started(herd.ask("b", at=200.0)) == []
    assert error_of(herd.last).error.fields["reason"] == "too_big"


def test_a_refusal_after_a_failed_try_leaves_nothing_for_the_next_look() -> None:
    """Let the one try of a model that is too big fail: it is refused, and a second look changes nothing."""
    herd = Herd(needs("b", 16, measured=True))
    herd.read(gpu0=gpu(8, 8))
    assert started(herd.ask("b")) == ["b"]
    herd.exit(herd.of("b").id, end_class=EndClass.FAILED_TO_START)
    assert error_of(herd.last).error.fields["reason"] == "too_big"
    herd.waiting.clear()
    before = herd.state
    herd.tick(herd.t)
    assert herd.state == before


def test_an_estimate_too_big_gets_all_room_there_is() -> None:
    """Only reckoned to be too big: the other goes for it, and the load shows."""
    herd = Herd(needs("a", 4), needs("b", 32, measured=False))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    assert stopped(herd, herd.ask("b", at=60.0)) == ["a"]


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


def test_c63_a_projector_counts_before_the_start() -> None:
    """1 GiB is spare beyond the text and the projector takes 1.8: the other goes before anything starts."""
    whole = needs("vision", 12 + 1.8)
    herd = Herd(needs("a", 11), whole)
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    herd.see(at=60.0)
    actions = herd.ask("vision")
    assert (started(actions), stopped(herd, actions)) == ([], ["a"])


def test_c66_a_better_figure_lets_a_model_in() -> None:
    """Reckoned 500 MiB too much it would not fit beside A; measured, it starts at once and A stays."""
    herd = Herd(needs("a", 12), needs("b", 12.3, measured=False))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    herd.lease("a")
    assert started(herd.ask("b", at=60.0)) == []
    assert started(herd.change(b=needs("b", 11.8))) == ["b"]


def test_c70_host_memory_is_a_device_like_others() -> None:
    """16 GiB of host and three models with caches of 6: the third waits for one to go, never all three."""
    specs = [spec(name, needs={"host": 6 * GIB}, measured=True) for name in "abc"]
    herd = Herd(*specs)
    herd.read(host=Device(16 * GIB, 15 * GIB, margin=GIB))
    for name in "ab":
        herd.ask(name)
        herd.serve(name)
    herd.see(at=60.0)
    assert stopped(herd, herd.ask("c")) == ["a"]


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


def test_debt_is_paid_before_anything_starts() -> None:
    """A takes more than there is: what is asked for next waits until A is gone, and says for whom."""
    herd = Herd(needs("a", 1, measured=False), needs("b", 1))
    herd.read(gpu0=gpu(4))
    herd.ask("a")
    herd.do(ev.Took(herd.of("a").id, {"gpu0": 5 * GIB}, {"gpu0": 5 * GIB}))
    herd.serve("a", at=1.0)
    assert account(herd).debt == GIB
    assert stopped(herd, herd.ask("b", at=60.0)) == ["a"]


def test_c78_what_must_be_pinned_on_the_host_is_booked_before_the_load() -> None:
    """128 GiB, 40 used by others, experts need 96: refused; mapped pages of files leave it the same need."""
    herd = Herd(spec("moe", needs={"host": 96 * GIB}, measured=True))
    herd.read(host=Device(128 * GIB, 88 * GIB))
    herd.ask("moe")
    assert started(herd.last.actions) == ["moe"], "tried once, alone"
    herd.exit(herd.of("moe").id, end_class=EndClass.OUT_OF_MEMORY)
    herd.waiting.clear()
    herd.ask("moe", at=100.0)
    assert "40960 MiB are used by others" in error_of(herd.last).error.message


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


def test_a_context_grows_into_what_is_free_and_no_further() -> None:
    """4 GiB least and 8 more at most: beside 18 of 24 it gets a quarter of its growth; alone all of it."""
    herd = Herd(needs("a", 18), needs("b", 4, grows={"gpu0": 8 * GIB}))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    (start,) = [a for a in herd.ask("b", at=60.0) if isinstance(a, act.Start)]
    assert start.share == 0.25
    assert account(herd).held["b"] == 6 * GIB
    alone = Herd(needs("b", 4, grows={"gpu0": 8 * GIB}))
    alone.read(gpu0=gpu(24, 24))
    (start,) = [a for a in alone.ask("b") if isinstance(a, act.Start)]
    assert start.share == 1.0


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


def test_a_crash_leaves_no_ghost() -> None:
    """A dies by itself: its bytes are awaited, then free, and nothing is held."""
    herd = Herd(needs("a", 8))
    herd.read(gpu0=gpu(24, 24))
    herd.ask("a")
    herd.serve("a", at=1.0)
    herd.exit(herd.of("a").id, at=60.0, end_class=EndClass.CRASHED)
    herd.read(gpu0=gpu(24, 24))
    assert (account(herd).held, account(herd).releasing, account(herd).free) == ({}, {}, 24 * GIB)


def test_an_entry_waits_for_its_measurement_and_then_no_longer() -> None:
    """A measurement is under way: the entry waits for it, starts when it is there, or after 5 s without."""
    awaited = needs("a", 1, measured=False, awaited=True)
    herd = Herd(awaited)
    herd.read(gpu0=gpu(24, 24))
    assert started(herd.ask("a")) == []
    assert herd.state.waits["a"].reason is WaitReason.MEASURING
    assert started(herd.change(a=needs("a", 2))) == ["a"]
    late = Herd(awaited)
    late.ask("a")
    assert late.last.wake_at == 5.0
    assert started(late.tick(5.0)) == ["a"]


def test_no_start_runs_beside_a_measurement_on_the_same_gpu() -> None:
    """B is measured on gpu0: A waits for that; on the host it would not."""
    herd = Herd(needs("a", 1), spec("c", needs={"host": GIB}))
    herd.read(gpu0=gpu(24, 24), host=Device(8 * GIB, 8 * GIB))
    herd.do(ev.MeasuringBegan("b", {"gpu0": GIB, "host": GIB}))
    assert started(herd.ask("a", "c")) == ["c"]
    assert started(herd.do(ev.MeasuringEnded("b"))) == ["a"]
