"""Answers as the edge writes them: framing, what leaves together, what is refused."""

import asyncio
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from llamastead.gateway.writer import AnswerWriter

DATE = (b"date", b"today")


class Sink:
    """A transport that notes what reaches it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def write(self, data: bytes) -> None:
        """Note a write."""
        self.calls.append(data)

    def close(self) -> None:
        """Note the end."""
        self.calls.append("close")


class Flow:
    """A client that reads as fast as it is written to."""

    write_paused = False


def answering(method: str = "POST", *, keep_alive: bool = True) -> tuple[RequestResponseCycle, Sink]:
    """Return uvicorn's record of a request that waits for its answer, and what the answer goes to."""
    sink = Sink()
    cycle = RequestResponseCycle(
        scope={"method": method, "http_version": "1.1"},  # type: ignore[typeddict-item]
        transport=sink,  # type: ignore[arg-type]
        flow=Flow(),  # type: ignore[arg-type]
        logger=None,  # type: ignore[arg-type]
        access_logger=None,  # type: ignore[arg-type]
        access_log=False,
        default_headers=[DATE],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: sink.calls.append("done"),
    )
    return cycle, sink


async def answer(
    cycle: RequestResponseCycle, status: int, headers: Any, *pieces: bytes, **start: Any
) -> None:
    """Send a head and a body in pieces."""
    send = AnswerWriter(cycle)
    await send({"type": "http.response.start", "status": status, "headers": headers, **start})
    for number, piece in enumerate(pieces, start=1):
        await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})


HEAD = b"HTTP/1.1 200 OK\r\ndate: today\r\n"


async def test_a_head_leaves_with_the_piece_that_was_promised() -> None:
    """The same answer with and without the promise: one write or two, the same bytes."""
    for start, writes in (({"body_follows": True}, 1), ({}, 2)):
        cycle, sink = answering()
        await answer(cycle, 200, [(b"content-length", b"2")], b"ok", **start)
        assert b"".join(sink.calls[:-1]) == HEAD + b"content-length: 2\r\n\r\nok"
        assert (len(sink.calls) - 1, sink.calls[-1]) == (writes, "done")
        assert cycle.response_complete


async def test_a_body_without_length_goes_out_in_chunks_and_an_unended_one_has_no_end() -> None:
    """Pieces, an empty one among them, then the end; and a stream that never says its last."""
    cycle, sink = answering()
    await answer(cycle, 200, [], b"a" * 10, b"", b"b", b"")
    assert sink.calls == [
        HEAD + b"transfer-encoding: chunked\r\n\r\n",
        b"a\r\naaaaaaaaaa\r\n",
        b"1\r\nb\r\n",
        b"0\r\n\r\n",
        "done",
    ]
    cycle, sink = answering()
    send = AnswerWriter(cycle)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"c", "more_body": True})
    assert sink.calls[1:] == [b"1\r\nc\r\n"]
    assert not cycle.response_complete


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
async def test_c153_where_no_body_may_be_none_is_framed_or_sent(method: str, status: int) -> None:
    """HEAD, 204 and 304: a head without Transfer-Encoding, also when the body was promised, and no body."""
    for start in ({"body_follows": True}, {}):
        cycle, sink = answering(method)
        await answer(cycle, status, [], b"unwanted", **start)
        assert b"transfer-encoding" not in sink.calls[0]
        assert sink.calls[0].endswith(b"\r\n\r\n")
        assert sink.calls[1:] == ["done"]


@pytest.mark.parametrize(("keep_alive", "headers"), [(False, []), (True, [(b"connection", b"close")])])
async def test_a_last_answer_says_so_and_closes(keep_alive: bool, headers: Any) -> None:
    """Wished by the client or by the application: Connection: close once, then the end of the connection."""
    cycle, sink = answering(keep_alive=keep_alive)
    await answer(cycle, 200, headers, b"ok")
    assert sink.calls[0].count(b"connection: close\r\n") == 1
    assert sink.calls[-2:] == ["close", "done"]


@pytest.mark.parametrize("body", [b"o", b"oks"])
async def test_a_body_of_another_length_is_an_error(body: bytes) -> None:
    """Too short and too long: refused before it counts as complete."""
    cycle, _ = answering()
    with pytest.raises(RuntimeError, match="Content-Length"):
        await answer(cycle, 200, [(b"content-length", b"2")], body)
    assert not cycle.response_complete


async def test_a_client_that_has_gone_is_written_nothing() -> None:
    """A disconnect before the head: nothing is written, nothing raised."""
    cycle, sink = answering()
    cycle.disconnected = True
    await answer(cycle, 200, [], b"ok")
    assert sink.calls == []


async def test_a_piece_is_passed_on_at_once_but_to_nobody_who_cannot_take_it() -> None:
    """Pass a piece on: it is written as one that is sent. To a client that reads too slowly, or has gone:
    nothing is written.
    """
    cycle, sink = answering()
    send = AnswerWriter(cycle)
    await send({"type": "http.response.start", "status": 200, "headers": [], "body_follows": True})
    assert send.pass_on(b"one")
    assert sink.calls[-1].endswith(b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n")
    written = list(sink.calls)
    cycle.flow.write_paused = True
    assert not send.pass_on(b"two")
    cycle.flow.write_paused, cycle.disconnected = False, True
    assert not send.pass_on(b"two")
    assert sink.calls == written
