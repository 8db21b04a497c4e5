"""Notices that a client went away, whatever its request is waiting for."""

import asyncio
from types import TracebackType

from llamastead.gateway.body import ClientGone, Receive

WATCH_AFTER_S = 0.25
"""A request that ends sooner is not watched: a task of its own would be a tenth of a short request's cost."""


class ClientWatch:
    """An async context: what runs inside is cancelled when the client goes, and ClientGone is raised.

    Requires: the request's body has been read; nobody else calls `receive` inside.
    """

    def __init__(self, receive: Receive, loop: asyncio.AbstractEventLoop) -> None:
        self._receive = receive
        self._loop = loop
        self._inside: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._gone = False
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        """Begin to watch a little later."""
        self._inside = asyncio.current_task(self._loop)
        assert self._inside is not None
        self._cancelling = self._inside.cancelling()
        self._timer = self._loop.call_later(WATCH_AFTER_S, self._start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; turn our own cancellation, and no other, into ClientGone."""
        task, self._inside = self._inside, None
        assert task is not None
        assert self._timer is not None
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from None

    def _start(self) -> None:
        self._watcher = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
            pass
        if self._inside is not None:
            self._gone = True
            self._inside.cancel()
