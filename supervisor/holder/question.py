"""What an engine still processes, asked of the engine itself."""

import re
import socket

from loop import READ

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: holder\r\nAuthorization: Bearer %b\r\nConnection: close\r\n\r\n"
COUNTS = re.compile(rb"^llamacpp:requests_(?:processing|deferred) (\d+)", re.MULTILINE)


class Question:
    """One GET /metrics over a unix socket; `on_answer` gets the number of requests it runs and defers.

    It is 0 when nobody listens, since such an engine is ending and finishes nothing, and None when there is
    no such answer. There is no time limit: an engine answers between two batches, and a batch may take long.
    `drop` ends it.
    """

    def __init__(self, loop, path, key, on_answer):
        self._loop, self._on_answer, self._got = loop, on_answer, b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        try:
            self._socket.connect(path)
            self._socket.send(REQUEST % key.encode())
        except OSError as error:
            # Its backlog may be full. Told from the loop: the asker need not be re-entrant.
            count = 0 if isinstance(error, (ConnectionRefusedError, FileNotFoundError)) else None
            self._timer = loop.after(0, lambda: self._answer(count))
        else:
            self._timer = None
            loop.watch(self._socket.fileno(), READ, lambda _: self._read())

    def drop(self):
        """End it without an answer."""
        self._loop.cancel(self._timer)
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

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
        self._on_answer(count)


def count_in(response):
    """Return the sum of both gauges of a /metrics answer (head included), None if it is no such answer."""
    counts = COUNTS.findall(response)
    return sum(map(int, counts)) if response.startswith(b"HTTP/1.1 200") and len(counts) == 2 else None
