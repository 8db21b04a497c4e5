"""Ports for tests that start servers of their own."""

import asyncio
import random
import socket
from pathlib import Path

LOWEST = 10_000
CHANCE = random.SystemRandom()  # of its own: what seeds the tests' randomness must not have two runs agree


def free_port() -> int:
    """Return a TCP port on loopback that nothing listens on.

    It is none of those that the system gives out by itself: until our server listens on it, another process
    that connects or listens anywhere would sooner or later be given it.
    """
    given_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    while True:
        port = CHANCE.randrange(LOWEST, int(given_out))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


async def listens(port: int) -> bool:
    """Return whether somebody takes connections on a port of loopback."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def refuses(port: int) -> bool:
    """Return whether nothing listens on a port of loopback."""
    return not await listens(port)
