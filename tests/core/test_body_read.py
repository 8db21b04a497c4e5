"""Bodies as they are read and kept: limits, codings, files, clients that leave."""

import asyncio
import math
import tracemalloc
import zlib
from typing import Any

import pytest

from llamastead.gateway.body import MEMORY_BYTES, Body, ClientGone, read_body
from llamastead.shared.errors import ApiError


async def read(
    pieces: list[bytes],
    *headers: tuple[bytes, bytes],
    limit: int = 10_000_000,
    search: bool = True,
    gone: bool = False,
) -> Body:
    """Read a body from a `receive` that gives these pieces; `gone`: the client leaves before the last."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if gone:
        messages[-1] = {"type": "http.disconnect"}
    else:
        messages[-1]["more_body"] = False
    queue = iter(messages)

    async def receive() -> Any:
        return next(queue)

    return await read_body(receive, headers, limit, search=search)


async def never() -> Any:
    """A `receive` that nobody may call."""
    raise AssertionError("nothing may be read")


async def again(body: Body) -> bytes:
    """Read the whole body back."""
    if body.in_memory:
        return body.data
    parts: list[bytes] = []
    while (size := sum(map(len, parts))) < body.size:
        parts.append(await body.read_at(size))
    return b"".join(parts)


@pytest.mark.parametrize("size", [0, 10, MEMORY_BYTES, MEMORY_BYTES + 1, 3 * MEMORY_BYTES])
async def test_a_body_can_be_read_again_exactly(size: int) -> None:
    """Bodies around the memory limit, in pieces: held in memory or in a file, given back exactly, twice."""
    data = b'{"model":"m","x":"' + b"y" * size + b'"}' if size else b""
    count = math.ceil(len(data) / 65_536) or 1
    body = await read([data[k * 65_536 : (k + 1) * 65_536] for k in range(count)])
    assert body.model == ("m" if size else None)
    assert body.in_memory == (len(data) <= MEMORY_BYTES)
    assert [await again(body), await again(body)] == [data, data]
    body.close()


async def test_c144_a_body_at_the_limit_passes_and_one_byte_more_is_413() -> None:
    """Sizes at the limit and above, announced or not: 413 only above, an announced one unread."""
    data = b'{"model":"m"}'
    for pieces in ([data], [data[:5], data[5:]]):
        body = await read(pieces, limit=len(data))
        assert body.model == "m"
        with pytest.raises(ApiError) as refused:
            await read(pieces, limit=len(data) - 1)
        assert refused.value.status == 413
    with pytest.raises(ApiError) as refused:
        await read_body(never, [(b"content-length", b"14")], 13, search=True)
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"content-length", b"2"), (b"transfer-encoding", b"chunked")], 400),
        ([(b"content-length", b"-2")], 400),
        ([(b"content-encoding", b"br")], 415),
        ([(b"content-encoding", b"zstd")], 415),
        ([(b"content-encoding", b"gzip, gzip")], 415),
        ([(b"content-type", b"multipart/form-data")], 400),
    ],
)
async def test_c142_a_body_with_two_lengths_or_an_unknown_form_is_refused(
    headers: list[tuple[bytes, bytes]], status: int
) -> None:
    """Heads that can't be right: refused before anything is counted."""
    with pytest.raises(ApiError) as refused:
        await read([b"{}"], *headers)
    assert refused.value.status == status


GZIP, DEFLATE = zlib.MAX_WBITS | 16, zlib.MAX_WBITS


def packed(data: bytes, bits: int = GZIP) -> bytes:
    """Compress, as gzip unless told otherwise."""
    packer = zlib.compressobj(9, wbits=bits)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize(("coding", "bits"), [(b"gzip", GZIP), (b"X-GZip ", GZIP), (b"deflate", DEFLATE)])
async def test_c145_a_compressed_body_is_kept_decoded(coding: bytes, bits: int, step: int) -> None:
    """Each known coding, cut anywhere, small and spooled: decoded exactly, the model found on the way."""
    for size in (10, 3 * MEMORY_BYTES):
        data = b'{"x":"' + b"y" * size + b'","model":"m"}'
        raw = packed(data, bits)
        pieces = [raw[at : at + step] for at in range(0, len(raw), step)]
        body = await read(pieces, (b"content-encoding", coding))
        assert body.model == "m"
        assert await again(body) == data
        body.close()


async def test_c145_joined_members_and_an_empty_body_are_whole() -> None:
    """Two gzip members end to end are one body; a coding announced for no body at all hurts nobody."""
    joined = await read([packed(b'{"model":') + packed(b'"m"}')], (b"content-encoding", b"gzip"))
    assert (joined.model, joined.data) == ("m", b'{"model":"m"}')
    assert (await read([b""], (b"content-encoding", b"gzip"))).size == 0


@pytest.mark.parametrize("data", [packed(b'{"model":"m"}')[:-3], b"not gzip", packed(b"{}") + b"tail"])
async def test_c145_what_is_not_the_coding_it_names_is_400(data: bytes) -> None:
    """Cut short, plain text, and something behind the end: 400 that names the coding."""
    with pytest.raises(ApiError, match="not valid gzip") as refused:
        await read([data], (b"content-encoding", b"gzip"))
    assert refused.value.status == 400


async def test_c145_a_bomb_is_413_and_costs_no_memory() -> None:
    """Two MiB that decode to 2 GiB, in one piece, limit 50 MB: 413, with a few MiB of memory at most."""
    bomb = packed(b"[" + b" " * (1 << 20)) + packed(b" " * (1 << 20)) * 2047
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refused:
            await read([bomb], (b"content-encoding", b"gzip"), limit=50_000_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.status == 413
    assert peak < 16 << 20


async def test_broken_json_in_a_large_body_is_400_with_its_place() -> None:
    """A spooled body that breaks off at its end: 400 that says where."""
    with pytest.raises(ApiError, match="line 1, column") as refused:
        await read([b'{"model":"m","x":"', b"y" * 2 * MEMORY_BYTES, b'"'])
    assert refused.value.status == 400


async def test_a_client_that_leaves_during_its_upload_is_gone() -> None:
    """The disconnect comes before the body's end: ClientGone, whether the body is still in memory or not."""
    for size in (10, 2 * MEMORY_BYTES):
        with pytest.raises(ClientGone):
            await read([b'["' + b"y" * size, b""], gone=True)


async def test_cancelled_while_it_writes_the_file_closes_after_the_write() -> None:
    """Cancel in the middle of a spill: the read ends at once; a file left open would fail the test run."""
    started = asyncio.Event()

    async def receive() -> Any:
        started.set()
        return {"type": "http.request", "body": b" " * (MEMORY_BYTES + 1), "more_body": True}

    task = asyncio.create_task(read_body(receive, [], 1 << 30, search=False))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
