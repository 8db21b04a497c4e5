"""Limits on an instance's answer: each is kept, each names itself, and without one nothing is hurried."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from byte_path_kit import OK, SSE_HEAD, Call, Visit, chunk, instance, proxy_for
from waiting import PATIENCE_S

from llamastead.gateway.seams import AnswerCut
from llamastead.gateway.upstream import Pool, Unreachable
from llamastead.shared.errors import ApiError

SOON = 0.05
ENOUGH = 3.0  # for the beginning of an answer, also on a busy machine


def event_of(body: bytes) -> Any:
    """Return the error of the last event."""
    return json.loads(body.rpartition(b"data: ")[2])["error"]


@pytest.mark.parametrize("name", ["first_byte", "total"])
async def test_c138_no_answer_in_time_is_a_504_that_names_the_setting(path: Path, name: str) -> None:
    """The instance takes the request and says nothing: 504, its connection closed, the claim given back."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.gone()

    setting = proxy_for(f"unix:{path}", settings={f"{name}_timeout": SOON})
    async with instance(path, script) as made:
        with pytest.raises(ApiError, match=f"{name.replace('_', '-')}-timeout") as refusal:
            await Call(setting.proxy).done()
        assert refusal.value.status == 504
        await made.all_closed()
        assert setting.admission.open_claims == 0
        await setting.pools.close()


@pytest.mark.parametrize("name", ["idle", "total"])
async def test_c138_a_stalled_stream_ends_in_an_event_that_names_the_setting(path: Path, name: str) -> None:
    """The engine falls silent mid-stream: an error event with code 504, no clean end, everything closed."""
    limit = {"idle": SOON, "total": ENOUGH}[name]

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await visit.gone()

    setting = proxy_for(f"unix:{path}", settings={f"{name}_timeout": limit})
    async with instance(path, script) as made:
        call = Call(setting.proxy)
        with pytest.raises(AnswerCut, match=f"{name}-timeout"):
            await call.done()
        assert event_of(call.body)["code"] == 504
        assert f"{name}-timeout" in event_of(call.body)["message"]
        await made.all_closed()
        assert setting.admission.open_claims == 0
        await setting.pools.close()


async def test_c138_total_ends_an_answer_that_nobody_reads(path: Path) -> None:
    """A client that takes nothing more: the whole has its limit there, too."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await visit.gone()

    setting = proxy_for(f"unix:{path}", settings={"total_timeout": ENOUGH})
    async with instance(path, script) as made:
        call = Call(setting.proxy)
        call.take = asyncio.Event()
        call.start()
        await call.something_sent.wait()
        asyncio.get_running_loop().call_later(2 * ENOUGH, call.take.set)
        with pytest.raises(AnswerCut, match="total-timeout"):
            await call.done()
        await made.all_closed()
        await setting.pools.close()


@pytest.mark.parametrize("herd", [{}, {"idle_timeout": SOON / 2, "total_timeout": SOON / 2}])
@pytest.mark.parametrize("none", [0, -1])
async def test_c139_no_limit_is_no_limit(path: Path, herd: dict[str, float], none: int) -> None:
    """0 and -1 for the herd, or for the model over a herd's short limits: a slow answer comes whole."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await asyncio.sleep(2 * SOON)
        await visit.send(OK[:-1])
        await asyncio.sleep(2 * SOON)
        await visit.send(OK[-1:])
        await visit.gone()

    names = ("first-byte", "idle", "total")
    own = {f"{name}_timeout".replace("-", "_"): none for name in names}
    setting = proxy_for(f"unix:{path}", settings=herd or own)
    if herd:
        setting.catalog.models["m"].timeouts = {f"{name}-timeout": none for name in names}
    async with instance(path, script):
        call = await Call(setting.proxy).done()
        assert (call.status, call.body) == (200, b"ok")
        await setting.pools.close()


async def test_c138_a_models_own_limit_goes_before_the_herds(path: Path) -> None:
    """A long limit for the herd, a short one for the model: the model's counts."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.gone()

    setting = proxy_for(f"unix:{path}", settings={"first_byte_timeout": 600})
    setting.catalog.models["m"].timeouts = {"first-byte-timeout": SOON}
    async with instance(path, script):
        with pytest.raises(ApiError, match=f"within {SOON} s"):
            await Call(setting.proxy).done()
        await setting.pools.close()


async def test_c138_a_full_backlog_has_the_limit_of_connecting(path: Path) -> None:
    """Nobody accepts and the backlog is full: refused by name with a limit, waited for without one."""
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        listening.bind(str(path))
        listening.listen(0)
        first.connect(str(path))
        with pytest.raises(Unreachable, match="connect-timeout"):
            await Pool(f"unix:{path}", SOON)._connect()
        waiting = asyncio.create_task(Pool(f"unix:{path}", None)._connect())
        await asyncio.sleep(4 * SOON)
        assert not waiting.done()
        listening.accept()[0].close()
        connection = await asyncio.wait_for(waiting, PATIENCE_S)
        connection.abort()
