"""The supervisor's side of its holders: starting them, talking to them, finding them again. No policy."""

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

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

PROGRAM = Path(__file__).resolve().parent / "holder"
LONGEST_SOCKET_PATH = 107  # sun_path of unix(7), less its final zero
ANSWER_S = 10.0
PASSED_ON = ("PATH", "LD_LIBRARY_PATH")  # what the interpreter itself may need


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
        self._models: dict[str, str] = {}
        self._early_orders: dict[str, list[tuple[str, dict[str, object]]]] = {}
        self._spare: Link | None = None
        self._starting_spare = asyncio.Lock()

    def set_leadership(self, epoch: int | None, leader: bool) -> None:
        """Tell every holder, later ones too, who speaks; a leader's number makes them refuse lower ones."""
        self._epoch, self._leader = epoch, leader
        for link in self._all_links():
            self._say_hello(link)

    def look_again(self) -> None:
        """Have every holder tell its state once more; what is new to us becomes events."""
        for link in self._links.values():
            self._say_hello(link)

    async def start_spare(self) -> None:
        """Start a holder ahead, unless one waits already. Raises HolderError."""
        async with self._starting_spare:
            if self._spare is None or not self._spare.open:
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
        try:
            async with asyncio.timeout(ANSWER_S):
                view = await link.until(lambda view: view.instance == spec.instance)
        except TimeoutError:
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
            link.close()
        self._models.pop(instance, None)

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

    async def adopt(self, folder: Path) -> HolderView | None:
        """Connect to the holder that lives in `folder` and return what it says; None when none answers.

        From then on its events arrive, first of all the state it is in. A spare is looked at and left alone.
        """
        link = await self._connect(folder)
        if link is None:
            return None
        self._say_hello(link)
        try:
            async with asyncio.timeout(ANSWER_S):
                view = await link.until(lambda _: True)
        except (TimeoutError, HolderError):
            link.close()
            return None
        if view.instance is None:
            link.close()
            return view
        self._links[view.instance] = link
        self._models[view.instance] = view.model or ""
        self._deliver(view.instance, link)
        return view

    def close(self) -> None:
        """Hang up everywhere; instances live on for their orphan grace."""
        for link in self._all_links():
            link.close()
        self._links, self._spare = {}, None

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
            folder.mkdir(mode=0o700, parents=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                path.chmod(0o600)
                listener.listen(16)
                self._spawn(folder, listener)
                link = await self._connect(folder)
        except OSError as error:
            raise HolderError(f"can't start a holder in {folder}: {error.strerror}") from error
        if link is None:
            raise HolderError(f"the holder in {folder} ended at once: see {folder / 'holder.err'}")
        self._say_hello(link)
        return link

    async def _connect(self, folder: Path) -> Link | None:
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_unix_connection(lambda: Link(folder), str(folder / "h.sock"))
        except OSError:
            return None
        return link

    def _say_hello(self, link: Link) -> None:
        link.send("hello", epoch=self._epoch, role="leader" if self._leader else "standby")

    def _spawn(self, folder: Path, listener: socket.socket) -> None:
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
        self._reap_when_over(pid)

    def _reap_when_over(self, pid: int) -> None:
        loop, handle = asyncio.get_running_loop(), os.pidfd_open(pid)

        def reap() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

        loop.add_reader(handle, reap)
