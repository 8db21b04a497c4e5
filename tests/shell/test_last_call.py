"""A listening socket that is about to close, seen from its clients."""

import asyncio
import socket

import pytest

from llamastead.gateway.last_call import last_call


async def test_who_is_connected_is_served_and_who_comes_later_is_not_misled() -> None:
    """After the last call a queued client is accepted and heard; a new one is not connected, then refused."""
    loop = asyncio.get_running_loop()
    with socket.socket() as listener, socket.socket() as early, socket.socket() as late:
        for each in (listener, early, late):
            each.setblocking(False)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        await loop.sock_connect(early, address)
        await last_call(listener)
        await loop.sock_sendall(early, b"hello")
        accepted, _ = await loop.sock_accept(listener)
        with accepted:
            accepted.setblocking(False)
            assert await loop.sock_recv(accepted, 16) == b"hello"
        connecting = asyncio.create_task(loop.sock_connect(late, address))
        done, _ = await asyncio.wait({connecting}, timeout=0.2)
        assert not done, "a client was connected that nobody will serve"
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            await connecting


async def test_a_unix_socket_is_left_alone() -> None:
    """The last call on a unix socket changes nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        await last_call(listener)
