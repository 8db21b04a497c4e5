"""Whom the supervisor's probes call unresponsive: three misses in a row, and who may refuse."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from llamastead.shared.addresses import UnixAddress
from llamastead.shared.words import InstanceState
from llamastead.supervisor.core.events import Event, Unresponsive
from llamastead.supervisor.core.state import Instance, Policy, State, initial
from llamastead.supervisor.health import MISSES, Health

S = InstanceState
LOOKS = 4 * MISSES


def holding(state: InstanceState) -> State:
    """Return a state with one instance."""
    instance = Instance("i1", "m", "r", state, 0.0, 0.0)
    return replace(initial(Policy(), "h-1", {}), instances={"i1": instance})


@contextlib.asynccontextmanager
async def probed(
    state: InstanceState, address: Callable[[int], UnixAddress], every: float = 0.02
) -> AsyncIterator[tuple[list[Event], list[int]]]:
    """Probe one instance, which `address` places for each look; yield what is told, and the looks so far."""
    told: list[Event] = []
    looks: list[int] = []

    def where(_: str) -> UnixAddress:
        looks.append(len(looks))
        return address(looks[-1])

    watching = asyncio.create_task(Health(every, told.append).run(lambda: holding(state), where))
    try:
        yield told, looks
    finally:
        watching.cancel()


@pytest.mark.parametrize("state", [S.READY, S.DRAINING, S.STOPPING])
async def test_only_who_drains_or_stops_may_refuse(short_tmp: Path, state: InstanceState) -> None:
    """Let nobody listen: a ready one is told of once, after three misses; one that leaves never is."""
    async with probed(state, lambda _: UnixAddress(str(short_tmp / "nobody"))) as (told, looks):
        if state is S.READY:
            await until(lambda: told, "it to be told")
            assert len(looks) == MISSES
        await until(lambda: len(looks) > LOOKS, "more looks")
        assert [type(event) for event in told] == ([Unresponsive] if state is S.READY else [])


@pytest.mark.parametrize("state", [S.READY, S.DRAINING, S.STOPPING])
async def test_nobody_may_be_silent(short_tmp: Path, state: InstanceState) -> None:
    """Listen and never answer: told in each state."""
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(short_tmp / "deaf"))
        deaf.listen(100)
        async with probed(state, lambda _: UnixAddress(str(short_tmp / "deaf"))) as (told, looks):
            await until(lambda: told, "it to be told")
            assert len(looks) == MISSES


async def test_an_answer_makes_up_for_misses(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Miss two probes of three, over and over: an answer in between starts the count anew."""
    asked: list[int] = []

    async def answers(*_: object) -> bool:
        asked.append(len(asked))
        return asked[-1] % MISSES == MISSES - 1

    monkeypatch.setattr(Health, "answers", answers)
    async with probed(S.READY, lambda _: UnixAddress(str(short_tmp / "anybody"))) as (told, _):
        await until(lambda: len(asked) > LOOKS, "more looks")
        assert told == []
