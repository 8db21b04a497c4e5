"""Answers of instances in every framing, and what is none, over a pool's connections."""

import asyncio
from pathlib import Path

import pytest
from byte_path_kit import OK, Visit, answering, chunk, instance
from pool_kit import EMPTY, HEAD, ask, whole
from waiting import PATIENCE_S

from llamastead.gateway.upstream import Pool, UpstreamDied

FRAMINGS = {
    "length": (OK, (200, b"ok"), True),
    "chunked": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"o") + chunk(b"k") + chunk(b""),
        (200, b"ok"),
        True,
    ),
    "trailers": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk(b"ok")
        + b"0\r\nX-Late: 1\r\nX-More: 2\r\n\r\n",
        (200, b"ok"),
        True,
    ),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b""), True),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", (304, b""), True),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nX-A: b\r\n\r\n" + OK,
        (200, b"ok"),
        True,
    ),
    "close": (OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), (200, b"ok"), False),
    "1.0": (OK.replace(b"HTTP/1.1", b"HTTP/1.0"), (200, b"ok"), False),
    "empty": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", (200, b""), True),
}


@pytest.mark.parametrize("name", FRAMINGS)
@pytest.mark.parametrize("pieces", [1, 3, 1000])
async def test_c153_every_framing_is_read_and_kept_or_closed_as_it_says(
    path: Path, name: str, pieces: int
) -> None:
    """Each framing, in pieces: status and body come out, and the connection is reused if it may be."""
    raw, expected, kept = FRAMINGS[name]
    step = max(1, len(raw) // pieces)

    async def script(visit: Visit) -> None:
        while True:
            await visit.request()
            for at in range(0, len(raw), step):
                await visit.send(raw[at : at + step])

    async with instance(path, script) as made:
        connections = Pool(made.address)
        answers = [await ask(connections) for _ in range(3)]
        assert answers == [expected] * 3
        assert made.visits == (1 if kept else 3)
        assert (connections.busy, connections.idle) == (0, 1 if kept else 0)
        connections.close()
        await made.all_closed()


async def test_trailers_and_interim_headers_reach_nobody(path: Path) -> None:
    """Headers before and after the answer's own: dropped, also from the next answer on the connection."""
    async with instance(
        path, answering(FRAMINGS["interim"][0][: -len(OK)] + FRAMINGS["trailers"][0])
    ) as made:
        connections = Pool(made.address)
        for _ in range(2):
            response = await connections.exchange(HEAD, EMPTY)
            assert response.headers == [(b"transfer-encoding", b"chunked")]
            await whole(response)
        connections.close()


async def test_an_answer_to_head_has_no_body_whatever_it_says(path: Path) -> None:
    """HEAD answered with a Content-Length: ends with its head; the next request gets its own answer."""
    head_answer = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"
    async with instance(path, answering(head_answer)) as made:
        connections = Pool(made.address)
        assert await ask(connections, bodiless=True) == (200, b"")
        assert await ask(connections, bodiless=True) == (200, b"")
        connections.close()


async def test_an_answer_without_length_ends_with_the_connection(path: Path) -> None:
    """Neither length nor chunks: the close is the end, and no error."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(b"HTTP/1.1 200 OK\r\n\r\nuntil")
        await visit.send(b" the end")

    async with instance(path, script) as made:
        assert await ask(Pool(made.address)) == (200, b"until the end")


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH\r\n", OK.replace(b"Length: 2", b"Length: x"), b"\x00" * 99]
)
async def test_what_is_no_http_is_an_error(path: Path, answer: bytes) -> None:
    """Garbage in place of an answer: an error, and the connection is closed."""
    async with instance(path, answering(answer)) as made:
        with pytest.raises(UpstreamDied, match="no HTTP"):
            await ask(Pool(made.address))
        await made.all_closed()


async def test_bytes_that_belong_to_no_request_end_the_connection(path: Path) -> None:
    """More after an answer than it announced: the connection is never used again."""
    async with instance(path, answering(OK + b"HTTP/1.1 500 Smuggled\r\nContent-Length: 0\r\n\r\n")) as made:
        connections = Pool(made.address)
        assert await ask(connections) == (200, b"ok")
        assert await ask(connections) == (200, b"ok")
        assert made.visits == 2


async def test_pieces_are_poured_until_one_is_declined_and_the_last_is_left_to_be_read(path: Path) -> None:
    """Pour an answer into somebody who takes one piece and declines the next: that one is read, and so is
    the last; pouring goes on in between.
    """
    steps = asyncio.Queue[bytes]()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await visit.send(await steps.get())

    async with instance(path, script) as made, asyncio.timeout(PATIENCE_S):
        response = await Pool(made.address).exchange(HEAD, EMPTY)
        taken: list[bytes] = []

        def takes_one(data: bytes) -> bool:
            if taken:
                return False
            taken.append(data)
            steps.put_nowait(chunk(b"two"))
            return True

        def takes_all(data: bytes) -> bool:
            taken.append(data)
            steps.put_nowait(chunk(b"four") + chunk(b""))
            return True

        steps.put_nowait(chunk(b"one"))
        await response.pour(takes_one)
        assert taken == [b"one"]
        assert await response.read() == b"two"
        steps.put_nowait(chunk(b"three"))
        await response.pour(takes_all)
        assert taken == [b"one", b"three"]
        assert await whole(response) == b"four"
