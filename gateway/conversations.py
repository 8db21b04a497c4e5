"""Conversations: streams that go on when their client is gone, begun by a POST with `X-Conversation-Id`.

Such a request is not given up when its socket goes: it waits on for its model, has its answer begun, and then
leaves it to the engine, which keeps what it says for whoever asks (gateway/replay.py).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType

from redis.exceptions import RedisError

from llamastead.gateway.body import Body, ClientGone
from llamastead.gateway.headers import header
from llamastead.gateway.pings import asks_for_stream
from llamastead.gateway.seams import AnswerCut, Claim, Scope, owner_of, request_id, route_of
from llamastead.gateway.sessions import Sessions
from llamastead.shared.errors import ApiError
from llamastead.shared.store.conversations import ConversationStore
from llamastead.shared.streams import CONVERSATION_HEADER, LONGEST_ID, name_of
from llamastead.shared.words import ConversationState

log = logging.getLogger(__name__)

AGAIN_S = 1.0
# How long a request, which may be a warm one, waits for Redis to take its conversation down: more than a slow
# Redis takes, less than it may before its connection counts as dead.
PATIENCE_S = 3.0
STRAY_S = 2 * PATIENCE_S


class Conversations:
    """The conversations that this process carries."""

    def __init__(
        self, store: ConversationStore, sessions: Sessions, gateway: str, detach_limit_s: float
    ) -> None:
        """`detach_limit_s` is how long an answer may go on without a client."""
        self._store = store
        self._sessions = sessions
        self._gateway = gateway
        self._limit_ms = round(detach_limit_s * 1000)
        self._minted = 0
        self._waiting: dict[str, Carried] = {}
        self._unsure: dict[str, str] = {}  # ticket → name: begun or not, and carried by nobody
        self._is_unsure = asyncio.Event()
        self._strays_at: float | None = None

    def look_for_strays(self) -> None:
        """Have those forgotten that Redis, back with older data, calls waiting here, and that are over."""
        self._strays_at = asyncio.get_running_loop().time() + STRAY_S
        self._is_unsure.set()

    async def _find_strays(self, due: float) -> None:
        seen = await self._store.read_queued(self._gateway)
        # What is not carried yet is so by then.
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        still = await self._store.read_queued(self._gateway)
        self._unsure |= {t: name for t, name in still.items() if t in seen and t not in self._waiting}

    async def run(self) -> None:
        """Forget, until cancelled, what Redis took down of conversations that are not carried.

        One whose `converse` got no answer may stand there as one that waits for its model, a whole day long.
        """
        while True:
            await self._is_unsure.wait()
            try:
                due, self._strays_at = self._strays_at, None
                if due is not None:
                    await self._find_strays(due)
                for ticket, name in list(self._unsure.items()):
                    await self._store.conclude(name, ConversationState.STOPPED, ticket, keep_ms=0)
                    del self._unsure[ticket]
            except (RedisError, OSError) as problem:
                log.debug("conversations not forgotten yet", extra={"problem": str(problem)})
                self._strays_at = self._strays_at or due
                await asyncio.sleep(AGAIN_S)
            else:
                if self._strays_at is None:
                    self._is_unsure.clear()

    async def begin(self, scope: Scope, body: Body, model: str) -> "Carried | None":
        """Return the conversation that a request begins, None for one that begins none.

        One of the same name ends. Raises ApiError 400 for an id that can't be one.
        """
        written = header(scope["headers"], CONVERSATION_HEADER)
        if not written or not route_of(scope).streams or not await asks_for_stream(body):
            return None
        if len(written) > LONGEST_ID:
            raise ApiError(400, f"X-Conversation-Id is longer than {LONGEST_ID} bytes")
        name = name_of(owner_of(scope), written.encode("latin-1").decode(errors="replace"))
        self._minted += 1
        ticket = f"{self._gateway}.c{self._minted}"
        carried = Carried(name, ticket, self._store, self._limit_ms, self._waiting)
        try:
            async with asyncio.timeout(PATIENCE_S):
                older = await self._store.converse(name, ticket, self._gateway, model, request_id(scope))
            if older.instance:
                # The new one may be answered elsewhere, so the engine would not end it by itself.
                await self._sessions.stop(older.instance, name)
        except (RedisError, OSError) as problem:
            # A warm request needs no Redis: it is answered, as one that nobody can come back to.
            log.warning("conversation not begun", extra={"problem": str(problem)})
            self._unsure[ticket] = name
            self._is_unsure.set()
            return None
        return carried

    def on_over(self, message: Mapping[str, str]) -> None:
        """End a conversation that waits here: it was stopped, or another one took its name."""
        carried = self._waiting.get(message["ticket"])
        if carried is not None:
            carried.stop()


class Carried:
    """One conversation from its POST to the moment in which its client has all, or is gone.

    An async context around the wait and the answer, in which `answering` is one around the answer.
    """

    def __init__(
        self, name: str, ticket: str, store: ConversationStore, limit_ms: int, waiting: "dict[str, Carried]"
    ) -> None:
        self.name = name
        self.ticket = ticket
        self._store = store
        self._limit_ms = limit_ms
        self._waiting = waiting
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._stopped = False
        self._answers = False

    def renamed(self, scope: Scope) -> Scope:
        """Return the scope with the name that this conversation has at engines, in place of the client's."""
        named = (CONVERSATION_HEADER, self.name.encode())
        headers = [pair for pair in scope["headers"] if pair[0] != CONVERSATION_HEADER]
        return {**scope, "headers": [*headers, named]}

    def stop(self) -> None:
        """End the wait; an answer that has begun is stopped at its engine."""
        if self._task is not None and not self._answers:
            self._stopped = True
            self._task.cancel()

    async def __aenter__(self) -> "Carried":
        """Can be stopped from now on."""
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._waiting[self.ticket] = self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Forget one that got no answer. Raises ApiError 409 where it was stopped."""
        task, self._task = self._task, None
        assert task is not None
        del self._waiting[self.ticket]
        if not self._answers and error is not None:
            await self._conclude(ConversationState.STOPPED, keep_ms=0)
        if self._stopped and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise _over()

    @asynccontextmanager
    async def answering(self, claim: Claim, status: int, lead: int) -> AsyncIterator[None]:
        """Keep Redis true while the answer passes; a client that goes leaves the rest to the engine.

        `lead` is how many bytes of ours the client gets before those of the answer. Raises ApiError 409 where
        it was stopped meanwhile.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                attached = await self._store.attach(self.name, self.ticket, claim.instance, lead)
        except (RedisError, OSError) as problem:
            log.warning("conversation not attached", extra={"problem": str(problem)})
            attached = True
        if not attached:
            raise _over()
        self._answers = True
        try:
            yield
        except AnswerCut as cut:
            await self._conclude(ConversationState.LOST, str(cut))
            raise
        except (ClientGone, asyncio.CancelledError):
            await self._detach(claim.instance)
            raise
        if status == 200:
            await self._conclude(ConversationState.DONE)
        else:
            await self._conclude(ConversationState.STOPPED, keep_ms=0)

    async def _conclude(self, state: ConversationState, reason: str = "", **more: int) -> None:
        try:
            await self._store.conclude(self.name, state, self.ticket, reason, **more)
        except (RedisError, OSError) as problem:
            log.warning("conversation not concluded", extra={"problem": str(problem)})

    async def _detach(self, instance: str) -> None:
        """Give the conversation a claim of its own; this request's share lasts until there is one."""
        ends = asyncio.get_running_loop().time() + self._limit_ms / 1000
        while True:
            try:
                await self._store.detach(self.name, self.ticket, instance, self._limit_ms)
            except (RedisError, OSError) as problem:
                log.debug("conversation not detached yet", extra={"problem": str(problem)})
                if asyncio.get_running_loop().time() > ends:
                    return
                await asyncio.sleep(AGAIN_S)
            else:
                return


def _over() -> ApiError:
    """Return what a request is told whose conversation is over; made anew, since it keeps who raised it."""
    return ApiError(
        409, "the conversation was stopped, or begun anew, while this request waited for its model"
    )
