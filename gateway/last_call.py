"""Closing a listening socket without cutting off those who just connected."""

import contextlib
import socket

HEARD_S = 0.1  # within this a request that was sent when its connection was accepted has begun to arrive


def accept_waiting(listener: socket.socket) -> list[socket.socket]:
    """Accept those who are connected and wait in the queue of `listener`, and wait for nobody else.

    The kernel resets what is in the queue of a listening socket that is closed; the client, which was
    connected and has sent its request, can't know that nobody read it, and may not send it again. For use
    right before the socket is closed.
    """
    listener.setblocking(False)
    waiting = []
    with contextlib.suppress(BlockingIOError):
        while True:
            with contextlib.suppress(ConnectionAbortedError):
                waiting.append(listener.accept()[0])
    return waiting
