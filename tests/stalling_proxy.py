"""A TCP proxy in front of a unix socket that can stop passing anything on without closing anything."""

import socket
import threading
from contextlib import suppress
from pathlib import Path


class StallingProxy:
    """Passes bytes both ways until `stall`: then connections stay open, new ones are taken, nothing moves.

    `resume` cuts what hung, as a network that comes back does sooner or later, and serves new connections.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._moves = threading.Event()
        self._moves.set()
        self.swallowed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Pass nothing on from now on."""
        self._moves.clear()

    def resume(self) -> None:
        """Cut the connections that hang and pass on again."""
        hanging, self._open = self._open, []
        for each in hanging:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._moves.set()

    def close(self) -> None:
        """End it."""
        self._listener.close()
        self.resume()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._target))
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self._moves.is_set():
                    self.swallowed += 1
                    self._moves.wait()
                    break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.close()
