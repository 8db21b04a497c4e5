"""Tells another host that is gone, or cut off, from one that is only busy.

The kernel's own TCP_USER_TIMEOUT does not: it also ends a connection to a host that acknowledges everything
but reads nothing for a while, as a busy engine does with a large upload.
"""

import socket
import struct

SILENCE_S = 20
"""Without a word from another host's kernel for so long, an exchange with it counts as cut off."""

_UNANSWERED = 2  # one may be on its way
_TCP_INFO = struct.Struct("2x2B52xI")  # retransmits, probes, and ms since the last acknowledgement


def notice_silence(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other host is gone, while nothing is to be sent to it."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 4),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    ):
        sock.setsockopt(level, option, value)


def is_cut_off(sock: socket.socket) -> bool:
    """Return whether what was sent stays unacknowledged, or the questions whether there is room for more."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    retransmits, probes, silent_ms = _TCP_INFO.unpack(info)
    return bool(retransmits + probes >= _UNANSWERED and silent_ms >= SILENCE_S * 1000)
