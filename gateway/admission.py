"""Admission: every request gets a claim on an instance, at once or after a wait in the queue, or an ApiError.

A request whose model this process holds a lease on is let in without a word to Redis. All others stand in
a line per model. One task per line asks Redis for one ticket after the other, so that this process never has
two `acquire` calls for one model under way; requests only wait, and a cancelled one never cuts such a call.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from llamastead.gateway.leases import PEEK_MARK, Claim, Lease, Leases, Place
from llamastead.gateway.seams import NoLoad, may_load
from llamastead.shared.errors import ApiError
from llamastead.shared.settings import Settings
from llamastead.shared.store.connect import refuses_writes
from llamastead.shared.store.errors import (
    NoHerd,
    NotLoaded,
    QueueFull,
    StoreError,
    UnknownModel,
    Unregistered,
)
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.records import Granted, HeartbeatResult
from llamastead.shared.words import UseKind

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.1
RETRY_AFTER_S = 5
BROKEN_AFTER = 5
_REMEDIES = {
    "MISCONF": "make room on its disk, its log says where",
    "OOM": "raise its maxmemory",
    "READONLY": "it is a replica, wait for the failover or give the master's --redis-url",
}
"""So many errors of an engine, and no right answer since its load, make it broken."""


@dataclass(eq=False, slots=True)
class Waiter:
    """A request in a line. `enrolled` once its ticket stands in Redis's queue."""

    ticket: str
    kind: UseKind
    request_id: str
    arrived: float
    granted: asyncio.Future[Claim]
    not_instance: str = ""
    no_load: NoLoad | None = None
    enrolled: bool = False
    first_arrival_ms: int | None = None


@dataclass(eq=False, slots=True)
class Line:
    """The requests of this process that wait for one model, oldest first, by ticket."""

    model: str
    waiters: dict[str, Waiter] = field(default_factory=dict)
    asking: bool = False
    calling: str = ""
    trouble: str = ""

    def next_to_enrol(self) -> Waiter | None:
        """Return the oldest waiter without a place in the queue."""
        return next((w for w in self.waiters.values() if not w.enrolled), None)


class Admission:
    """Grants claims; see gateway/seams.py for what callers may rely on."""

    def __init__(
        self,
        store: GatewayStore,
        gateway: str,
        instance_key: Callable[[str, str], str],
        settings: Settings,
        tasks: asyncio.TaskGroup,
        register: Callable[[], Awaitable[None]],
    ) -> None:
        """Take the parts.

        `instance_key` makes an API key from an instance's id and nonce, or raises ApiError; `register` sends
        a heartbeat now; `tasks` runs what goes on behind the requests.
        """
        self.leases = Leases(settings.linger, self._release, self._report)
        self._store = store
        self._gateway = gateway
        self._instance_key = instance_key
        self._settings = settings
        self._tasks = tasks
        self._register = register
        self._loop = asyncio.get_running_loop()
        self._lines: dict[str, Line] = {}
        self._minted = 0
        self._ended = False
        self._missing: list[tuple[tuple[int, int], frozenset[str]]] = []
        self._inbox_read = (0, 0)

    # --- what the byte path asks

    async def acquire(
        self, model: str, kind: UseKind, request_id: str, no_load: Callable[[], NoLoad | None] = may_load
    ) -> Claim:
        """Return a claim on a ready instance of `model`; see the protocol in gateway/seams.py."""
        lease = self.leases.warm(model)
        if lease is not None:
            return lease.claim(kind, request_id, "hot", 0, 0)
        return await self._wait(model, kind, request_id, "", no_load())

    async def refused(self, claim: Claim, no_load: Callable[[], NoLoad | None] = may_load) -> Claim:
        """Trade a claim whose address refused for one elsewhere; see the protocol in gateway/seams.py."""
        place = claim.place
        self.leases.retire(place.instance)
        claim.close()
        return await self._wait(place.model, claim.kind, claim.request_id, place.instance, no_load())

    def end(self) -> None:
        """Tell Redis nothing any more: this gateway is about to leave, which gives everything back."""
        self._ended = True

    # --- what the heartbeat says and hears

    def tickets(self) -> dict[str, list[str]]:
        """Return the tickets that stand in the queue, by model."""
        enrolled = {
            line.model: [w.ticket for w in line.waiters.values() if w.enrolled]
            for line in self._lines.values()
        }
        return {model: tickets for model, tickets in enrolled.items() if tickets}

    def minting(self) -> list[str]:
        """Return the ids of calls to Redis whose outcome is not known yet."""
        return [line.calling for line in self._lines.values() if line.calling]

    def waiting(self) -> int:
        """Return how many requests wait now."""
        return sum(len(line.waiters) for line in self._lines.values())

    def on_heartbeat(self, result: HeartbeatResult) -> None:
        """Take what a heartbeat found: leases that are worth nothing, tickets that don't wait any more."""
        for instance in result.lost_leases:
            self.leases.retire(instance)
        if result.missing_tickets:
            # Settled by a message that is still to be read, or lost: once the inbox is read that far, who
            # still waits was lost.
            self._missing.append((_stream_id(result.inbox_id), frozenset(result.missing_tickets)))
            self._enrol_lost()
        patience = self._loop.time() - self._settings.reread
        for line in list(self._lines.values()):
            for waiter in line.waiters.values():
                if waiter.not_instance and waiter.enrolled and waiter.arrived < patience:
                    # The instance that refused is still the current one: it may have been a hiccup.
                    waiter.not_instance, waiter.enrolled = "", False
            self._ask(line)

    def on_no_writes(self, word: str) -> None:
        """Refuse all that wait: Redis takes no writes, for the reason in its own word."""
        for line in self._lines.values():
            for waiter in line.waiters.values():
                self._refuse_waiting(line, waiter, _no_writes(word))

    # --- what the inbox says

    def on_granted(self, message: Mapping[str, str]) -> None:
        """Let those in whose tickets became a lease."""
        model, instance = message["model"], message["instance"]
        line = self._lines.get(model)
        try:
            key = self._instance_key(instance, message["nonce"])
        except ApiError as problem:
            self._refuse_granted(line, message["tickets"].split(","), problem)
            return
        lease = self.leases.book(Place(model, instance, message["address"], key), message["lease"])
        if line is not None:
            load_ms = int(message.get("load_ms") or 0)
            for ticket in message["tickets"].split(","):
                waiter = line.waiters.pop(ticket, None)
                if waiter is not None:
                    self._let_in(waiter, lease, "cold", load_ms)
            self._let_in_newcomers(line, lease)
        lease.settle()

    def on_failed(self, message: Mapping[str, str]) -> None:
        """Refuse those whose tickets ended without a grant."""
        line = self._lines.get(message["model"])
        if line is None:
            return
        for ticket in message["tickets"].split(","):
            waiter = line.waiters.pop(ticket, None)
            if waiter is not None:
                _refuse(waiter, ApiError.from_json(message["error"]))
        self._tidy(line)

    def on_instance_gone(self, instance: str) -> None:
        """Send nobody new to an instance that drains or has ended."""
        self.leases.retire(instance)

    def on_inbox_read(self, up_to: str) -> None:
        """Note how far the inbox has been read, and enrol again those whom no message up to there settled."""
        self._inbox_read = _stream_id(up_to)
        self._enrol_lost()

    # --- waiting

    async def _wait(
        self, model: str, kind: UseKind, request_id: str, not_instance: str, no_load: NoLoad | None
    ) -> Claim:
        line = self._lines.setdefault(model, Line(model))
        self._minted += 1
        waiter = Waiter(
            ticket=f"{self._gateway}.{self._minted}{PEEK_MARK if kind is UseKind.PEEK else ''}",
            kind=kind,
            request_id=request_id,
            arrived=self._loop.time(),
            granted=self._loop.create_future(),
            not_instance=not_instance,
            no_load=no_load,
        )
        line.waiters[waiter.ticket] = waiter
        self._ask(line)
        unadmitted = self._loop.call_later(
            self._settings.admission_timeout, self._if_unadmitted, line, waiter
        )
        # The supervisor ends a wait that is too long, at its next look at the latest; this is for one that
        # does not.
        patience = self._settings.queue_timeout + self._settings.reread
        too_late = self._loop.call_later(patience, self._if_too_late, line, waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                waiter.granted.result().close()
            raise
        finally:
            unadmitted.cancel()
            too_late.cancel()
            self._leave(line, waiter)

    def _leave(self, line: Line, waiter: Waiter) -> None:
        if line.waiters.pop(waiter.ticket, None) is not None and waiter.enrolled:
            self._spawn(self._give_back(line.model, waiter.ticket))
        self._tidy(line)

    def _tidy(self, line: Line) -> None:
        if not line.waiters and not line.asking and self._lines.get(line.model) is line:
            del self._lines[line.model]

    def _if_unadmitted(self, line: Line, waiter: Waiter) -> None:
        if not waiter.enrolled and not waiter.granted.done():
            self._refuse_waiting(line, waiter, line.trouble or "Redis does not answer")

    def _if_too_late(self, line: Line, waiter: Waiter) -> None:
        if not waiter.granted.done():
            seconds = f"{self._settings.queue_timeout:g}"
            message = f"model '{line.model}' could not be served within {seconds} s (queue-timeout)"
            self._refuse_waiting(line, waiter, message, reason="queue_timeout", limit="queue-timeout")

    def _refuse_waiting(self, line: Line, waiter: Waiter, message: str, **fields: str) -> None:
        # It stays in its line until its own call ends, which gives the ticket back.
        _refuse(waiter, ApiError(503, message, {"model": line.model, **fields}, retry_after=RETRY_AFTER_S))

    # --- asking Redis

    def _ask(self, line: Line) -> None:
        if not self._ended and not line.asking and line.next_to_enrol() is not None:
            line.asking = True
            self._spawn(self._enrol_all(line))

    async def _enrol_all(self, line: Line) -> None:
        try:
            while (waiter := line.next_to_enrol()) is not None:
                if waiter.granted.done():
                    line.waiters.pop(waiter.ticket)
                    continue
                line.calling = waiter.ticket
                try:
                    await self._enrol(line, waiter)
                except (NoHerd, Unregistered, StoreError, RedisError, OSError) as problem:
                    await self._put_off(line, problem)
                finally:
                    line.calling = ""
        finally:
            line.asking = False
            self._tidy(line)

    async def _enrol(self, line: Line, waiter: Waiter) -> None:
        try:
            outcome = await self._store.acquire(
                line.model,
                waiter.ticket,
                self._gateway,
                waiter.kind,
                math.ceil(self._settings.queue_timeout * 1000),
                waiter.not_instance,
                waiter.first_arrival_ms,
                waiter.request_id,
                _may(waiter.no_load),
            )
        except NotLoaded:
            assert waiter.no_load is not None
            line.waiters.pop(waiter.ticket, None)
            _refuse(waiter, waiter.no_load.error)
        except QueueFull as full:
            line.waiters.pop(waiter.ticket, None)
            fields = {"reason": "queue_full", "limit_name": full.limit_name, "limit": full.limit}
            _refuse(waiter, ApiError(429, str(full), fields, retry_after=RETRY_AFTER_S))
        except UnknownModel:
            line.waiters.pop(waiter.ticket, None)
            _refuse(waiter, ApiError(400, f"model '{line.model}' not found"))
        else:
            line.trouble = ""
            if isinstance(outcome, Granted):
                self._on_booked(line, waiter, outcome)
            elif line.waiters.get(waiter.ticket) is waiter:
                waiter.enrolled, waiter.first_arrival_ms = True, outcome.first_arrival_ms
            else:
                self._spawn(self._give_back(line.model, waiter.ticket))

    def _on_booked(self, line: Line, waiter: Waiter, granted: Granted) -> None:
        try:
            key = self._instance_key(granted.instance, granted.nonce)
        except ApiError as problem:
            self._refuse_granted(line, [waiter.ticket], problem)
            return
        place = Place(line.model, granted.instance, granted.address, key)
        peek = waiter.kind is UseKind.PEEK
        lease = self.leases.book(place, waiter.ticket, warm=not peek)
        if line.waiters.pop(waiter.ticket, None) is not None:
            self._let_in(waiter, lease, "cold" if waiter.first_arrival_ms else "hot", 0)
        if not peek:
            self._let_in_newcomers(line, lease)
        lease.settle()

    def _refuse_granted(self, line: Line | None, tickets: list[str], problem: ApiError) -> None:
        # The lease itself is not named by the next heartbeats, so it ends.
        for ticket in tickets:
            waiter = line.waiters.pop(ticket, None) if line is not None else None
            if waiter is not None:
                _refuse(waiter, problem)

    def _let_in_newcomers(self, line: Line, lease: Lease) -> None:
        """Let in those without a ticket. Who has one waits for what becomes of it: it is settled once."""
        for waiter in [w for w in line.waiters.values() if not w.enrolled]:
            if waiter.ticket != line.calling and waiter.not_instance != lease.place.instance:
                del line.waiters[waiter.ticket]
                self._let_in(waiter, lease, "hot", 0)

    def _let_in(self, waiter: Waiter, lease: Lease, path: str, load_ms: int) -> None:
        if not waiter.granted.done():
            wait_ms = round((self._loop.time() - waiter.arrived) * 1000)
            waiter.granted.set_result(lease.claim(waiter.kind, waiter.request_id, path, wait_ms, load_ms))

    async def _put_off(self, line: Line, problem: Exception) -> None:
        if isinstance(problem, NoHerd):
            line.trouble = "no supervisor has opened the herd yet"
        elif isinstance(problem, Unregistered):
            line.trouble = "this gateway could not register"
            try:
                await self._register()
            except (StoreError, RedisError, OSError) as worse:
                problem = worse
            else:
                return
        else:
            word = refuses_writes(problem)
            line.trouble = _no_writes(word) if word else "Redis is not reachable"
        log.debug("admission put off", extra={"model": line.model, "problem": str(problem)})
        await asyncio.sleep(RETRY_PAUSE_S)

    def _enrol_lost(self) -> None:
        due = [tickets for up_to, tickets in self._missing if up_to <= self._inbox_read]
        self._missing = [(up_to, tickets) for up_to, tickets in self._missing if up_to > self._inbox_read]
        lost = frozenset().union(*due)
        if not lost:
            return
        for line in list(self._lines.values()):
            for waiter in line.waiters.values():
                if waiter.ticket in lost:
                    waiter.enrolled = False
            self._ask(line)

    # --- giving back

    async def _give_back(self, model: str, ticket: str) -> None:
        await self._tell(self._store.give_back(model, ticket, self._gateway))

    def _release(self, lease: Lease) -> None:
        self._spawn(self._release_ids(lease))

    def _report(self, instance: str, right: bool) -> None:
        self._spawn(self._tell(self._store.report(instance, right, BROKEN_AFTER)))

    async def _release_ids(self, lease: Lease) -> None:
        for lease_id in lease.ids:
            await self._tell(self._store.release(lease.place.instance, self._gateway, lease_id, lease.used))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._ended:
            work.close()
        else:
            self._tasks.create_task(work)

    async def _tell(self, call: Awaitable[object]) -> None:
        try:
            await call
        except (StoreError, RedisError, OSError) as problem:
            # The next heartbeat that arrives no longer names it, and the supervisor's sweep is behind that.
            log.debug("not given back yet", extra={"problem": str(problem)})


def _may(no_load: NoLoad | None) -> str:
    if no_load is None:
        return "load"
    return "wake" if no_load.may_wake else "wait"


def _no_writes(word: str) -> str:
    return f"Redis takes no writes at the moment ({word}): {_REMEDIES.get(word, 'its log says why')}"


def _refuse(waiter: Waiter, error: ApiError) -> None:
    if not waiter.granted.done():
        waiter.granted.set_exception(error)


def _stream_id(text: str) -> tuple[int, int]:
    """Return a stream id as numbers that compare."""
    ms, _, count = text.partition("-")
    return int(ms), int(count or 0)
