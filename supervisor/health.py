"""Finds ready instances that accept and never answer, by a /health probe every few seconds, each on its own,
and those that don't accept.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

import httpx

from llamastead.shared.addresses import Address, TcpAddress, UnixAddress
from llamastead.shared.disk import is_shortage
from llamastead.shared.words import InstanceState
from llamastead.supervisor.core.events import Event, Unresponsive
from llamastead.supervisor.core.state import State

log = logging.getLogger(__name__)

MISSES = 3
# Also one that drains, since somebody else may have told it to stop, and it finishes what it has.
_MAY_REFUSE = frozenset({InstanceState.DRAINING, InstanceState.STOPPING})
_PROBED = _MAY_REFUSE | {InstanceState.READY}
CONNECT_S = 1.0  # to a port of this host


async def refuses(address: Address | None) -> bool:
    """Return whether nobody listens there. A full queue of connections is no refusal."""
    match address:
        case None:
            return False
        case UnixAddress(path):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
                return probe.connect_ex(path) in (errno.ECONNREFUSED, errno.ENOENT)
        case TcpAddress(host, port):
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, writer = await asyncio.open_connection(host, port)
            except ConnectionRefusedError:
                return True
            except OSError:
                return False
            writer.close()
            return False


class Health:
    """Probes every instance that serves or finishes each `every` seconds; three misses in a row are reported
    once.

    /health is answered by the engine's HTTP threads, busy slots or not, so silence means a hung process. A
    hung instance holds up nobody's probe but its own. One that drains or stops may refuse; it may not be
    silent, nor answer nothing.
    """

    def __init__(self, every: float, tell: Callable[[Event], None]) -> None:
        self._every = every
        self._tell = tell
        self._misses: dict[str, int] = {}

    async def run(self, state: Callable[[], State], address_of: Callable[[str], Address | None]) -> None:
        """Probe until cancelled; `state` is the core's latest, `address_of` where an instance listens."""
        while True:
            await asyncio.sleep(self._every)
            probed = {i.id: i.state in _MAY_REFUSE for i in state().instances.values() if i.state in _PROBED}
            self._misses = {instance: self._misses.get(instance, 0) for instance in probed}
            answers = await asyncio.gather(
                *(self.answers(address_of(instance), may_refuse) for instance, may_refuse in probed.items())
            )
            for instance, answered in zip(probed, answers, strict=True):
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

    async def answers(self, address: Address | None, may_refuse: bool) -> bool:
        """Probe once; what is no fault of the instance counts as an answer."""
        if address is None:
            return True
        # Without certificates to check, no certificate store is read for each probe.
        uds = address.path if isinstance(address, UnixAddress) else None
        base = "http://instance" if isinstance(address, UnixAddress) else f"http://{address.authority}"
        transport = httpx.AsyncHTTPTransport(uds=uds, verify=False)
        try:
            async with httpx.AsyncClient(transport=transport, timeout=self._every) as client:
                return (await client.get(f"{base}/health")).status_code == 200
        except httpx.ConnectError as error:
            # That we can open no more files is nothing that an instance could be blamed for.
            return may_refuse or is_shortage(error)
        except httpx.HTTPError:
            return False
