"""A client that leaves, in every phase of a proxied request and under both versions of the ASGI contract."""

import asyncio
from pathlib import Path

import pytest
from byte_path_kit import OK, SSE_HEAD, Call, Setting, Visit, chunk, instance, proxy_for
from waiting import PATIENCE_S

from llamastead.gateway import watch

SPECS = pytest.mark.parametrize("spec", ["2.3", "2.4"])


async def leaves(call: Call, setting: Setting) -> None:
    """Let the client leave; the call ends quietly at once with nothing counted or connected."""
    call.left.set()
    async with asyncio.timeout(5):  # a moment, with slack for a machine that stops us
        await call.done()
    assert setting.admission.open_claims == 0
    assert all(busy == 0 for busy, _ in setting.pools.counts().values())


async def mute(visit: Visit) -> None:
    """Take a request and never answer."""
    await visit.request()
    await visit.gone()


@SPECS
async def test_c28_r9_a_client_that_leaves_while_it_waits_gives_its_ticket_back(spec: str) -> None:
    """Leave while admission holds the request: the acquire is cancelled, no answer begins."""
    setting = proxy_for("unix:/nowhere")
    setting.admission.held = asyncio.Event()
    call = Call(setting.proxy, spec=spec).start()
    await setting.admission.waiting.wait()
    await leaves(call, setting)
    assert setting.admission.given_back.is_set()
    assert call.sent == []


@SPECS
async def test_c30_c28_a_client_that_leaves_before_the_first_byte_is_noticed(path: Path, spec: str) -> None:
    """Leave while the instance is silent: its connection closes at once, the claim is given back."""
    async with instance(path, mute) as made:
        setting = proxy_for(made.address)
        call = Call(setting.proxy, body=b'{"model":"m","stream":true}', spec=spec).start()
        await made.arrived.wait()
        await leaves(call, setting)
        await made.all_closed()


@SPECS
async def test_r14_a_client_that_leaves_while_the_stream_is_silent_is_noticed(path: Path, spec: str) -> None:
    """Leave between two chunks, while the gateway reads from the instance: closed and given back."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await visit.gone()

    async with instance(path, script) as made:
        setting = proxy_for(made.address)
        call = Call(setting.proxy, spec=spec).start()
        async with asyncio.timeout(PATIENCE_S):
            while not call.body:
                call.something_sent.clear()
                await call.something_sent.wait()
        await leaves(call, setting)
        await made.all_closed()


@SPECS
async def test_r14_a_client_that_leaves_while_a_send_waits_is_noticed(path: Path, spec: str) -> None:
    """Leave while the gateway is stuck in `send` on a slow client: closed and given back."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await visit.gone()

    async with instance(path, script) as made:
        setting = proxy_for(made.address)
        call = Call(setting.proxy, spec=spec)
        call.take = asyncio.Event()
        call.start()
        await call.something_sent.wait()
        await leaves(call, setting)
        await made.all_closed()


@SPECS
async def test_c31_a_client_that_leaves_right_after_the_head_leaks_nothing(path: Path, spec: str) -> None:
    """Leave between the head and the body of an endless stream, five hundred times: all is closed."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(SSE_HEAD)
        while True:
            await visit.send(chunk(b"data: 1\n\n" * 100))

    async with instance(path, script) as made:
        setting = proxy_for(made.address)
        for _ in range(5):
            calls = [Call(setting.proxy, spec=spec).start() for _ in range(100)]
            for call in calls:
                await call.something_sent.wait()
                call.left.set()
            await asyncio.gather(*(call.done() for call in calls))
        assert setting.admission.open_claims == 0
        assert all(counts == (0, 0) for counts in setting.pools.counts().values())
        await made.all_closed()


async def test_a_send_that_fails_ends_the_request_at_once(path: Path) -> None:
    """ASGI 2.4 raises from `send` before the watch begins: quiet end, connection closed, claim given back."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(OK[:-1])
        await visit.gone()

    async with instance(path, script) as made:
        setting = proxy_for(made.address)
        call = Call(setting.proxy, spec="2.4")
        call.left.set()
        await call.done()
        assert (call.sent, setting.admission.open_claims) == ([], 0)
        await made.all_closed()


async def test_a_client_that_leaves_during_its_upload_is_never_counted() -> None:
    """The disconnect comes in the middle of the body: quiet end before anything was asked for."""
    setting = proxy_for("unix:/nowhere")
    call = Call(setting.proxy, body=[b'{"model":', b'"m"}'])
    call.messages.pop()
    await leaves(call.start(), setting)
    assert setting.admission.asked == []


@pytest.mark.parametrize("phase", ["waiting", "silent", "streaming"])
async def test_a_cancelled_call_stays_cancelled_and_gives_all_back(path: Path, phase: str) -> None:
    """The server cancels the request itself: CancelledError comes out, connection and claim are gone."""

    async def script(visit: Visit) -> None:
        await visit.request()
        if phase == "streaming":
            await visit.send(SSE_HEAD)
        await visit.gone()

    async with instance(path, script) as made:
        setting = proxy_for(made.address)
        if phase == "waiting":
            setting.admission.held = asyncio.Event()
        call = Call(setting.proxy).start()
        await {
            "waiting": setting.admission.waiting,
            "silent": made.arrived,
            "streaming": call.something_sent,
        }[phase].wait()
        assert call.task is not None
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.done()
        assert setting.admission.open_claims == 0
        await made.all_closed()


@pytest.mark.parametrize("other", ["result", "error"])
async def test_a_leave_at_the_very_end_changes_nothing(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """The client leaves as the work ends by itself: its own result or error comes out, not a cancellation."""
    monkeypatch.setattr(watch, "WATCH_AFTER_S", 0)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def work() -> str:
        async with watch.ClientWatch(receive, asyncio.get_running_loop()):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if other == "error":
                    raise LookupError from None
        return "result"

    task = asyncio.create_task(work())
    await asyncio.wait([task])
    if other == "error":
        assert isinstance(task.exception(), LookupError)
    else:
        assert task.result() == "result"
    assert task.cancelling() == 0
