"""Calls from web pages: any origin may call, none with the browser's own credentials such as cookies.

Keys travel in a header that a page must set itself, so an origin gains nothing it does not know already.
"""

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

ALLOWED_METHODS = "GET, POST, DELETE, OPTIONS"
ALLOWED_HEADERS = "*, Authorization"  # the star does not cover that one
ALLOW_ORIGIN = b"access-control-allow-origin"


def allow_origin(send: Send, origin: bytes) -> Send:
    """Return a `send` that names `origin` in the answer's head, in place of what an instance said there."""

    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message["headers"] if name.lower() != ALLOW_ORIGIN]
            message = {**message, "headers": [*headers, (ALLOW_ORIGIN, origin), (b"vary", b"Origin")]}
        await send(message)

    return send_with_origin


async def preflight(scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
    """Answer an OPTIONS request: what a page may send."""
    headers = {
        "access-control-allow-headers": ALLOWED_HEADERS,
        "access-control-allow-methods": ALLOWED_METHODS,
        "x-request-id": request_id,
    }
    await Response(b"", 200, headers)(scope, receive, send)
