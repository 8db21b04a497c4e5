"""What a gateway asks of the supervisor: sent as a command, answered through the inbox, or given up."""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisError

from llamastead.shared.errors import ApiError
from llamastead.shared.store.errors import NoHerd, StoreError
from llamastead.shared.store.gateway import GatewayStore


class Commands:
    """Sends commands and hands each its answer."""

    def __init__(self, store: GatewayStore, gateway: str, patience_s: float) -> None:
        """`patience_s`: how long an answer is awaited; the supervisor drops what it reads later than that."""
        self._store = store
        self._gateway = gateway
        self._patience_s = patience_s
        self._asked: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._submitting = 0
        self._early: dict[str, dict[str, Any]] = {}

    @property
    def open_questions(self) -> int:
        """How many commands are under way."""
        return len(self._asked) + self._submitting

    async def ask(self, verb: str, fields: Mapping[str, str]) -> dict[str, Any]:
        """Return the supervisor's answer; its refusal is raised as ApiError, silence as ApiError 503."""
        command = ""
        try:
            async with asyncio.timeout(self._patience_s):
                command = await self._submit(verb, fields)
                answer = await self._asked[command]
        except TimeoutError:
            raise ApiError(503, f"The supervisor did not answer '{verb}' in time", retry_after=5) from None
        except NoHerd:
            raise ApiError(503, "No supervisor has opened the herd yet", retry_after=5) from None
        except (StoreError, RedisError, OSError):
            raise ApiError(503, f"Redis is not reachable: '{verb}' was not sent", retry_after=5) from None
        finally:
            self._asked.pop(command, None)
        if "error" in answer:
            raise ApiError(**answer["error"])
        return answer

    def on_answer(self, message: Mapping[str, str]) -> None:
        """Take an answer from the inbox."""
        command, answer = message["command"], json.loads(message["payload"])
        waiting = self._asked.get(command)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
        elif self._submitting:
            # The inbox can be faster than the reply that brings the command's id.
            self._early[command] = answer

    async def _submit(self, verb: str, fields: Mapping[str, str]) -> str:
        self._submitting += 1
        try:
            deadline_ms = math.ceil(self._patience_s * 1000)
            command = await self._store.submit(verb, self._gateway, deadline_ms, fields)
        finally:
            self._submitting -= 1
            early, self._early = self._early, self._early if self._submitting else {}
        self._asked[command] = asyncio.get_running_loop().create_future()
        if command in early:
            self._asked[command].set_result(early.pop(command))
        return command
