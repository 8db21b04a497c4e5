"""Whole exchanges over a pool of connections."""

import asyncio

from waiting import PATIENCE_S

from llamastead.gateway.body import Body
from llamastead.gateway.upstream import Pool, Response

HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
EMPTY = Body()


async def whole(response: Response) -> bytes:
    """Read an answer to its end and give the connection back."""
    parts = []
    while data := await response.read():
        parts.append(data)
    assert response.ended
    response.close()
    return b"".join(parts)


async def ask(made: Pool, *, bodiless: bool = False) -> tuple[int, bytes]:
    """One exchange, whole."""
    async with asyncio.timeout(PATIENCE_S):
        response = await made.exchange(HEAD, EMPTY, bodiless=bodiless)
        return response.status, await whole(response)
