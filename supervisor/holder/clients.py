"""The holder's socket: JSON lines with whichever supervisors are there."""

import collections
import json

from loop import READ, WRITE

VERSION = 2
LONGEST_LINE = 4 << 20
SLOW_AT = 256 << 10
BEHIND_AT = 1 << 20


class Client:
    """One connection. `is_supervisor` once it said hello.

    What it does not read waits here, up to a bound: beyond SLOW_AT bytes log lines are dropped; beyond
    BEHIND_AT all that waits is, and once it reads again it is sent a `hello`, which tells the state of
    everything.
    """

    def __init__(self, loop, connection, on_message, on_gone, say_hello):
        self._loop, self._socket, self._on_message, self._on_gone = loop, connection, on_message, on_gone
        self._say_hello = say_hello
        self._received = b""
        self._waiting = collections.deque()
        self._waiting_bytes = 0
        self._behind = False
        self.is_supervisor = False
        connection.setblocking(False)
        loop.watch(connection.fileno(), READ, self._on_ready)

    def send(self, kind, droppable=False, **fields):
        """Send one message; `droppable` ones are left out for a reader that is slow."""
        if self._socket is None or self._behind or (droppable and self._waiting_bytes > SLOW_AT):
            return
        data = json.dumps({"v": VERSION, "type": kind, **fields}).encode() + b"\n"
        if self._waiting and self._waiting_bytes + len(data) > BEHIND_AT:
            # What is half sent must be finished.
            while len(self._waiting) > 1:
                self._waiting_bytes -= len(self._waiting.pop())
            self._behind = True
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._flush()

    def close(self):
        """Close the connection without telling `on_gone`."""
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _on_ready(self, events):
        if events & WRITE:
            self._flush()
        if events & READ and self._socket is not None:
            self._receive()

    def _receive(self):
        try:
            got = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            got = b""
        *lines, self._received = (self._received + got).split(b"\n")
        if not got or len(self._received) > LONGEST_LINE:
            self._give_up()
            return
        for line in lines:
            if self._socket is None:
                return
            try:
                self._on_message(self, json.loads(line))
            except (ValueError, KeyError, TypeError):
                # Not our protocol: an answer would only be guessed at.
                self._give_up()
                return

    def _flush(self):
        while self._waiting:
            try:
                sent = self._socket.send(self._waiting[0])
            except BlockingIOError:
                self._loop.watch(self._socket.fileno(), READ | WRITE, self._on_ready)
                return
            except OSError:
                self._give_up()
                return
            self._waiting_bytes -= sent
            if sent == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][sent:]
        self._loop.watch(self._socket.fileno(), READ, self._on_ready)
        if self._behind:
            self._behind = False
            self._say_hello(self)

    def _give_up(self):
        if self._socket is not None:
            self.close()
            self._on_gone(self)
