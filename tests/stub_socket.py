"""The WebSocket side of `stub_engine.py`: says back what it hears, and does what a few words tell it.

`close CODE REASON` closes, `send COUNT SIZE` sends so many messages of so many bytes, `die` breaks off. It
takes the first subprotocol that it is offered.
"""

import base64
import hashlib
import struct

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


def opening(headers):
    """Return the head of the answer that opens a WebSocket."""
    key = base64.b64encode(hashlib.sha1((headers["sec-websocket-key"] + GUID).encode()).digest()).decode()
    lines = [
        "HTTP/1.1 101 Switching Protocols",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Accept: {key}",
    ]
    if offered := headers.get("sec-websocket-protocol"):
        lines.append(f"Sec-WebSocket-Protocol: {offered.split(',')[0].strip()}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def read_frame(reader):
    """Return (opcode, payload), None at the connection's end; clients' frames are whole and masked."""
    head = reader.read(2)
    if len(head) < 2:
        return None
    size = head[1] & 127
    if size == 126:
        (size,) = struct.unpack("!H", reader.read(2))
    elif size == 127:
        (size,) = struct.unpack("!Q", reader.read(8))
    mask = reader.read(4)
    data = reader.read(size)
    longest = mask * (size // 4 + 1)
    plain = int.from_bytes(data, "big") ^ int.from_bytes(longest[:size], "big")
    return head[0] & 15, plain.to_bytes(size, "big")


def frame(opcode, data):
    """Return a whole frame of a server."""
    size = len(data)
    if size < 126:
        return struct.pack("!BB", 128 | opcode, size) + data
    if size < 65536:
        return struct.pack("!BBH", 128 | opcode, 126, size) + data
    return struct.pack("!BBQ", 128 | opcode, 127, size) + data


def converse(connection, reader, journal):
    """Serve one open WebSocket to its end."""
    while (got := read_frame(reader)) is not None:
        opcode, data = got
        words = data.decode(errors="replace").split(" ", 2) if opcode == TEXT else [""]
        if opcode == CLOSE:
            code = struct.unpack("!H", data[:2])[0] if data else 1005
            journal("socket_closed", code=code, reason=data[2:].decode())
            connection.sendall(frame(CLOSE, data))
            return
        if opcode == PING:
            connection.sendall(frame(PONG, data))
        elif words[0] == "close":
            connection.sendall(frame(CLOSE, struct.pack("!H", int(words[1])) + words[2].encode()))
        elif words[0] == "send":
            for _ in range(int(words[1])):
                connection.sendall(frame(BINARY, b"x" * int(words[2])))
                journal("socket_sent")
        elif words[0] == "die":
            return
        else:
            connection.sendall(frame(opcode, data))
