"""The supervisor's side of its holders: starting them, talking to them, finding them again. No policy."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llamastead.shared.disk import is_shortage, unusable
from llamastead.shared.faults import VARIABLE, fault_point, faults_folder
from llamastead.supervisor.holder_link import (
    HolderError,
    HolderEvent,
    HolderExit,
    HolderLines,
    HolderLost,
    HolderRefused,
    HolderState,
    HolderStop,
    HolderView,
    Link,
)
from llamastead.supervisor.holder_record import (
    SPARE_PREFIX,
    Record,
    instance_folders,
    kill_recorded,
    read_record,
    remove_folder,
)
from llamastead.supervisor.launch import InstanceSpec
from llamastead.supervisor.reserve import Reserve

__all__ = [
    "HolderError",
    "HolderEvent",
    "HolderExit",
    "HolderLines",
    "HolderLost",
    "HolderRefused",
    "HolderState",
    "HolderStop",
    "HolderView",
    "Holders",
    "Record",
    "check_socket_path",
    "instance_folders",
    "kill_recorded",
    "read_record",
    "remove_folder",
]

log = logging.getLogger(__name__)

PROGRAM = Path(__file__).resolve().parent / "holder"
LONGEST_SOCKET_PATH = 107  # sun_path of unix(7), less its final zero
ANSWER_S = 10.0
LEAST_ANSWER_S = 2.0
"""For an answer to a leader who takes over, from a holder that owes one for longer than that already."""
# What the interpreter itself may need, and fault points where they are on.
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", *((VARIABLE,) if faults_folder() else ()))


def check_socket_path(path: Path) -> None:
    """Raise HolderError, saying what to do, when `path` is too long for a unix socket."""
    length = len(os.fsencode(path))
    if length > LONGEST_SOCKET_PATH:
        raise HolderError(
            f"the socket path {path} has {length} bytes, at most {LONGEST_SOCKET_PATH} are possible: "
            f"use a --run-dir whose path is at least {length - LONGEST_SOCKET_PATH} bytes shorter"
        )


class Holders:
    """All holders below one run folder that this process talks to.

    What they tell arrives through `on_event(instance, event)`, called from the event loop. One spare may
    wait to become the next instance; it is started again only by `start_spare`.
    """

    def __init__(self, run_dir: Path, on_event: Callable[[str, HolderEvent], None]) -> None:
        self._folder = run_dir / "i"
        self._on_event = on_event
        self._epoch: int | None = None
        self._leader = False
        self._links: dict[str, Link] = {}
        self._let_go: set[Link] = set()  # told to leave, and not gone yet
        self._owe_since: dict[str, float] = {}  # who was silent when we hung up, and since when (monotonic)
        self._models: dict[str, str] = {}
        self._early_orders: dict[str, list[tuple[str, dict[str, object]]]] = {}
        self._spare: Link | None = None
        self._starting_spare = asyncio.Lock()
        self._children: set[int] = set()  # started here and not reaped: their pids are theirs
        self.reserve = Reserve()

    def set_leadership(self, epoch: int | None, leader: bool) -> None:
        """Tell every holder, later ones too, who speaks; a leader's number makes them refuse lower ones."""
        self._epoch, self._leader = epoch, leader
        for link in self._all_links():
            self._say_hello(link)

    def look_again(self) -> None:
        """Have every holder tell its state once more; what is new to us becomes events."""
        for link in self._links.values():
            if not link.unheard_s:
                self._say_hello(link)

    def silent(self, for_s: float) -> list[str]:
        """Return the instances whose holder has owed us an answer for so many seconds: it hangs."""
        return [
            instance for instance, link in self._links.items() if link.connected and link.unheard_s > for_s
        ]

    async def start_spare(self) -> None:
        """Start a holder ahead, unless one waits already. Raises HolderError."""
        async with self._starting_spare:
            if self._spare is None or not self._spare.open:
                if self._spare is not None:
                    remove_folder(self._spare.folder)
                self._spare = await self._start_holder(self._folder / f"{SPARE_PREFIX}{secrets.token_hex(6)}")

    async def start(self, spec: InstanceSpec) -> HolderView:
        """Have a holder, the spare if there is one, start an engine, and return once its process runs.

        Raises HolderError when it doesn't: the path is too long, a later leader is known (`epoch`), the
        disk is full.
        """
        check_socket_path(Path(spec.socket))
        self._models[spec.instance] = spec.model
        link, self._spare = self._spare, None
        if link is None or not link.open:
            self._early_orders[spec.instance] = []
            try:
                link = await self._start_holder(spec.folder)
            finally:
                early = self._early_orders.pop(spec.instance)
        else:
            early = []
        self._links[spec.instance] = link
        try:
            return await self._order_start(link, spec, early)
        except BaseException:
            # Refused, timed out or cancelled: what may run nevertheless ends, and a spare left alone leaves.
            self.stop(spec.instance, deadline_s=0, force=True)
            del self._links[spec.instance]
            link.close()
            raise

    async def _order_start(
        self, link: Link, spec: InstanceSpec, then: list[tuple[str, dict[str, object]]]
    ) -> HolderView:
        link.send("start", epoch=self._epoch, spec=spec.message())
        for op, fields in then:
            link.send(op, epoch=self._epoch, **fields)
        fault_point("start.ordered")
        try:
            async with asyncio.timeout(ANSWER_S):
                view = await link.until(lambda view: view.instance == spec.instance)
        except TimeoutError:
            # Woken later, it would start what nobody waits for any more.
            if link.holder_pid in self._children:
                os.kill(link.holder_pid, signal.SIGKILL)
            raise HolderError(f"the holder of {spec.instance} did not answer within {ANSWER_S} s") from None
        link.folder = spec.folder
        self._deliver(spec.instance, link)
        return view

    def _deliver(self, instance: str, link: Link) -> None:
        """Let events flow once our caller, who gets the view now, had its turn with it."""
        asyncio.get_running_loop().call_soon(link.deliver, partial(self._on_event, instance))

    def stop(self, instance: str, deadline_s: float | None, force: bool = False) -> None:
        """Order the stop ladder; `deadline_s` bounds the wait for running requests, None does not.

        Ordered again, it can only be hurried. `force` waits for no request.
        """
        self._order(instance, "stop", deadline_s=deadline_s, force=force)

    def forget(self, instance: str) -> None:
        """Let the holder of an ended instance remove its folder and leave."""
        self._order(instance, "forget")
        if link := self._links.pop(instance, None):
            self._let_go.add(link)
            link.let_go(partial(self._gone, link))
        self._models.pop(instance, None)

    def _gone(self, link: Link) -> None:
        self._let_go.discard(link)
        # Killed after it told the end, it can't do that itself.
        remove_folder(link.folder)

    def dismiss_spare(self) -> None:
        """Let the spare leave, if one waits."""
        if self._spare is not None:
            self._spare.send("forget", epoch=self._epoch)
            self._spare.close()
            self._spare = None

    def knows(self, instance: str) -> bool:
        """Return whether this process is connected to the holder of an instance."""
        link = self._links.get(instance)
        return link is not None and link.connected

    def model_of(self, instance: str) -> str:
        """Return the model of an instance that was started or adopted and is not forgotten yet."""
        return self._models[instance]

    def _order(self, instance: str, op: str, **fields: object) -> None:
        if link := self._links.get(instance):
            link.send(op, epoch=self._epoch, **fields)
        elif instance in self._early_orders:
            self._early_orders[instance].append((op, fields))

    async def watch(self, folder: Path) -> None:
        """Connect to the holder that lives in a folder, if one does, and don't wait for what it says."""
        link = await self._connect(folder)
        if link is not None:
            self._say_hello(link)
            self._links[folder.name] = link
            self._deliver(folder.name, link)

    async def adopt(self, folder: Path, nonce: str = "") -> HolderView | None:
        """Connect to the holder that lives in `folder` and return what it says; None when none answers, or
        one of another instance, or with another nonce than this one ("": none was written down).

        From then on its events arrive, first of all the state it is in. A spare is looked at and left alone.
        """
        link = await self._connect(folder)
        if link is None:
            return None
        self._say_hello(link)
        # A lead that ends before all have answered is followed by another: they are not waited for anew.
        since = self._owe_since.setdefault(folder.name, time.monotonic())
        try:
            async with asyncio.timeout(max(LEAST_ANSWER_S, since + ANSWER_S - time.monotonic())):
                view = await link.until(lambda _: True)
        except (TimeoutError, HolderError):
            link.close()
            del self._owe_since[folder.name]
            return None
        except asyncio.CancelledError:
            link.close()
            raise
        del self._owe_since[folder.name]
        if view.instance is None:
            link.close()
            return view
        if view.instance != folder.name or (nonce and view.nonce != nonce):
            log.warning("a holder is not who it should be", extra={"instance": folder.name})
            link.close()
            return None
        self._links[view.instance] = link
        self._models[view.instance] = view.model or ""
        self._deliver(view.instance, link)
        return view

    def close(self) -> None:
        """Hang up everywhere; instances live on for their orphan grace."""
        for instance, link in self._links.items():
            if link.connected and link.unheard_s:
                self._owe_since.setdefault(instance, time.monotonic() - link.unheard_s)
        for link in (*self._all_links(), *self._let_go):
            link.close()
        self._links, self._spare = {}, None
        self._let_go.clear()
        self.reserve.release()

    def _all_links(self) -> list[Link]:
        return [*self._links.values(), *([self._spare] if self._spare else [])]

    # Processes and connections

    async def _start_holder(self, folder: Path) -> Link:
        """Start a holder in a new folder and connect to it.

        The socket is ours to bind, so connecting need not wait for the new process; the folder keeps others
        out.
        """
        path = folder / "h.sock"
        check_socket_path(path)
        try:
            with self.reserve.at_hand():
                pid, link = await self._make_holder(folder, path)
        except OSError as error:
            raise HolderError(f"can't start a holder: {unusable(folder, error)}") from error
        if link is None:
            raise HolderError(f"the holder in {folder} ended at once: see {folder / 'holder.err'}")
        link.holder_pid = pid
        self._say_hello(link)
        return link

    async def _make_holder(self, folder: Path, path: Path) -> tuple[int, Link | None]:
        folder.mkdir(mode=0o700, parents=True)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                path.chmod(0o600)
                listener.listen(16)
                pid = self._spawn(folder, listener)
                try:
                    return pid, await self._connect(folder)
                except OSError:
                    os.kill(pid, signal.SIGKILL)  # nobody would ever talk to it
                    raise
        except OSError:
            _remove_unused(folder)
            raise

    async def _connect(self, folder: Path) -> Link | None:
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_unix_connection(lambda: Link(folder), str(folder / "h.sock"))
        except OSError as error:
            if is_shortage(error):
                raise  # it may well live: whom nobody answers for, we end
            return None
        return link

    def _say_hello(self, link: Link) -> None:
        link.send("hello", epoch=self._epoch, role="leader" if self._leader else "standby")

    def _spawn(self, folder: Path, listener: socket.socket) -> int:
        interpreter = getattr(sys, "_base_executable", sys.executable)
        pid = os.posix_spawn(
            interpreter,
            [interpreter, "-I", "-S", "-X", "utf8", str(PROGRAM), str(folder)],
            {name: os.environ[name] for name in PASSED_ON if name in os.environ},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, listener.fileno(), 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (
                    os.POSIX_SPAWN_OPEN,
                    2,
                    str(folder / "holder.err"),
                    os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                    0o600,
                ),
            ],
            # A session of its own: what is typed at our terminal, or sent to our group, does not end models.
            setsid=True,
        )
        self._children.add(pid)
        try:
            self._reap_when_over(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._children.discard(pid)
            raise
        return pid

    def _reap_when_over(self, pid: int) -> None:
        loop, handle = asyncio.get_running_loop(), os.pidfd_open(pid)

        def reap() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            self._children.discard(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

        loop.add_reader(handle, reap)


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a holder that was told nothing yet, without opening it: there may be no file for
    that.
    """
    with contextlib.suppress(OSError):
        for name in ("h.sock", "holder.err"):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
