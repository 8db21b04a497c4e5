"""Waiting for a condition, never for a time."""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

PATIENCE_S = 30.0


async def until(look: Callable[[], Awaitable[Any] | Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Call `look` until it returns something true, and return that; fail naming `what` when patience ends.

    `look` may be a coroutine function; exceptions of an HTTP client, and of reading about a process that has
    just gone, count as "not yet".
    """
    end = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(httpx.HTTPError, ConnectionError, FileNotFoundError, ProcessLookupError):
            found = look()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
        assert time.monotonic() < end, f"gave up after {patience_s} s waiting for {what}"
        await asyncio.sleep(0.01)


def until_blocking(look: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Do what `until` does where no event loop runs, or none that has to go on."""
    end = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < end, f"gave up after {patience_s} s waiting for {what}"
        time.sleep(0.02)
    return found
