"""Ports of instances that gateways elsewhere reach by TCP, each for as long as its instance lives."""

import socket
from collections.abc import Collection

from llamastead.shared.addresses import TcpAddress


class NoPortError(Exception):
    """Every port of the range is taken; the message says by whom and what to do."""


class InstancePorts:
    """Chooses ports in turn. Nothing is kept of a choice: who lives is asked each time, so none can leak.

    `host` is the interface that instances listen on, `first` and `last` are the range, both included.
    """

    def __init__(self, host: str, first: int, last: int) -> None:
        self._host, self._first, self._last = host, first, last
        self._next = first

    def choose(self, living: Collection[str]) -> TcpAddress:
        """Return an address that nobody uses now. `living` are the addresses of instances that may still run.

        Somebody may take it before the instance does; then its start fails, and the retry gets the next one.
        Raises NoPortError.
        """
        span = self._last - self._first + 1
        ours = 0
        for step in range(span):
            port = self._first + (self._next - self._first + step) % span
            address = TcpAddress(self._host, port)
            if str(address) in living:
                ours += 1
            elif _is_free(address):
                self._next = self._first + (port - self._first + 1) % span
                return address
        raise NoPortError(
            f"no port of {self._first}-{self._last} is free on {self._host}: {ours} are taken by instances, "
            f"{span - ours} by other programs; give a wider range with --instance-ports"
        )


def _is_free(address: TcpAddress) -> bool:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        # A port whose last connections still time out can be listened on.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError:
            return False
        return True
