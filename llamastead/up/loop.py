"""The loop of `up`: starts programs, restarts them with back-off, reaps, passes signals, stops in order."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from llamastead.shared.ports import command_of
from llamastead.up.folder import StartError
from llamastead.up.processes import children_of, descendants_of
from llamastead.up.program import Program, adopt_orphans

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 10.0
STEADY_S = 30.0  # a child that lived so long starts again without a growing pause
LEAST_S = 1.0  # what each step of the stop gets when its time is over, and at most after a second signal
ORPHANS_S = 2.5  # what the supervisor dismissed ends by itself; what it left behind never does
LOOK_S = 0.1  # between two looks at /proc for what is left, unless something ends sooner
# Shares of the stop timeout by which a step is over: running answers, those told to hurry, instances.
GATEWAYS_DRAIN, GATEWAYS_HURRY, SUPERVISOR = 0.6, 0.65, 0.95

Hook = Callable[[], Awaitable[None]]


class Child:
    """A started program; `ended` resolves to its exit code, negative for a signal."""

    def __init__(self, program: Program, process: subprocess.Popen[bytes]) -> None:
        self.program = program
        self.process = process
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """The pid; it stays ours until the loop has reaped it."""
        return self.process.pid

    def reaped(self, code: int) -> None:
        """Note the exit code that waitpid told."""
        self.process.returncode = code
        self.ended.set_result(code)

    def send(self, number: signal.Signals) -> None:
        """Send a signal unless it ended."""
        if not self.ended.done():
            os.kill(self.pid, number)


class Loop:
    """Runs `programs` until a signal or a hopeless child ends it; the one of role redis comes up first."""

    def __init__(self, programs: Sequence[Program], stop_timeout: float) -> None:
        """`stop_timeout` is the time in seconds that stopping everything may take."""
        self.programs = programs
        self.stop_timeout = stop_timeout
        self.children: dict[str, Child] = {}
        self.exit_code = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ended = asyncio.Event()
        self._strangers: set[int] = set()

    async def run(self, redis_up: Hook, started: Hook, stopping: Callable[[], None]) -> int:
        """Run until asked to stop and return the exit code: 0, or that of the child that made us stop.

        `redis_up` is awaited before the other programs start, `started` runs beside them (a stop cancels
        both), `stopping` is called when the stop begins. A hook's StartError stops what runs, then rises.
        """
        # Children of whoever exec'ed into us (a shell's `>(tee log)`) are not ours to end.
        self._strangers = children_of({os.getpid()})
        adopt_orphans()
        self._handle_signals()
        failure: StartError | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                for program in self.programs:
                    if program.role == "redis":
                        tasks.create_task(self._keep(program))
                await self._unless_stopped(redis_up)
                for program in self.programs:
                    if program.role != "redis":
                        tasks.create_task(self._keep(program))
                await self._unless_stopped(started)
                await self._stop.wait()
            except StartError as error:
                failure = error
            finally:
                self._stop.set()
                stopping()
                await self._end_all()
        if failure is not None:
            raise failure
        return self.exit_code

    def pid_of(self, name: str) -> int | None:
        """Return the pid of a program that runs now."""
        child = self.children.get(name)
        return child.pid if child is not None and not child.ended.done() else None

    def ask_stop(self) -> None:
        """Begin to stop; asked again, be quick about it."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _unless_stopped(self, hook: Hook) -> None:
        work = asyncio.ensure_future(hook())
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            stop.cancel()
            await asyncio.wait({work, stop})

    # -- keeping

    async def _keep(self, program: Program) -> None:
        pause = BACKOFF_FIRST_S
        lives = 0
        while not self._stop.is_set():
            began = time.monotonic()
            end = await self._live(program)
            lives += 1
            if self._stop.is_set():
                return
            if end == str(os.EX_CONFIG) and lives == 1:
                # Later a broken file must not take down what still serves: it is tried again until mended.
                log.error("can't work as configured: stopping", extra={"child": program.name})
                self.exit_code = os.EX_CONFIG
                self.ask_stop()
                return
            if time.monotonic() - began >= STEADY_S:
                pause = BACKOFF_FIRST_S
            facts = {"child": program.name, "exit": end, "pause_s": pause}
            log.warning("ended by itself, starting it again", extra=facts)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)
            pause = min(pause * 2, BACKOFF_MAX_S)

    async def _live(self, program: Program) -> str:
        """Start a program, wait for its end and return that in a word."""
        try:
            child = Child(program, program.start())
        except OSError as error:  # no processes or memory left for now
            return str(error)
        self.children[program.name] = child
        log.debug("started", extra={"child": program.name, "pid": child.pid})
        return _words(await child.ended)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGINT, self._told_to_stop)
        loop.add_signal_handler(signal.SIGTERM, self._told_to_stop)
        loop.add_signal_handler(signal.SIGHUP, self._pass_hup)

    def _told_to_stop(self) -> None:
        """Stop, and say what that waits for; the second signal is the answer to it."""
        if not self._stop.is_set():
            answers_s = f"{self.stop_timeout * GATEWAYS_DRAIN:g}"
            log.info("stopping; once more cuts the answers under way", extra={"answers_s": answers_s})
        self.ask_stop()

    def _pass_hup(self) -> None:
        """Tell the supervisor to read its sources again; one that is just starting does so anyway."""
        _send_all(signal.SIGHUP, self._of("supervisor"))

    def _reap(self) -> None:
        """Collect every ended child: our programs, and orphans that became ours (holders, their engines)."""
        ours = {child.pid: child for child in self.children.values() if not child.ended.done()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended.set()
            if pid in ours:
                ours[pid].reaped(os.waitstatus_to_exitcode(status))

    # -- stopping

    async def _end_all(self) -> None:
        began = time.monotonic()
        gateways, worker, supervisor = self._of("gateway"), self._of("worker"), self._of("supervisor")
        _send_all(signal.SIGTERM, gateways + worker)
        await self._await_ends(gateways, began + self.stop_timeout * GATEWAYS_DRAIN)
        _send_all(signal.SIGINT, gateways)
        await self._await_ends(gateways, began + self.stop_timeout * GATEWAYS_HURRY)
        _send_all(signal.SIGKILL, gateways)
        _send_all(signal.SIGTERM, supervisor)
        until = began + self.stop_timeout * SUPERVISOR
        await self._await_ends(supervisor + worker, max(until, time.monotonic() + LEAST_S))
        _send_all(signal.SIGKILL, supervisor + worker)
        await self._await_orphans(min(until, time.monotonic() + ORPHANS_S))
        redis = self._of("redis")
        _send_all(signal.SIGTERM, redis)
        await self._await_ends(redis, max(began + self.stop_timeout, time.monotonic() + LEAST_S))
        _send_all(signal.SIGKILL, redis)
        await self._kill_orphans()

    async def _await_ends(self, children: Iterable[Child], until: float) -> None:
        """Wait for the ends of `children` until that moment; after a second signal only briefly."""
        waiting: set[asyncio.Future[Any]] = {child.ended for child in children if not child.ended.done()}
        hurry = asyncio.ensure_future(self._hurry.wait())
        while waiting and (left := until - time.monotonic()) > 0:
            if self._hurry.is_set():
                await asyncio.wait(waiting, timeout=min(left, LEAST_S))
                break
            await asyncio.wait({*waiting, hurry}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            waiting = {end for end in waiting if not end.done()}
        hurry.cancel()

    def _of(self, role: str) -> list[Child]:
        return [child for child in self.children.values() if child.program.role == role]

    def _orphans(self) -> set[int]:
        """What descends from us besides our programs: holders without a supervisor, engines below them."""
        programs = {child.pid for child in self.children.values() if not child.ended.done()}
        return descendants_of(os.getpid(), self._strangers | programs)

    async def _await_orphans(self, until: float) -> None:
        while self._orphans() and time.monotonic() < until and not self._hurry.is_set():
            await self._some_end()

    async def _some_end(self) -> None:
        """Wait until a child, own or adopted, ended; at most LOOK_S, as those below it tell us nothing."""
        self._ended.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), LOOK_S)

    async def _kill_orphans(self) -> None:
        """Kill whatever still descends from us: nobody else is left to end it."""
        until = time.monotonic() + LEAST_S
        told: set[int] = set()
        while (left := self._orphans()) and time.monotonic() < until:
            for pid in left - told:
                log.warning("killing what was left", extra={"pid": pid, "command": command_of(pid)})
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            told |= left
            await self._some_end()


def _send_all(number: signal.Signals, children: Iterable[Child]) -> None:
    for child in children:
        child.send(number)


def _words(code: int) -> str:
    if code >= 0:
        return str(code)
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
