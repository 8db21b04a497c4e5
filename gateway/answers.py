"""The few ways in which the gateway answers a request itself."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from llamastead.shared.errors import ApiError
from llamastead.shared.store.errors import NoHerd

BODY_LIMIT = 64 * 1024
_HTTP: Scope = {"type": "http"}


def no_answer(problem: Exception, so: str) -> ApiError:
    """Return what a client is told when the store raised a problem; `so` says what could not be done."""
    if isinstance(problem, NoHerd):
        return ApiError(503, "No supervisor has opened the herd yet", retry_after=5)
    return ApiError(503, f"Redis is not reachable: {so}", retry_after=5)


async def send_json(
    send: Send, status: int, answer: Any, request_id: str, retry_after: int | None = None
) -> None:
    """Send a JSON answer with the headers that all of ours carry."""
    headers = {"x-request-id": request_id}
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
    response = JSONResponse(answer, status, headers, media_type="application/json; charset=utf-8")
    await response(_HTTP, _unread, send)


async def send_error(send: Send, error: ApiError, request_id: str) -> None:
    """Send a refusal in llama-server's shape."""
    await send_json(send, error.status, error.body(), request_id, error.retry_after)


async def send_empty(send: Send, request_id: str) -> None:
    """Send a whole answer without content."""
    await Response(None, 204, {"x-request-id": request_id})(_HTTP, _unread, send)


async def send_text(send: Send, text: str, request_id: str, media_type: str = "text/plain") -> None:
    """Send a whole answer of plain text."""
    await Response(text, 200, {"x-request-id": request_id}, media_type)(_HTTP, _unread, send)


async def _unread() -> Any:
    raise RuntimeError("a whole answer reads nothing of its request")


async def send_stream(
    receive: Receive, send: Send, chunks: AsyncGenerator[bytes], media_type: str, request_id: str
) -> None:
    """Send chunks as they come, until they end or the client has gone, and close their source."""
    headers = [
        (b"content-type", media_type.encode()),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        (b"x-request-id", request_id.encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(_until_disconnect(receive))
        pumping = tasks.create_task(_pump(send, chunks))
        await asyncio.wait((gone, pumping), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        pumping.cancel()


async def _pump(send: Send, chunks: AsyncGenerator[bytes]) -> None:
    async with aclosing(chunks):
        # The head goes out at once, before there is anything to tell.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Return the body of a small request; ApiError 413 when it is too big, 400 when the client has left."""
    body = bytearray()
    try:
        async for chunk in Request(scope, receive).stream():
            body += chunk
            if len(body) > BODY_LIMIT:
                raise ApiError(413, f"the body of this request may have {BODY_LIMIT} bytes")
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete") from None
    return bytes(body)


def parse_json(body: bytes) -> Any:
    """Return the value that a small request's body is. Raises ApiError 400 for one that is no JSON."""
    try:
        return json.loads(body)
    except ValueError as problem:
        raise ApiError(400, f"the body is not valid JSON: {problem}") from None
    except RecursionError:
        raise ApiError(400, "the body is not valid JSON: it is nested too deep") from None
