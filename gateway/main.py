"""The gateway role: one process, or several that share the listening sockets."""

import ctypes
import logging
import os
import signal
import socket
import sys
import time

import uvloop

from llamastead.gateway.server import serve
from llamastead.shared.ports import ListenError, listen_on
from llamastead.shared.settings import Settings, SettingsError
from llamastead.shared.store.errors import StoreUnreachable

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0
STOPS = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def run(settings: Settings, workers: int) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code; SIGHUP never ends it.

    With more than one worker this process only keeps that many children, which all accept on its sockets,
    and passes signals on. 78: a wrong setting (said on one line of the log). 1: requests were cut at the
    end.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        listeners = _listeners(settings)
        settings.inference_keys()
        settings.check_tls()
        settings.ui_settings()
    except (ListenError, SettingsError) as problem:
        log.error(str(problem))
        return os.EX_CONFIG
    if workers == 1:
        return _serve(settings, listeners)
    return _Workers(settings, listeners, workers).run()


def _listeners(settings: Settings) -> list[socket.socket]:
    if not settings.listen_fd:
        return listen_on(settings.host, settings.port, reuse_port=settings.reuse_port)
    return [socket.socket(fileno=int(fd)) for fd in settings.listen_fd]


def _serve(settings: Settings, listeners: list[socket.socket]) -> int:
    try:
        return uvloop.run(serve(settings, listeners))
    except StoreUnreachable as problem:
        log.error(str(problem))
        return os.EX_CONFIG


class _Workers:
    """The children of a gateway with several processes."""

    def __init__(self, settings: Settings, listeners: list[socket.socket], count: int) -> None:
        self._settings = settings
        self._listeners = listeners
        self._count = count
        self._pids: set[int] = set()
        self._stopping = False

    def run(self) -> int:
        """Keep them running until a signal, and return the worst of their exit codes."""
        for number in STOPS:
            signal.signal(number, lambda given, _: self._stop(given))
        for _ in range(self._count):
            self._start()
        worst = 0
        while self._pids:
            pid, status = os.wait()
            self._pids.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            if code > 0:
                worst = max(worst, code)
            if code == os.EX_CONFIG:
                self._stop(signal.SIGTERM)  # it can't begin, nor can the others
            elif not self._stopping:
                worst = 0
                log.error("a worker ended and is started again", extra={"pid": pid, "exit_code": code})
                time.sleep(RESTART_PAUSE_S)
                self._start()
        return worst

    def _start(self) -> None:
        # Signals wait until the child is noted, or it would miss them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            if self._stopping:
                return
            parent = os.getpid()
            pid = os.fork()
            if pid:
                self._pids.add(pid)
                return
            for number in STOPS:
                signal.signal(number, signal.SIG_DFL)
            _prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        code = 1
        try:
            if os.getppid() == parent:
                code = _serve(self._settings, self._listeners)
        except Exception:
            log.exception("a worker failed")
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _stop(self, number: int) -> None:
        if not self._stopping:
            self._stopping = True
            # The children close their copies of the sockets; while ours are open, connections begin unheard.
            for listener in self._listeners:
                listener.close()
        for pid in self._pids:
            os.kill(pid, number)
