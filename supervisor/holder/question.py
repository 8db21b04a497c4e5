"""What an engine still processes, asked of the engine itself."""

import errno
import re
import socket

from loop import READ, WRITE

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: holder\r\nAuthorization: Bearer %b\r\nConnection: close\r\n\r\n"
SAMPLES = re.compile(rb"^llamacpp:.*$", re.MULTILINE)
COUNTS = re.compile(rb"^llamacpp:requests_(?:processing|deferred) (\d+)", re.MULTILINE)


class Question:
    """One GET /metrics; `on_answer` gets the number of requests it runs and defers, and all that it counts.

    It is 0 when nobody listens, since such an engine is ending and finishes nothing, and None when there is
    no such answer. There is no time limit: an engine answers between two batches, and a batch may take long.
    `drop` ends it. `place` is the path of its unix socket, or its TCP host and port.
    """

    def __init__(self, loop, place, key, on_answer):
        self._loop, self._on_answer, self._got = loop, on_answer, b""
        self._request = REQUEST % key.encode()
        self._timer = None
        family = socket.AF_UNIX if isinstance(place, str) else family_of(place[0])
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        code = self._socket.connect_ex(place)
        if code == errno.EINPROGRESS:
            loop.watch(self._socket.fileno(), WRITE, lambda _: self._on_connected())
        else:
            # Told from the loop: the asker need not be re-entrant.
            self._timer = loop.after(0, lambda: self._begin(code))

    def drop(self):
        """End it without an answer."""
        self._loop.cancel(self._timer)
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _on_connected(self):
        self._loop.unwatch(self._socket.fileno())
        self._begin(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _begin(self, code):
        try:
            if code:
                raise OSError(code, "not connected")
            self._socket.send(self._request)
        except OSError as error:
            # Its backlog may be full.
            self._answer(0 if error.errno in (errno.ECONNREFUSED, errno.ENOENT) else None)
        else:
            self._loop.watch(self._socket.fileno(), READ, lambda _: self._read())

    def _read(self):
        try:
            got = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            got = b""
        self._got += got
        if not got:
            self._answer(count_in(self._got))

    def _answer(self, count):
        self.drop()
        self._on_answer(count, samples_in(self._got))


def family_of(host):
    """Return the address family of an IP address or host name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def count_in(response):
    """Return the sum of both gauges of a /metrics answer (head included), None if it is no such answer."""
    counts = COUNTS.findall(response)
    return sum(map(int, counts)) if response.startswith(b"HTTP/1.1 200") and len(counts) == 2 else None


def samples_in(response):
    """Return the lines of a /metrics answer that have a number, as text."""
    return b"\n".join(SAMPLES.findall(response)).decode(errors="replace")
