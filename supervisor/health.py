"""Finds ready instances that accept and never answer, by a /health probe every few seconds, each on its own,
and those that don't accept.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import httpx

from llamastead.shared.words import InstanceState
from llamastead.supervisor.core.events import Event, Unresponsive
from llamastead.supervisor.core.state import State

log = logging.getLogger(__name__)

MISSES = 3


def refuses(address: Path | None) -> bool:
    """Return whether nobody listens on a unix socket. A full queue of connections is no refusal; nothing
    blocks.
    """
    if address is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(str(address)) in (errno.ECONNREFUSED, errno.ENOENT)


class Health:
    """Probes every ready instance each `every` seconds; three misses in a row are reported once.

    /health is answered by the engine's HTTP threads, busy slots or not, so silence means a hung process. A
    hung instance holds up nobody's probe but its own.
    """

    def __init__(self, every: float, tell: Callable[[Event], None]) -> None:
        self._every = every
        self._tell = tell
        self._misses: dict[str, int] = {}

    async def run(self, state: Callable[[], State], socket_of: Callable[[str], Path | None]) -> None:
        """Probe until cancelled; `state` is the core's latest, `socket_of` where an instance listens."""
        while True:
            await asyncio.sleep(self._every)
            ready = [i.id for i in state().instances.values() if i.state is InstanceState.READY]
            self._misses = {instance: self._misses.get(instance, 0) for instance in ready}
            answers = await asyncio.gather(*(self._answers(socket_of(instance)) for instance in ready))
            for instance, answered in zip(ready, answers, strict=True):
                self._count(instance, answered)

    def _count(self, instance: str, answered: bool) -> None:
        self._misses[instance] = 0 if answered else self._misses[instance] + 1
        if self._misses[instance]:
            log.warning(
                "no answer to /health", extra={"instance": instance, "misses": self._misses[instance]}
            )
        if self._misses[instance] == MISSES:
            self._tell(
                Unresponsive(instance, f"did not answer /health {MISSES} times, {self._every:g} s each")
            )

    async def _answers(self, address: Path | None) -> bool:
        if address is None:
            return True
        # Without certificates to check, no certificate store is read for each probe.
        transport = httpx.AsyncHTTPTransport(uds=str(address), verify=False)
        try:
            async with httpx.AsyncClient(transport=transport, timeout=self._every) as client:
                return (await client.get("http://instance/health")).status_code == 200
        except httpx.HTTPError:
            return False
