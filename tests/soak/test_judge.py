"""The judge of the soak, shown what it must not let pass, and what it may."""

import json
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

sys.path.append(str(Path(__file__).resolve().parents[1] / "system"))

from herd import KEYS
from soak_checker import BOUND_S, GUESSES_S, Checker
from soak_faults import Injected
from soak_stage import MODELS_MAX, STUBS
from soak_traffic import Outcome

STUB = STUBS[0]


def checker(folder: Path, redis: Redis | None = None) -> Checker:
    """Return a judge of a herd that consists of a folder and a Redis."""

    @asynccontextmanager
    async def client() -> Any:
        yield redis

    made: Any = SimpleNamespace(models=folder, run_dir=folder / "run", redis=client)
    return Checker(SimpleNamespace(made=made, folder=folder, called_off=set()))  # type: ignore[arg-type]


def ended(result: str, **more: Any) -> Outcome:
    """Return a request that took from second 100 to 104."""
    facts = {"began": 100.0, "ended": 104.0, "first_byte_at": 101.0, "status": 200, "result": result}
    return Outcome("stream", STUB, "g1", **{**facts, **more})


def struck(name: str, **more: Any) -> Injected:
    """Return a fault from second 101 to 102 that proved itself."""
    return Injected(name, more.pop("target", ""), 101.0, 102.0, fired=True, **more)


FAR = struck("pause_leader", target="s1")
ALLOWED: Sequence[tuple[Outcome, Injected]] = (
    (ended("answered"), FAR),
    (ended("refused", status=503), FAR),
    (ended("cut"), struck("kill_gateway", dead=("g1",))),
    (ended("cut"), struck("no_files", target="g1")),
    (ended("broken"), struck("kill_gateway", dead=("g1",))),
    (ended("broken"), struck("kill_instance", model=STUB)),
    (ended("broken", ended=120.0), struck("hang_instance", model=STUB)),
    (ended("lost", ended=102.0), struck("empty_redis")),
)
REFUSED: Sequence[tuple[Outcome, Injected]] = (
    (ended("stuck"), FAR),
    (ended("cut"), struck("no_files", target="g2")),
    (ended("truncated"), FAR),
    (ended("answered", ended=100.0 + BOUND_S + 1), FAR),
    (ended("cut"), struck("kill_gateway", dead=("g2",))),
    (ended("cut"), struck("kill_instance", model=STUB)),
    (ended("broken"), struck("kill_gateway", dead=("g2",))),
    (ended("broken"), struck("kill_instance", model=STUBS[1])),
    (ended("broken", began=110.0, ended=120.0), struck("kill_instance", model=STUB)),
    (ended("lost", ended=102.0), FAR),
    (ended("refused", status=429), FAR),
    (ended("refused", status=503, began=200.0, ended=201.0), FAR),
    (ended("refused", status=502, detail="the herd secrets differ"), FAR),
)


@pytest.mark.parametrize(("outcome", "fault"), ALLOWED)
def test_what_a_fault_explains_passes(tmp_path: Path, outcome: Outcome, fault: Injected) -> None:
    """Judge one request and the fault that struck beside it: nothing to object."""
    judge = checker(tmp_path)
    judge.judge_outcomes([outcome], [fault])
    assert judge.breaches == []


@pytest.mark.parametrize(("outcome", "fault"), REFUSED)
def test_what_no_fault_explains_is_a_breach(tmp_path: Path, outcome: Outcome, fault: Injected) -> None:
    """Judge one request and a fault that has nothing to do with its end: one objection."""
    judge = checker(tmp_path)
    judge.judge_outcomes([outcome], [fault])
    assert len(judge.breaches) == 1


def test_an_engine_stopped_while_it_served_is_a_breach(tmp_path: Path) -> None:
    """Show a journal with an exit line for one that serves, after a TERM from outside and without one."""
    path = tmp_path / f"{STUB}.gguf.journal"
    lines = [
        {"event": "term", "pid": 1},
        {"event": "exit_line", "pid": 1, "serving": 1},
        {"event": "exit_line", "pid": 2, "serving": 0},
    ]
    judge = checker(tmp_path)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    judge.judge_journals()
    assert judge.breaches == []
    path.write_text(json.dumps({"event": "exit_line", "pid": 3, "serving": 2}) + "\n")
    judge.judge_journals()
    assert len(judge.breaches) == 1


async def test_too_many_instances_and_a_device_beyond_its_margin_are_breaches(
    tmp_path: Path, redis: Redis
) -> None:
    """Look at a Redis with as much as there may be, then with one more of each; right after the figures of
    models were lost their booking is not judged.
    """
    names = {f"i{number}": number for number in range(MODELS_MAX)}
    await redis.zadd(KEYS.instances, names)
    account = {"total": 100, "margin": 10, "held": {"a": 50, "b": 40}}
    await redis.hset(KEYS.devices("h"), "gpu0", json.dumps(account))
    judge = checker(tmp_path, redis)
    await judge._look_at_redis()
    assert (judge.breaches, judge.most_booked) == ([], 1.0)
    await redis.zadd(KEYS.instances, {"one-more": 9})
    await redis.hset(KEYS.devices("h"), "gpu0", json.dumps(account | {"held": {"a": 91}}))
    await judge._look_at_redis()
    assert len(judge.breaches) == 2
    judge = checker(tmp_path, redis)
    judge.faults.append(Injected("empty_redis", "", 0.0))
    await judge._look_at_redis()
    assert len(judge.breaches) == 1
    judge.faults[0].ended = -GUESSES_S
    await judge._look_at_redis()
    assert len(judge.breaches) == 1
    await redis.hset(KEYS.devices("h"), "gpu0", json.dumps(account | {"held": {"a": 92}}))
    await judge._look_at_redis()
    assert len(judge.breaches) == 2
