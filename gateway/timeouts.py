"""How long a proxied request waits for its instance: for the first byte, between bytes, and in all."""

import asyncio
import math
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from llamastead.gateway.upstream import UpstreamDied

FIRST_BYTE, IDLE, TOTAL = "first-byte-timeout", "idle-timeout", "total-timeout"

Got = TypeVar("Got")


class TimedOut(UpstreamDied):
    """The instance was given up; the text names the setting."""


def limits(herd: Mapping[str, float], model: Mapping[str, float]) -> Mapping[str, float]:
    """Return the limits in force, in seconds by setting; the model's own go before the herd's."""
    return {name: seconds for name, seconds in {**herd, **model}.items() if seconds > 0}


class Patience:
    """The limits of one request, counted from now on: the moment in which its instance is asked."""

    def __init__(self, given: Mapping[str, float]) -> None:
        """Take what `limits` returned."""
        self._given = given
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + given.get(TOTAL, math.inf)

    async def wait(self, what: Awaitable[Got], setting: str = TOTAL) -> Got:
        """Await `what` within the limit of `setting` and in all. Raises TimedOut."""
        now = self._loop.time()
        own = now + self._given.get(setting, math.inf)
        if self._ends < own:
            own, setting = self._ends, TOTAL
        try:
            async with asyncio.timeout_at(own if own < math.inf else None) as limit:
                return await what
        except TimeoutError:
            if not limit.expired():
                raise
        raise TimedOut(f"not within {self._given[setting]:g} s ({setting})", answered=True)
