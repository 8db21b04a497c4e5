"""An answer's head and the beginning of its body in one system call: sending is what a request costs most.

uvicorn writes the two apart and uvloop sends each at once. An application that has the body's first piece at
hand says so in its `http.response.start` message: `"body_follows": True`, and sends that piece at once.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from llamastead.gateway.body import Message, Receive
from llamastead.gateway.seams import Scope


class JoinedWrites:
    """A transport around another one: after `hold`, what is written goes out with the write that follows."""

    __slots__ = ("_held", "_holding", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._holding = False
        self._held = b""

    def hold(self) -> None:
        """Keep the next write back until there is another one."""
        self._holding = True

    def write(self, data: bytes) -> None:
        """Send `data` and what was held back before, or hold it back."""
        if self._holding:
            self._holding, self._held = False, data
        elif self._held:
            data, self._held = self._held + data, b""
            self._transport.write(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Send what is held back and close."""
        if self._held:
            self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def call_joined(app: Any, transport: JoinedWrites, scope: Scope, receive: Receive, send: Any) -> None:
    """Call an ASGI application whose server writes to `transport`."""

    def send_joined(message: Message) -> Awaitable[None]:
        if "body_follows" in message:
            transport.hold()
        sent: Awaitable[None] = send(message)
        return sent

    await app(scope, receive, send_joined)
