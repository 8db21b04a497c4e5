"""C58 where holders and scheduler meet: a KILL that has no effect is told, one that has is not."""

import asyncio

import pytest

from llamastead.supervisor import news
from llamastead.supervisor.core.events import Event, Exited, StopFailed
from llamastead.supervisor.holder_link import HolderExit, HolderStop
from llamastead.supervisor.running import Running


@pytest.mark.parametrize("ends", [False, True])
async def test_c58_a_kill_without_effect_is_told_as_a_failed_stop(
    short_tmp, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Let a holder say that it kills, and then that the engine ended or nothing: only nothing is told."""
    monkeypatch.setattr(news, "KILL_GIVES_UP_AFTER_S", 0.05)
    running = {"i": Running("m", "unix:/nowhere", "", 7)}
    told: list[Event] = []
    async with asyncio.TaskGroup() as tasks:
        listener = news.News(
            short_tmp, running, told.append, tasks.create_task, told.append, told.append, lambda *_: None
        )
        listener.on_event("i", HolderStop("exit", 0))
        listener.on_event("i", HolderStop("kill", None))
        if ends:
            listener.on_event("i", HolderExit(None, 9, (), "stopping", True, True, False))
            del running["i"]
    if ends:
        assert [type(event) for event in told] == [Exited]
    else:
        assert told == [StopFailed("i")]
