"""Admission by memory, who may start: the cases of other routers, on devices that a test sets as it likes."""

from pathlib import Path

import pytest
from core_herd import Herd, exited, spec, started, stopped
from core_memory import GIB, account, error_of, gpu, needs, stop

from llamastead.shared.errors import ApiError
from llamastead.shared.words import EndClass, WaitReason
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core.state import Device


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
    assert told.message == (
        "model name=b failed to load: out of memory; it was given 10240 MiB on gpu0, which has 143360 MiB: "
        "0 MiB are used by others, 0 MiB are kept free"
    )
    assert told.fields["memory"]["gpu0"]["needs"] == 10 * GIB


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
    """A stranger holds 12 of 24 GiB: a model of 16 is refused with numbers and the stranger's; once that is
    gone it starts.
    """
    herd = Herd(needs("b", 16))
    herd.read(gpu0=gpu(24, 12, margin=GIB, strangers={"pid 77 game": 12 * GIB - 1, "pid 8": 1}))
    herd.ask("b")
    herd.exit(herd.of("b").id, end_class=EndClass.OUT_OF_MEMORY, doomed=False)
    herd.waiting.clear()
    herd.ask("b", at=100.0)
    told = error_of(herd.last).error
    assert told.status == 503
    assert told.message == (
        "model name=b is too big: needs 16384 MiB on gpu0, which has 24576 MiB: "
        "12288 MiB are used by others (pid 77 game 12287 MiB, pid 8 0 MiB), 1024 MiB are kept free"
    )
    assert told.fields["memory"]["gpu0"]["strangers"] == {"pid 77 game": 12 * GIB - 1, "pid 8": 1}
    assert told.fields["memory"]["gpu0"]["external"] == 12 * GIB
    herd.waiting.clear()
    herd.read(gpu0=gpu(24, 24, margin=GIB))
    assert started(herd.ask("b", at=200.0)) == ["b"]


@pytest.mark.parametrize("measured", [True, False])
def test_a_gpu_that_strangers_fill_into_the_margin_leaves_nobody_waiting(measured: bool) -> None:
    """A stranger leaves half a GiB of 24, less than the margin: a model is tried, as on any GPU where nothing
    of ours is in its way; one that is measured is refused from then on.
    """
    herd = Herd(needs("b", 16, measured=measured))
    herd.read(gpu0=gpu(24, 0.5, margin=GIB))
    assert started(herd.ask("b")) == ["b"]
    herd.exit(herd.of("b").id, end_class=EndClass.OUT_OF_MEMORY)
    herd.waiting.clear()
    herd.ask("b", at=100.0)
    if measured:
        assert error_of(herd.last).error.fields["reason"] == "too_big"
    else:
        assert started(herd.last.actions) == ["b"]


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
    (start,) = [a for a in herd.last.actions if isinstance(a, act.Start)]
    assert start.beyond == {"gpu0": 8 * GIB}, "which is warned of"
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


def test_the_page_s_example() -> None:
    """Follow the numbers of docs/memory.md: what is free, what is short, what is released, the refusal."""
    mib = 1 << 20
    sizes = {"A": 14_000, "B": 12_000, "C": 23_500}
    herd = Herd(*(spec(n, needs={"gpu0": size * mib}, measured=True) for n, size in sizes.items()))

    def show(used: int) -> tuple[act.Action, ...]:
        seen = {i.id: {"gpu0": used * mib} for i in herd.state.instances.values()}
        margin, strangers = 1024 * mib, {"pid 812 Xorg": 600 * mib}
        free = (24_576 - 600 - used) * mib
        return herd.read(seen, gpu0=Device(24_576 * mib, free, margin, frees_late=True, strangers=strangers))

    show(0)
    herd.ask("A")
    herd.serve("A", at=1.0)
    show(14_000)
    assert (account(herd).external, account(herd).free) == (600 * mib, 8_952 * mib)
    assert stopped(herd, herd.ask("B", at=60.0)) == ["A"]
    assert started(herd.exit(stop(herd, "A"))) == []
    assert herd.state.waits["B"].reason is WaitReason.RELEASING
    assert started(show(0)) == ["B"]
    herd.serve("B", at=61.0)
    show(12_000)
    herd.ask("C", at=120.0)
    told = error_of(herd.last).error.message
    assert (
        told.removesuffix(", ours: B 12000 MiB") in (Path(__file__).parents[2] / "docs/memory.md").read_text()
    )


def test_an_absent_model_waits_for_its_files_and_takes_nothing() -> None:
    """Its files are on their way: it takes no slot and nobody goes for it; they arrive, and it starts."""
    absent = needs("a", 1, absent=True)
    herd = Herd(absent, "b", models_max=1)
    herd.read(gpu0=gpu(24, 24))
    herd.ask("b")
    herd.serve("b", at=1.0)
    assert started(herd.ask("a", at=100.0)) == []
    assert herd.state.waits["a"].reason is WaitReason.DOWNLOADING
    assert herd.of("b").leaving is None
    herd.change(a=needs("a", 1))
    assert herd.state.waits["a"].reason is not WaitReason.DOWNLOADING


def test_files_that_cannot_be_had_are_told_to_all_who_wait_and_for_a_while_after() -> None:
    """The download fails: those who wait get its reason once, and so does who comes next; an unknown one is
    nobody's.
    """
    herd = Herd(needs("a", 1, absent=True))
    herd.ask("a")
    error = ApiError(404, "it is not on the hub", {"reason": "not_found"})
    (failed,) = herd.do(ev.DownloadFailed("a", error))
    assert failed == act.FailTickets("a", error)
    (again,) = herd.ask("a", at=1.0)
    assert isinstance(again, act.FailTickets)
    assert (again.error.status, again.error.message) == (404, error.message)
    assert herd.do(ev.DownloadFailed("nobody", error)) == ()


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


def test_nobody_goes_for_what_a_measurement_takes() -> None:
    """4 GiB of host, A holds 1, 1 is booked for a measurement, and B needs 3: it waits for that to end, and A
    stays; C needs 4, and A goes, which with what the measurement gives back is enough.
    """
    herd = Herd(
        *(
            spec(name, needs={"host": n * GIB}, measured=True)
            for name, n in zip("abc", (1, 3, 4), strict=True)
        )
    )
    herd.read(host=Device(4 * GIB, 4 * GIB))
    herd.ask("a")
    herd.serve("a", at=1.0)
    herd.read(seen={herd.of("a").id: {"host": GIB}}, host=Device(4 * GIB, 3 * GIB))
    herd.do(ev.MeasuringBegan("x", {"host": GIB}))
    assert herd.ask("b", at=60.0) == ()
    assert herd.state.waits["b"].reason is WaitReason.MEASURING
    herd.give_back("b")
    assert stopped(herd, herd.ask("c", at=61.0)) == ["a"]
    herd.exit(stop(herd, "a"))
    herd.read(host=Device(4 * GIB, 4 * GIB))
    assert herd.state.waits["c"].reason is WaitReason.MEASURING
    assert started(herd.do(ev.MeasuringEnded("x"))) == ["c"]


def test_no_start_runs_beside_a_measurement_on_the_same_gpu() -> None:
    """B is measured on gpu0: A waits for that; on the host it would not."""
    herd = Herd(needs("a", 1), spec("c", needs={"host": GIB}))
    herd.read(gpu0=gpu(24, 24), host=Device(8 * GIB, 8 * GIB))
    herd.do(ev.MeasuringBegan("b", {"gpu0": GIB, "host": GIB}))
    assert started(herd.ask("a", "c")) == ["c"]
    assert started(herd.do(ev.MeasuringEnded("b"))) == ["a"]
