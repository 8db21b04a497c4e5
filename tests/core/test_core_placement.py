"""Which GPU a model goes to: whole to one if any can have it, split over several if none can."""

from core_herd import Herd, spec, stopped

from llamastead.shared.words import EndClass, WaitReason
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core import ledger
from llamastead.supervisor.core.state import Device, ModelSpec, Place
from llamastead.supervisor.core.step import Step

GIB = 1 << 30


def model(name: str, gib: float, **fields: object) -> ModelSpec:
    """Return a model of so many GiB that may go to either GPU, or be split in halves, as measured."""
    size = int(gib * GIB)
    places = tuple(Place(gpu, {gpu: size, "host": GIB}) for gpu in ("gpu0", "gpu1"))
    halves = {"gpu0": size // 2, "gpu1": size // 2, "host": GIB}
    return spec(name, needs=halves, measured=True, places=places, **fields)


def two_gpus(*models: ModelSpec, first: int = 24, second: int = 24) -> Herd:
    """Return a herd on two GPUs of so many GiB, all of it free, that free at once."""
    herd = Herd(*models, models_max=0)
    herd.read(
        gpu0=Device(first * GIB, first * GIB), gpu1=Device(second * GIB, second * GIB), host=Device(64 * GIB)
    )
    return herd


def places(step: Step) -> dict[str, str]:
    """Return where a step starts models."""
    return {a.model: a.place for a in step.actions if isinstance(a, act.Start)}


def test_a_model_goes_whole_to_the_gpu_with_most_room() -> None:
    """Two unequal GPUs: the first goes to the bigger one, the next to whichever has more left."""
    herd = two_gpus(model("a", 16), model("b", 6), model("c", 4), first=12, second=24)
    herd.ask("a")
    assert places(herd.last) == {"a": "gpu1"}
    herd.ask("b")
    assert places(herd.last) == {"b": "gpu0"}
    herd.ask("c")
    assert places(herd.last) == {"c": "gpu1"}
    held = {account.device: dict(account.held) for account in ledger.account(herd.state)}
    assert held["gpu1"] == {"a": 16 * GIB, "c": 4 * GIB}
    assert held["gpu0"] == {"b": 6 * GIB}


def test_the_page_s_example_of_two_gpus() -> None:
    """Follow the numbers of docs/memory.md: who goes where."""
    mib = 1 << 20
    herd = two_gpus(*(model(n, size / 1024) for n, size in (("a", 14_000), ("b", 12_000), ("d", 10_000))))
    herd.read(**{f"gpu{k}": Device(24_576 * mib, 24_576 * mib, 1024 * mib) for k in range(2)})
    for at, name in enumerate("abd"):
        herd.ask(name)
        herd.serve(name, at=float(at))
    assert {n: herd.of(n).place for n in "abd"} == {"a": "gpu0", "b": "gpu1", "d": "gpu1"}


def test_a_model_too_big_for_each_is_split_over_all() -> None:
    """It fits no GPU, but half on each: it is split, and each half is booked where it lies."""
    herd = two_gpus(model("big", 30))
    herd.ask("big")
    assert places(herd.last) == {"big": ""}
    assert herd.of("big").needs == {"gpu0": 15 * GIB, "gpu1": 15 * GIB, "host": GIB}


def test_a_model_that_fits_one_is_not_split_for_want_of_room() -> None:
    """Each GPU has 10 of 24 left and the model needs 16: one goes for it, and it stays whole."""
    herd = two_gpus(model("a", 14), model("b", 14), model("c", 16))
    for at, name in enumerate("ab"):
        herd.ask(name)
        herd.serve(name, at=float(at + 1))
    assert herd.of("a").place != herd.of("b").place
    herd.ask("c", at=60.0)
    assert stopped(herd, herd.last.actions) == ["a"], "the least recently used of the two"
    gone = herd.of("a")
    herd.do(ev.StopGranted(gone.id))
    herd.exit(gone.id)
    herd.read(**{gone.place: Device(24 * GIB, 24 * GIB)})
    assert places(herd.last) == {"c": gone.place}


def test_the_fewest_go_whatever_gpu_that_is() -> None:
    """Two small idle ones on one GPU, one big one on the other: for a big one the one goes, not the two."""
    herd = two_gpus(model("s1", 11), model("s2", 10), model("b", 20), model("c", 20))
    herd.ask("b")
    herd.serve("b", at=1.0)
    for at, name in enumerate(("s1", "s2")):
        herd.ask(name)
        herd.serve(name, at=2.0 + at)
    assert herd.of("s1").place == herd.of("s2").place != herd.of("b").place
    herd.ask("c", at=60.0)
    assert stopped(herd, herd.last.actions) == ["b"]


def test_an_idle_one_goes_before_a_busy_one_is_drained_on_the_other_gpu() -> None:
    """Both GPUs are full, one is busy: past max-wait too the idle one is taken."""
    herd = two_gpus(model("a", 20), model("b", 20), model("c", 20))
    for at, name in enumerate("ab"):
        herd.ask(name)
        herd.serve(name, at=float(at + 1))
        herd.lease(name)
    herd.ask("c", at=60.0)
    assert herd.state.waits["c"].reason is WaitReason.BUSY
    herd.t = 200.0
    herd.lease("b", 0, last_used=61.0)
    assert stopped(herd, herd.last.actions) == ["b"]
    assert not [a for a in herd.last.actions if isinstance(a, act.TryDrain)]


def test_c76_another_gpu_is_left_alone() -> None:
    """A model placed whole holds nothing on the other GPU; for its room one goes that is on the same."""
    herd = two_gpus(model("a", 20), model("b", 20), model("c", 10))
    for at, name in enumerate("ab"):
        herd.ask(name)
        herd.serve(name, at=float(at + 1))
    assert set(herd.of("a").needs) == {herd.of("a").place, "host"}
    herd.ask("c", at=60.0)
    (victim,) = stopped(herd, herd.last.actions)
    assert victim == "a"


def test_a_retry_for_memory_sends_nobody_away_who_is_not_in_its_way() -> None:
    """It ran out of memory on a GPU where nothing else of ours is: nobody goes for its second try."""
    herd = two_gpus(model("a", 4), model("b", 6))
    herd.ask("a")
    herd.serve("a", at=1.0)
    herd.ask("b", at=60.0)
    first = herd.of("b")
    assert first.place != herd.of("a").place
    herd.exit(first.id, end_class=EndClass.OUT_OF_MEMORY)
    assert stopped(herd, herd.last.actions) == []
    assert len(places(herd.last)) == 1


def test_a_sleeper_wakes_where_it_lies() -> None:
    """Asleep on a GPU that filled up meanwhile: room is made there, not found elsewhere."""
    herd = two_gpus(model("a", 16), model("b", 16), model("c", 16))
    herd.ask("a")
    herd.serve("a", at=1.0)
    own = herd.of("a")
    herd.do(ev.FellAsleep(own.id))
    herd.do(ev.Slept(own.id))
    kept = {own.id: {own.place: GIB, "host": GIB}}
    herd.read(kept, **{own.place: Device(24 * GIB, 23 * GIB)})
    for at, name in enumerate("bc"):
        herd.ask(name)
        herd.serve(name, at=float(at + 2))
    there = next(i.model for i in herd.state.instances.values() if i.place == own.place and i.model != "a")
    herd.ask("a", at=60.0)
    assert stopped(herd, herd.last.actions) == [there]
