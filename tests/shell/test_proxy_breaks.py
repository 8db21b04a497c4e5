"""What a client sees of an instance that breaks off, dies or cannot be reached."""

import json
from pathlib import Path

import pytest
from byte_path_kit import (
    OK,
    SSE_HEAD,
    Call,
    answering,
    breaking,
    chunk,
    instance,
    proxy_for,
)

from llamastead.gateway.body import MEMORY_BYTES
from llamastead.gateway.seams import AnswerCut
from llamastead.shared.errors import ApiError

JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize(
    ("last", "between"),
    [(b"data: 1\n\n", b""), (b'data: {"choi', b"\n\n"), (b"data: 1\n", b"\n\n"), (b"", b"")],
)
async def test_c130_a_stream_that_breaks_ends_in_an_error_event_and_no_clean_end(
    path: Path, last: bytes, between: bytes
) -> None:
    """The instance dies between events or in one: an error event of its own, then the cut."""
    pieces = [SSE_HEAD] + ([chunk(last)] if last else [])
    async with instance(path, breaking(*pieces)) as made:
        setting = proxy_for(made.address)
        call = Call(setting.proxy)
        with pytest.raises(AnswerCut):
            await call.done()
        assert not call.complete
        assert call.body.startswith(last + between + b"data: ")
        error = json.loads(call.body.removeprefix(last + between + b"data: ").decode())["error"]
        assert error["code"] == 502
        assert call.body.endswith(b"\n\n")
        assert b"[DONE]" not in call.body
        assert setting.admission.open_claims == 0


async def test_c130_an_answer_that_breaks_is_cut(path: Path) -> None:
    """The instance dies inside a JSON answer: what came is passed on, without the end of a whole one."""
    async with instance(path, breaking(OK[:-1])) as made:
        setting = proxy_for(made.address)
        call = Call(setting.proxy)
        with pytest.raises(AnswerCut):
            await call.done()
        assert (call.body, call.complete) == (b"o", False)
        assert setting.admission.open_claims == 0


async def test_an_instance_that_dies_before_its_answer_is_502(path: Path) -> None:
    """No byte of an answer on a fresh connection: 502 in JSON, asked once, nothing left counted."""
    async with instance(path, breaking()) as made:
        setting = proxy_for(made.address)
        with pytest.raises(ApiError) as refused:
            await Call(setting.proxy).done()
        assert refused.value.status == 502
        assert (len(made.received), setting.admission.open_claims) == (1, 0)


@pytest.mark.parametrize("size", [0, 2 * MEMORY_BYTES])
async def test_an_address_that_refuses_is_traded_and_the_body_goes_out_whole(path: Path, size: int) -> None:
    """Two dead addresses, then a live one: the body arrives there, large or small, and no claim stays."""
    body = b'{"model":"m","x":"' + b"y" * size + b'"}'
    async with instance(path, answering()) as made:
        setting = proxy_for("unix:/nowhere/1", "unix:/nowhere/2", made.address)
        call = await Call(setting.proxy, body=[body[:10], body[10:]]).done()
        assert made.received[0].body == body
        assert call.header(b"x-llamastead-instance") == [b"host-1-2"]
        assert (len(setting.admission.claims), setting.admission.open_claims) == (3, 0)
        assert list(setting.pools.counts()) == ["host-1-2"]
        await setting.pools.close()


async def test_addresses_that_all_refuse_end_in_503() -> None:
    """Nothing but dead addresses: 503 after a few tries, no claim stays."""
    setting = proxy_for("unix:/nowhere")
    with pytest.raises(ApiError) as refused:
        await Call(setting.proxy).done()
    assert (refused.value.status, refused.value.retry_after) == (503, 1)
    assert setting.admission.open_claims == 0


async def test_r9_a_refusal_of_admission_reaches_the_client(path: Path) -> None:
    """Admission refuses: its error as it is, no connection made."""
    setting = proxy_for(f"unix:{path}")
    setting.admission.refusal = ApiError(429, "queue is full", retry_after=3)
    with pytest.raises(ApiError, match="queue is full"):
        await Call(setting.proxy).done()
