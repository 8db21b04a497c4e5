"""A reference: the reverse proxy one writes first in Python, Starlette and httpx. `… PORT UPSTREAM_PORT`."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

_DROPPED = ("connection", "transfer-encoding", "keep-alive")


def make_app(upstream: int) -> Starlette:
    """Return an application that passes everything on to a port of this machine."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{upstream}", timeout=None, limits=limits)  # noqa: S113

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    async def forward(request: Request) -> StreamingResponse:
        asked = client.build_request(
            request.method, request.url.path, headers=request.headers.raw, content=await request.body()
        )
        answer = await client.send(asked, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()

        headers = {name: value for name, value in answer.headers.items() if name not in _DROPPED}
        return StreamingResponse(body(), answer.status_code, headers)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])], lifespan=lifespan)


if __name__ == "__main__":
    uvicorn.run(make_app(int(sys.argv[2])), port=int(sys.argv[1]), log_level="warning", access_log=False)
