"""GET and DELETE /v1/stream, POST /v1/streams/lookup: a client comes back to its conversation."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError
from starlette.datastructures import QueryParams

from llamastead.gateway.answers import parse_json
from llamastead.gateway.body import ClientGone, Message, Receive
from llamastead.gateway.pings import Send
from llamastead.gateway.proxy import relay
from llamastead.gateway.seams import Admission, Claim, NoLoad, Scope, owner_of, request_id
from llamastead.gateway.sessions import LOST, Sessions
from llamastead.gateway.upstream import Response
from llamastead.gateway.watch import ClientWatch
from llamastead.shared.errors import ApiError
from llamastead.shared.store.conversations import Conversation, ConversationStore
from llamastead.shared.streams import id_of, name_of
from llamastead.shared.words import ConversationState, UseKind

log = logging.getLogger(__name__)

MOST_IDS = 1000
RETRY_AFTER_S = 2
_MOST_DIGITS = 18  # what is longer, the engine refuses
AHEAD_BYTES = 8 * 1024 * 1024  # all that an engine keeps of a conversation, with room to spare


@dataclass(frozen=True)
class Seat:
    """Where a replay comes from, in the shape of a claim: the conversation's own one keeps the instance."""

    instance: str
    address: str
    key: str = ""
    path: str = "hot"
    wait_ms: int = 0
    load_ms: int = 0

    def answered(self, status: int) -> None:
        """Tell nobody: a replay says nothing about the engine's health."""

    def close(self) -> None:
        """Give nothing back."""


class Replay:
    """Answers these routes. Conversations of other keys are as unknown as those that never were."""

    def __init__(
        self, store: ConversationStore, sessions: Sessions, admission: Admission[Any], detach_limit_s: float
    ) -> None:
        """`detach_limit_s` is how long an answer may go on without a client."""
        self._store = store
        self._sessions = sessions
        self._admission = admission
        self._limit_s = detach_limit_s

    async def read(self, scope: Scope, receive: Receive, send: Send, in_path: str) -> None:
        """Stream what a conversation said from byte `from` on, and what it says until its end.

        `in_path` is the id where the client wrote it there. Raises ApiError: 400 without an id, 404 for one
        that is unknown or lost, 503 while it waits for its model.
        """
        query = QueryParams(scope["query_string"])
        wanted = _wanted(query, in_path)
        name = name_of(owner_of(scope), wanted)
        found = await self._store.read(name)
        if found is None:
            raise ApiError(404, f"conversation '{wanted}' not found", {"param": "conv_id"})
        _check(found, wanted)
        async with self._held(found, scope) as claim:
            await self._replay(found, claim, wanted, query.get("from", ""), scope, receive, send)

    async def _replay(
        self,
        found: Conversation,
        claim: Claim | None,
        wanted: str,
        start: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        fields = {"address": found.address, "nonce": found.nonce}
        try:
            start, lead = split_at(start, found.lead)
            response = await self._sessions.replay(found.instance, fields, found.name, start)
        except LOST:
            raise _lost(wanted, "its model's server is ending") from None
        try:
            if response.status == 404:
                raise ApiError(404, f"what conversation '{wanted}' said is no longer kept")
            response.read_ahead(AHEAD_BYTES)
            async with (
                self._in_company(found),
                _held_until_whole(claim, response),
                ClientWatch(receive, asyncio.get_running_loop()),
            ):
                seat = Seat(found.instance, found.address)
                await relay(response, seat, scope, _led_by(lead, send), None, goes_on=True)
        except ClientGone:
            pass
        finally:
            response.close()

    async def look_up(self, scope: Scope, body: bytes) -> list[dict[str, Any]]:
        """Return what is known of the caller's conversations of these ids, in the engine's shape."""
        asked = parse_json(body)
        wanted = asked.get("conversation_ids") if isinstance(asked, dict) else None
        if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
            raise ApiError(400, "conversation_ids must be a list of strings", {"param": "conversation_ids"})
        if len(wanted) > MOST_IDS:
            raise ApiError(400, f"more than {MOST_IDS} conversation_ids", {"param": "conversation_ids"})
        owner = owner_of(scope)
        names = [name_of(owner, one) for one in dict.fromkeys(wanted)]
        if not names:
            return []
        told = await self._sessions.look_up(names)
        # A claim of another key's conversations would need a name with that key's in it.
        entries = [{**entry, "conversation_id": id_of(owner, entry["conversation_id"])} for entry in told]
        known = {entry["conversation_id"] for entry in told}
        for name in names:
            if name not in known and (found := await self._store.read(name)) is not None:
                entries += [_waiting(id_of(owner, name))] if _waits(found) else []
        for entry, its in zip(entries, told, strict=False):
            found = await self._store.read(its["conversation_id"])
            entry["total_bytes"] += found.lead if found is not None else 0
        return entries

    async def stop(self, scope: Scope, in_path: str) -> None:
        """End a conversation wherever it is; one that is not there is over already. ApiError 400: no id."""
        name = name_of(owner_of(scope), _wanted(QueryParams(scope["query_string"]), in_path))
        before = await self._store.conclude(name, ConversationState.STOPPED, reason="it was stopped")
        if before.instance:
            await self._sessions.stop(before.instance, name)

    @asynccontextmanager
    async def _held(self, found: Conversation, scope: Scope) -> AsyncIterator[Claim | None]:
        """Keep the instance while its bytes are read. One that drains can't be claimed any more (None): it is
        read while it lasts.
        """
        refusal = NoLoad(_lost("", "its model's server is ending"), may_wake=False)
        try:
            claim = await self._admission.acquire(
                found.model, UseKind.PEEK, request_id(scope), lambda: refusal
            )
        except ApiError as problem:
            log.debug("replay without a claim", extra={"problem": problem.message})
            yield None
            return
        try:
            yield claim
        finally:
            claim.close()

    @asynccontextmanager
    async def _in_company(self, found: Conversation) -> AsyncIterator[None]:
        """While somebody reads a detached conversation its deadline moves on."""
        if found.state is not ConversationState.DETACHED:
            yield
            return
        keeping = asyncio.create_task(self._keep(found))
        try:
            yield
        finally:
            keeping.cancel()

    async def _keep(self, found: Conversation) -> None:
        going_on = True
        while going_on:
            try:
                going_on = await self._store.detach(
                    found.name, found.ticket, found.instance, round(self._limit_s * 1000)
                )
            except (RedisError, OSError) as problem:
                log.debug("deadline not moved", extra={"problem": str(problem)})
            await asyncio.sleep(self._limit_s / 4)


@asynccontextmanager
async def _held_until_whole(claim: Claim | None, response: Response) -> AsyncIterator[None]:
    """Give the claim back as soon as all is here: a slow client keeps no model."""

    async def let_go() -> None:
        await response.whole()
        if claim is not None:
            claim.close()

    letting_go = asyncio.create_task(let_go())
    try:
        yield
    finally:
        letting_go.cancel()


def split_at(start: str, lead: int) -> tuple[str, bytes]:
    """Return from which byte on the engine is asked, and what goes before: what is left of the comments.

    Clients count what they got, comments of ours included; the engine knows nothing of these.
    """
    if not lead or (start and not (start.isascii() and start.isdigit() and len(start) <= _MOST_DIGITS)):
        return start, b""
    at = int(start or 0)
    return str(max(0, at - lead)), (b":" + b" " * (lead - 3) + b"\n\n")[at:]


def _led_by(lead: bytes, send: Send) -> Send:
    """Return a `send` that has these bytes go before an answer that is a success."""

    async def led(message: Message) -> None:
        await send(message)
        if message["type"] == "http.response.start" and message["status"] == 200:
            await send({"type": "http.response.body", "body": lead, "more_body": True})

    return led if lead else send


def _wanted(query: QueryParams, in_path: str) -> str:
    wanted = in_path or query.get("conv_id", "")
    if not wanted:
        raise ApiError(400, "conv_id is missing from the request", {"param": "conv_id"})
    return wanted


def _waits(found: Conversation) -> bool:
    return found.state is ConversationState.QUEUED and found.gateway_alive


def _check(found: Conversation, wanted: str) -> None:
    """Raise ApiError unless the conversation's bytes can be asked for at its instance."""
    if _waits(found):
        message = f"conversation '{wanted}' waits for model '{found.model}'"
        raise ApiError(503, message, {"reason": found.state.value}, retry_after=RETRY_AFTER_S)
    if found.state is ConversationState.QUEUED:
        raise _lost(wanted, "the gateway that held its place in the queue is gone")
    if found.state in (ConversationState.STOPPED, ConversationState.EXPIRED, ConversationState.LOST):
        message = f"conversation '{wanted}' is over: {found.reason or found.state.value}"
        raise ApiError(404, message, {"reason": found.state.value})
    if not found.address:
        raise _lost(wanted, f"the server of model '{found.model}' that answered it has ended")


def _lost(wanted: str, why: str) -> ApiError:
    return ApiError(404, f"conversation '{wanted}' is lost: {why}; ask again", {"reason": "lost"})


def _waiting(conversation: str) -> dict[str, Any]:
    return {
        "conversation_id": conversation,
        "is_done": False,
        "total_bytes": 0,
        "started_at": 0,
        "completed_at": 0,
    }
