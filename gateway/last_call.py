"""Closing a listening socket without cutting off anybody who just connected."""

import asyncio
import ctypes
import socket
import struct

SO_ATTACH_FILTER = 26
FLAGS_OFFSET, SYN = 13, 0x02  # in a TCP header
LOAD_BYTE, JUMP_IF_SET, RETURN = 0x30, 0x45, 0x06  # of classic BPF
EVERYTHING = 0xFFFFFFFF
HANDSHAKE_S = 0.1


async def last_call(listener: socket.socket) -> None:
    """Let no new connection begin on `listener`, and return when those that had begun can all be accepted.

    The kernel resets what waits in the queue of a listening socket that is closed, and a client that was just
    connected can't know that nothing of its request was seen: it may not ask again. From here on the kernel
    ignores the first packet of new connections instead, while handshakes under way are finished. A client
    whose first packet was ignored repeats it, is refused then, and may go elsewhere. For a socket that no
    other process accepts on; on a unix socket this does nothing.
    """
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return
    program = (
        (LOAD_BYTE, 0, 0, FLAGS_OFFSET),
        (JUMP_IF_SET, 0, 1, SYN),
        (RETURN, 0, 0, 0),
        (RETURN, 0, 0, EVERYTHING),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    listener.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code))
    )
    await asyncio.sleep(HANDSHAKE_S)
