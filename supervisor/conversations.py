"""Ends the claims of conversations that no gateway ends: when the engine is done, or at their deadline.

The supervisor asks, not a gateway: the one that had the client may be gone.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import httpx

from llamastead.shared.store.conversations import CLAIM, ConversationStore
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.streams import LOOKUP, targets
from llamastead.shared.words import ConversationState
from llamastead.supervisor.running import Running, engine_client

log = logging.getLogger(__name__)

ASK_S = 5.0
HEARD_S, END_S = 0.25, 1.0
TIME_OVER = "nobody came back to it within detach-limit"


@dataclass(frozen=True)
class Conversations:
    """Watches the conversations of a reign."""

    store: LeaderStore
    reads: GatewayStore
    conversations: ConversationStore
    secret: Callable[[], bytes]
    running: Mapping[str, Running]
    limit_ms: int

    async def run(self, every_s: float) -> None:
        """Look each `every_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            facts = await self.store.observe()
            held = {
                instance: {
                    holder.removeprefix(CLAIM): ticket
                    for holder, ticket in claims.leases.items()
                    if holder.startswith(CLAIM)
                }
                for instance, claims in facts.claims.items()
            }
            await asyncio.gather(
                *(
                    self._settle(instance, tickets, facts.now_ms)
                    for instance, tickets in held.items()
                    if tickets
                )
            )

    async def _settle(self, instance: str, tickets: Mapping[str, str], now_ms: int) -> None:
        note = self.running.get(instance)
        if note is None:
            return
        async with engine_client(self.secret(), instance, note, ASK_S) as client:
            going = await self._going(client, instance, tickets)
            for name, ticket in tickets.items():
                found = await self.conversations.read(name)
                if found is None and not await self._is_held(instance, name, ticket):
                    # Redis lost its data since the look, and the claim with it: somebody may be listening.
                    continue
                if found is None or found.ticket != ticket:
                    # Nobody can ask for it any more. What has its name now may be at this engine, too.
                    if found is None:
                        await self._stop(client, name)
                    await self.reads.release(instance, CLAIM + name, ticket, used=False)
                elif name not in going:
                    await self.conversations.conclude(name, ConversationState.DONE, ticket)
                elif found.state is ConversationState.STREAMING:
                    if not found.gateway_alive:
                        await self.conversations.detach(name, ticket, instance, self.limit_ms)
                elif found.state is ConversationState.DETACHED and found.deadline_ms <= now_ms:
                    log.warning("a conversation's time is over", extra={"instance": instance})
                    await self._stop(client, name)
                    await self.conversations.conclude(name, ConversationState.EXPIRED, ticket, TIME_OVER)

    async def _is_held(self, instance: str, name: str, ticket: str) -> bool:
        return (await self.reads.read_leases(instance)).get(CLAIM + name) == ticket

    async def _going(
        self, client: httpx.AsyncClient, instance: str, names: Collection[str]
    ) -> Collection[str]:
        """Return which of these the engine still answers; all of them if it does not say."""
        try:
            answer = await client.post(LOOKUP, json={"conversation_ids": list(names)})
            return {e["conversation_id"] for e in answer.raise_for_status().json() if not e["is_done"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as problem:
            # It may be busy with a long batch; the deadline holds all the same.
            about = {"instance": instance, "problem": str(problem)}
            log.debug("no answer about conversations", extra=about)
            return names

    async def end(self, instance: str, names: Sequence[str]) -> None:
        """Stop these conversations at an instance that is about to be cut: it would not end under them."""
        # Their gateways hear of it first and tell their clients of an error, not of an end.
        await asyncio.sleep(HEARD_S)
        note = self.running.get(instance)
        if note is not None:
            with suppress(TimeoutError):
                async with (
                    asyncio.timeout(END_S),
                    engine_client(self.secret(), instance, note, ASK_S) as client,
                ):
                    for name in names:
                        await self._stop(client, name)

    async def _stop(self, client: httpx.AsyncClient, name: str) -> None:
        try:
            for target in targets(name):
                if (await client.delete(target)).status_code != 404:
                    return
        except httpx.HTTPError as problem:
            log.warning("a conversation could not be stopped", extra={"problem": str(problem)})
