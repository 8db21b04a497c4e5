"""Answers of an instance, valid and damaged and cut anywhere: one verdict, and never another error."""

import asyncio
import http.client
import io
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from byte_path_kit import OK, SSE_HEAD, chunk
from hypothesis import example, given
from hypothesis import strategies as st

from llamastead.gateway.body import Body
from llamastead.gateway.upstream.connection import Connection, UpstreamDied

ANSWERS = [
    OK,
    SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b": ping\n\n") + chunk(b"data: [DONE]\n\n") + chunk(b""),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nX-Late: 1\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + OK,
    b"HTTP/1.1 204 No Content\r\nServer: llama.cpp\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
    OK.replace(b"HTTP/1.1", b"HTTP/1.0"),
    OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
]
CUTS = st.lists(st.integers(0, 10_000), max_size=8)
CORPUS = sorted((Path(__file__).parent.parent / "corpus" / "answers").iterdir())
"""Answers that a parser got wrong once, or might: a file each, kept for ever. Its name begins with what must
come of it: `answered` or `died`."""


class Wire(asyncio.Transport):
    """A transport to nowhere that notes that it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: Any) -> None:
        """Drop it."""

    def abort(self) -> None:
        """Note it."""
        self.aborted = True


def verdict(data: bytes, cuts: list[int]) -> tuple[Any, ...]:
    """Feed an answer in pieces, close, and return what came of it and whether the connection was kept."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[a:b] for a, b in pairwise(places)]

    async def take(connection: Connection) -> tuple[Any, ...]:
        body = b""
        try:
            await connection.request(b"", Body(), bodiless=False)
            while not connection.ended:
                body += await connection.read()
        except UpstreamDied as died:
            return ("died", died.answered)
        return (connection.status, connection.headers, body)

    async def run() -> tuple[Any, ...]:
        wire, connection = Wire(), Connection(asyncio.get_running_loop(), lambda _: None)
        connection.connection_made(wire)
        taking = asyncio.create_task(take(connection))
        await asyncio.sleep(0)
        for piece in pieces:
            if not wire.aborted:
                connection.data_received(piece)
        kept = connection.reusable
        connection.connection_lost(None)
        return (*await taking, kept)

    return asyncio.run(run())


@given(st.sampled_from(ANSWERS), CUTS)
def test_a_valid_answer_is_the_same_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    """Each framing in any pieces: the answer that it is in one piece."""
    whole = verdict(data, [])
    assert whole[0] != "died"
    assert verdict(data, cuts) == whole


@given(st.sampled_from(ANSWERS), st.integers(0, 10_000), st.binary(max_size=6), st.integers(0, 4), CUTS)
@example(OK, len(OK), b"HTTP/1", 0, [])
@example(ANSWERS[2], 0, b"", 4, [])
def test_a_damaged_answer_gets_one_verdict(
    data: bytes, at: int, put: bytes, dropped: int, cuts: list[int]
) -> None:
    """Bytes put in, left out or behind the end: answered or died, the same in any pieces, no other error."""
    at %= len(data) + 1
    damaged = data[:at] + put + data[at + dropped :]
    assert verdict(damaged, cuts)[:-1] == verdict(damaged, [])[:-1]


@given(st.binary(max_size=200), CUTS)
def test_any_bytes_get_a_verdict(data: bytes, cuts: list[int]) -> None:
    """Anything at all: a verdict, the same in any pieces."""
    assert verdict(data, cuts)[:-1] == verdict(data, [])[:-1]


def by_full_parser(data: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """What the standard library's client makes of an answer without interim ones."""

    class Wire:
        def makefile(self, _mode: str) -> io.BytesIO:
            return io.BytesIO(data)

    answer = http.client.HTTPResponse(cast("socket.socket", Wire()), method="POST")
    answer.begin()
    body = answer.read()
    headers = [
        (name.lower().encode(), value.strip().encode("latin-1")) for name, value in answer.getheaders()
    ]
    return answer.status, headers, body


names = st.sampled_from(["X-A", "x-b", "Content-Type", "Cache-Control", "Server", "X-Empty"])
words = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12)
fields = st.lists(st.tuples(names, words), max_size=5)
bodies = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


@given(
    st.sampled_from([200, 201, 400, 404, 500, 503]),
    fields,
    bodies,
    st.sampled_from(["length", "chunked", "close"]),
    st.booleans(),
    CUTS,
)
def test_a_generated_answer_is_what_a_full_parser_makes_of_it(
    status: int,
    headers: list[tuple[str, str]],
    pieces: list[bytes],
    framing: str,
    interim: bool,
    cuts: list[int],
) -> None:
    """Any status, headers and body in each framing, cut anywhere: the standard library reads the same."""
    lines = [f"{name}: {value}" for name, value in headers]
    body = b"".join(pieces)
    if framing == "length":
        lines.append(f"Content-Length: {len(body)}")
    elif framing == "chunked":
        lines.append("Transfer-Encoding: chunked")
        body = b"".join(map(chunk, pieces)) + chunk(b"")
    head = "\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode()
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" if interim else b""
    assert verdict(hints + head + body, cuts)[:3] == by_full_parser(head + body)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_the_kept_answers_get_their_verdict_in_any_pieces(path: Path) -> None:
    """Each whole, byte by byte, and cut in two everywhere: the verdict that its name says."""
    data = path.read_bytes()
    whole = verdict(data, [])
    assert (whole[0] == "died") == (path.name.split("-")[0] == "died"), whole
    assert verdict(data, list(range(len(data))))[:-1] == whole[:-1]
    for cut in range(len(data)):
        assert verdict(data, [cut])[:-1] == whole[:-1]
