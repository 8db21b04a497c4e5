"""Instances on other hosts: one that is busy is waited for, one that is cut off is given up."""

import asyncio
import socket
import struct
from typing import cast

import pytest
from byte_path_kit import OK
from waiting import PATIENCE_S, until

from llamastead.gateway.body import Body
from llamastead.gateway.upstream import Pool, pool, silence

BODY = Body.of(b"x" * (16 << 20))
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % BODY.size
BACKOFF = 4  # where the kernel's struct tcp_info has it


async def test_a_host_that_reads_nothing_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a body to a host that takes the connection and reads no byte, for longer than silence may last,
    then reads: it is answered.
    """
    monkeypatch.setattr(silence, "SILENCE_S", 4)
    monkeypatch.setattr(pool, "SILENCE_S", 4)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        connections = Pool(f"tcp:127.0.0.1:{listener.getsockname()[1]}")
        asked = asyncio.create_task(connections.exchange(HEAD, BODY))
        with (await loop.sock_accept(listener))[0] as host:
            await until(lambda: connections.busy, "the request to be on its way")
            (connection,) = connections._busy
            sock = connection._transport.get_extra_info("socket")  # type: ignore[union-attr]

            def asked_often() -> bool:
                # The questions whether there is room again come at 0.2 s, 0.4 s, 0.8 s, …
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
                return asked.done() or bool(info[BACKOFF] >= 5)

            await until(asked_often, "the kernel to have asked for more than 6 s", PATIENCE_S)
            assert not asked.done()
            left = len(HEAD) + BODY.size
            while left:
                left -= len(await loop.sock_recv(host, 1 << 20))
            await loop.sock_sendall(host, OK)
            async with asyncio.timeout(PATIENCE_S):
                response = await asked
                assert (response.status, await response.read()) == (200, b"ok")
                response.close()
        connections.close()


@pytest.mark.parametrize(
    ("retransmits", "probes", "silent_s", "cut_off"),
    [
        (0, 0, 3600, False),  # nothing is on its way
        (0, 1, 119, False),  # the kernel asks every two minutes in the end; one question is on its way
        (3, 0, 19, False),
        (3, 0, 20, True),
        (0, 2, 240, True),
    ],
)
def test_who_counts_as_cut_off(retransmits: int, probes: int, silent_s: int, cut_off: bool) -> None:
    """Judge what the kernel says of a connection: only what stays unanswered, and for long, is cut off."""

    class Sock:
        def getsockopt(self, *_: int) -> bytes:
            return struct.pack("=4B4x13I", 1, 0, retransmits, probes, *[7] * 12, silent_s * 1000)

    assert silence.is_cut_off(cast("socket.socket", Sock())) is cut_off
