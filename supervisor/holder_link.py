"""What a holder tells, and the connection it tells it over."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

VERSION = 2  # 2: a spec has an `address`. Fields are only ever added, and unknown ones are ignored


class HolderError(Exception):
    """A holder can't do what it was asked to; the message says why and, where the user can help, how."""


@dataclass(frozen=True)
class HolderState:
    """A state line of the engine: its word and its payload, both as the engine gave them."""

    state: str
    payload: Any


@dataclass(frozen=True)
class HolderLines:
    """Lines of the engine's output, in order, without line ends; some may be missing for a slow reader."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class HolderStop:
    """How far a stop came: term, unlinked, waiting (with the requests still in it), exit, kill."""

    step: str
    processing: int | None


@dataclass(frozen=True)
class HolderExit:
    """The engine is gone and reaped, and so is its process group.

    Exactly one of `code` and `signal` is a number. `tail` are its last 50 lines; `phase` is how far it had
    come (starting, loading, ready, sleeping); `asked` says that a stop had begun, `killed` that it took a
    KILL, `orphaned` that the holder stopped it because no supervisor was there. `samples` are the numbers of
    its page of metrics as its holder saw them last, "" if it did not ask.
    """

    code: int | None
    signal: int | None
    tail: tuple[str, ...]
    phase: str
    asked: bool
    killed: bool
    orphaned: bool
    samples: str = ""


@dataclass(frozen=True)
class HolderRefused:
    """An order was not carried out; `why` is "epoch" when a later leader, number `epoch`, is known."""

    op: str
    why: str
    epoch: int


@dataclass(frozen=True)
class HolderLost:
    """The holder is gone without having told the engine's end: see `kill_recorded`."""


HolderEvent = HolderState | HolderLines | HolderStop | HolderExit | HolderRefused | HolderLost


@dataclass(frozen=True)
class HolderView:
    """Everything a holder says of itself. What an instance has is None as long as it is a spare.

    `phase` is spare, starting, loading, ready, sleeping, stopping or exited. `state` and `payload` are the
    last state line, `ready_payload` that of the first ready; `pid` is the engine's. `place` and `needs` are
    those of the order to start it, "" and None where a holder of an earlier version doesn't tell.
    """

    phase: str
    instance: str | None
    model: str | None
    nonce: str | None
    revision: str | None
    spec_hash: str | None
    pid: int | None
    address: str | None
    place: str
    needs: Mapping[str, int] | None
    epoch: int
    state: str | None
    payload: Any
    ready_payload: Any
    exit: HolderExit | None


def exit_of(message: Mapping[str, Any]) -> HolderExit:
    """Read an exit as the holder sends it."""
    return HolderExit(
        code=message["code"],
        signal=message["signal"],
        tail=tuple(message["tail"]),
        phase=message["phase"],
        asked=message["asked"],
        killed=message["killed"],
        orphaned=message.get("orphaned", False),
        samples=message.get("samples", ""),
    )


def view_of(message: Mapping[str, Any]) -> HolderView:
    """Read a hello as the holder sends it."""
    return HolderView(
        phase=message["phase"],
        instance=message["instance"],
        model=message["model"],
        nonce=message["nonce"],
        revision=message["revision"],
        spec_hash=message["spec_hash"],
        pid=message["pid"],
        address=message["address"],
        place=message.get("place") or "",
        needs=message.get("needs"),
        epoch=message["epoch"],
        state=message["state"],
        payload=message["payload"],
        ready_payload=message["ready_payload"],
        exit=None if message["exit"] is None else exit_of(message["exit"]),
    )


class Link(asyncio.Protocol):
    """One connection to a holder.

    Events are held until `deliver` names who takes them, and then go there in the order in which they
    happened. The first hello only makes the `view`; what is new in a later one becomes events, so that a
    repeated hello makes up for what a slow reader missed. After the exit the end of the connection is no
    event.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.holder_pid = 0
        self.view: HolderView | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._received = b""
        self._take: Callable[[HolderEvent], None] | None = None
        self._held: list[HolderEvent] = []
        self._told: tuple[str | None, Any] = (None, None)
        self._over = False
        self._waits: list[tuple[Callable[[HolderView], bool], asyncio.Future[HolderView]]] = []
        self._asked_at: float | None = None
        self._when_gone: Callable[[], None] | None = None

    @property
    def connected(self) -> bool:
        """Whether the connection stands, its engine ended or not."""
        return self._transport is not None

    @property
    def open(self) -> bool:
        """Whether the holder can be talked to and has something to hold."""
        return self.connected and not self._over

    @property
    def unheard_s(self) -> float:
        """For how many seconds it has owed us an answer; 0 when it said something since we asked."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def deliver(self, take: Callable[[HolderEvent], None]) -> None:
        """Hand over what was held, and from now on every event at once."""
        self._take = take
        held, self._held = self._held, []
        for event in held:
            take(event)

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message; nothing happens when the connection is gone."""
        if self._transport is not None:
            if kind == "hello":  # what is always answered
                self._asked_at = self._asked_at or time.monotonic()
            self._transport.write(json.dumps({"v": VERSION, "type": kind, **fields}).encode() + b"\n")

    async def until(self, test: Callable[[HolderView], bool]) -> HolderView:
        """Return the view once it passes `test`.

        Raises HolderError if a refusal or the end of the connection comes first.
        """
        if self.view is not None and test(self.view):
            return self.view
        if self._transport is None:
            raise HolderError(f"the holder of {self.folder.name} went away")
        future: asyncio.Future[HolderView] = asyncio.get_running_loop().create_future()
        self._waits.append((test, future))
        return await future

    def let_go(self, when_gone: Callable[[], None]) -> None:
        """Expect the holder, which is told to leave, to hang up, and call `when_gone` then; no event follows.

        From a holder that refuses to leave we hang up.
        """
        self._over = True
        if self._transport is None:
            when_gone()
        else:
            self._when_gone = when_gone

    def close(self) -> None:
        """Hang up; the holder lives on, and no event follows."""
        self._over = True
        self._when_gone = None
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Part of asyncio.Protocol."""
        self._transport = None
        self._fail_waits(HolderError(f"the holder of {self.folder.name} went away"))
        if self._when_gone is not None:
            self._when_gone()
        if not self._over:
            self._over = True
            self._tell(HolderLost())

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol."""
        self._asked_at = None
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._on_message(json.loads(line))

    def _on_message(self, message: Mapping[str, Any]) -> None:
        match message["type"]:
            case "hello":
                self._on_hello(view_of(message))
            case "state":
                self._tell_state(message["state"], message["payload"])
            case "lines":
                self._tell(HolderLines(tuple(message["lines"])))
            case "stop":
                self._tell(HolderStop(message["step"], message["processing"]))
            case "exit":
                self._tell_exit(exit_of(message))
            case "refused":
                refusal = HolderRefused(message["op"], message["why"], message["epoch"])
                self._fail_waits(HolderError(refusal.why))
                self._tell(refusal)
                if self._when_gone is not None:
                    self.close()

    def _on_hello(self, view: HolderView) -> None:
        first, self.view = self.view is None, view
        for test, future in self._waits:
            if not future.done() and test(view):
                future.set_result(view)
        self._waits = [(test, future) for test, future in self._waits if not future.done()]
        if first:
            self._told = (view.state, view.payload)
            self._over = view.exit is not None
            return
        if view.state is not None and (view.state, view.payload) != self._told:
            self._tell_state(view.state, view.payload)
        if view.exit is not None:
            self._tell_exit(view.exit)

    def _fail_waits(self, error: HolderError) -> None:
        waits, self._waits = self._waits, []
        for _, future in waits:
            if not future.done():
                future.set_exception(error)

    def _tell_state(self, state: str, payload: Any) -> None:
        self._told = (state, payload)
        self._tell(HolderState(state, payload))

    def _tell_exit(self, end: HolderExit) -> None:
        if not self._over:
            self._over = True
            self._tell(end)

    def _tell(self, event: HolderEvent) -> None:
        if self._when_gone is not None:
            return
        if self._take is None:
            self._held.append(event)
        else:
            self._take(event)
