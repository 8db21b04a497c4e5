"""Calls from web pages of other origins: who may call, in the words of llama-server (`--cors-origins` …)."""

import re
from dataclasses import dataclass
from typing import Self

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llamastead.shared.settings import Settings

ANY, LOCAL = "*", "localhost"
_LOCAL = re.compile(rb"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::\d+)?")
_TAKEN_OVER = (b"access-control-allow-origin", b"access-control-allow-credentials", b"vary")


@dataclass(frozen=True)
class Cors:
    """What pages of other origins may do.

    `credentials`: whether they may use those of the browser, such as the login at a proxy in front; never
    while any origin may call. Keys travel in a header that a page sets itself.
    """

    origins: frozenset[str]
    methods: str
    headers: str
    credentials: bool

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return what the settings say."""
        origins = frozenset(part.strip() for part in settings.cors_origins.split(",") if part.strip())
        credentials = settings.cors_credentials and ANY not in origins
        return cls(origins, settings.cors_methods, settings.cors_headers, credentials)

    def allows(self, origin: bytes) -> bool:
        """Tell whether pages of this origin may call."""
        if ANY in self.origins or origin.decode("latin-1") in self.origins:
            return True
        return LOCAL in self.origins and _LOCAL.fullmatch(origin) is not None

    def answering(self, send: Send, origin: bytes) -> Send:
        """Return a `send` that says in the answer's head whether `origin` may read it.

        What an instance says of that is dropped, and its Vary is joined with ours.
        """
        ours = []
        if self.allows(origin):
            ours.append((b"access-control-allow-origin", origin))
            if self.credentials:
                ours.append((b"access-control-allow-credentials", b"true"))

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept, varies = [], []
                for header in message["headers"]:
                    if header[0].lower() not in _TAKEN_OVER:
                        kept.append(header)
                    elif header[0].lower() == b"vary":
                        varies += [word for word in header[1].split(b", ") if word.lower() != b"origin"]
                vary = (b"vary", b", ".join([*varies, b"Origin"]))
                message = {**message, "headers": [*kept, *ours, vary]}
            await send(message)

        return send_with_origin

    async def preflight(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        """Answer an OPTIONS request: what a page may send."""
        allowed = self.headers
        if allowed == ANY:
            # Browsers never count Authorization in the star, nor anything once credentials go along.
            asked = (value for name, value in scope["headers"] if name == b"access-control-request-headers")
            allowed = next(asked, b"").decode("latin-1") if self.credentials else ""
            allowed = allowed or f"{ANY}, Authorization"
        headers = {
            "access-control-allow-headers": allowed,
            "access-control-allow-methods": self.methods,
            "x-request-id": request_id,
        }
        await Response(b"", 200, headers)(scope, receive, send)
