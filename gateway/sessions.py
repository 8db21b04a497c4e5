"""What this gateway asks of instances about their conversations, past tickets and leases.

None of it wakes an instance, and the conversation's own claim is what keeps it.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamastead.gateway.body import Body
from llamastead.gateway.headers import request_head
from llamastead.gateway.upstream import AddressRefused, Pools, Response, Unreachable, UpstreamDied
from llamastead.shared.addresses import outlives_its_instance
from llamastead.shared.errors import ApiError
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.streams import LOOKUP, targets

log = logging.getLogger(__name__)

ASK_S = 5.0
LOST = (AddressRefused, Unreachable, UpstreamDied)
_ANSWER_BYTES = 8 * 1024 * 1024


class Sessions:
    """Asks instances, each with its own key."""

    def __init__(self, store: GatewayStore, pools: Pools, instance_key: Callable[[str, str], str]) -> None:
        self._store = store
        self._pools = pools
        self._key = instance_key

    async def stop(self, instance: str, name: str) -> None:
        """End a conversation at its instance; one that is not there any more has nothing to end."""
        fields = await self._store.read_instance(instance)
        if not fields.get("address"):
            return
        try:
            async with asyncio.timeout(ASK_S):
                for target in targets(name):
                    response = await self._ask("DELETE", instance, fields, target)
                    response.close()
                    if response.status != 404:
                        return
        except (*LOST, TimeoutError) as problem:
            log.warning("conversation not stopped", extra={"instance": instance, "problem": str(problem)})

    async def replay(self, instance: str, fields: Mapping[str, str], name: str, start: str) -> Response:
        """Return the stream of a conversation from a byte on, or the refusal; raises one of LOST."""
        by_query, by_path = targets(name, start)
        response = await self._ask("GET", instance, fields, by_query)
        if response.status == 404:
            response.close()
            response = await self._ask("GET", instance, fields, by_path)
        return response

    async def look_up(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return what all running instances know of these conversations."""
        question = Body.of(json.dumps({"conversation_ids": list(names)}).encode())
        instances = await self._store.read_instances()
        asked = (self._look_up(instance, fields, question) for instance, fields in instances.items())
        return [entry for found in await asyncio.gather(*asked) for entry in found]

    async def _look_up(
        self, instance: str, fields: Mapping[str, str], question: Body
    ) -> list[dict[str, Any]]:
        if fields.get("state") in ("starting", "loading", "stopping", "stop_failed", ""):
            return []
        try:
            async with asyncio.timeout(ASK_S):
                response = await self._ask("POST", instance, fields, LOOKUP, question)
                try:
                    answer = await _whole(response)
                finally:
                    response.close()
            return list(json.loads(answer)) if response.status == 200 else []
        except (*LOST, TimeoutError, ValueError, ApiError) as problem:
            log.debug("conversations not looked up", extra={"instance": instance, "problem": str(problem)})
            return []

    async def _ask(
        self, method: str, instance: str, fields: Mapping[str, str], target: str, body: Body | None = None
    ) -> Response:
        headers = [(b"content-type", b"application/json")] if body else []
        size = body.size if body else None
        key = self._key(instance, fields["nonce"])
        head = request_head(method, target.encode(), headers, size, key, "")
        response = await self._pools.get(instance, fields["address"]).exchange(head, body or Body())
        if response.status == 401 and outlives_its_instance(fields["address"]):
            response.close()
            raise AddressRefused(f"{fields['address']}: another instance listens there")
        return response


async def _whole(response: Response) -> bytes:
    answer = b""
    while not response.ended and len(answer) < _ANSWER_BYTES:
        answer += await response.read()
    return answer
