"""What a gateway asks of the supervisor: sent as a command, answered through the inbox, or given up."""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisError

from llamastead.gateway.answers import no_answer
from llamastead.shared.errors import ApiError
from llamastead.shared.store.errors import StoreError
from llamastead.shared.store.gateway import GatewayStore


class Commands:
    """Sends commands and hands each its answer."""

    def __init__(self, store: GatewayStore, gateway: str, patience_s: float) -> None:
        """`patience_s`: how long the supervisor may be silent; it drops what it reads later than that."""
        self._store = store
        self._gateway = gateway
        self._patience_s = patience_s
        self._asked: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._patience: dict[str, asyncio.Timeout] = {}
        self._submitting = 0
        self._early: dict[str, dict[str, Any]] = {}

    @property
    def open_questions(self) -> int:
        """How many commands are under way."""
        return len(self._asked) + self._submitting

    async def ask(
        self, verb: str, fields: Mapping[str, str], patience_s: float | None = None
    ) -> dict[str, Any]:
        """Return the supervisor's answer; its refusal is raised as ApiError, silence as ApiError 503.

        What takes long is awaited while the supervisor goes on saying that it is at work on it: a 503 would
        have the caller order again what happens anyway. `patience_s` is for what takes longer than the usual
        and is not to end with a supervisor that is followed by another.
        """
        command = ""
        try:
            async with asyncio.timeout(patience_s or self._patience_s) as patience:
                command = await self._submit(verb, fields)
                self._patience[command] = patience
                answer = await self._asked[command]
        except TimeoutError:
            raise ApiError(503, f"The supervisor did not answer '{verb}' in time", retry_after=5) from None
        except (StoreError, RedisError, OSError) as problem:
            raise no_answer(problem, f"'{verb}' was not sent") from None
        finally:
            self._asked.pop(command, None)
            self._patience.pop(command, None)
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

    def on_at_work(self, message: Mapping[str, str]) -> None:
        """Wait anew for the answer to a command that the supervisor is at work on."""
        # Told before the reply that brings the command's id: the next word comes soon enough.
        patience = self._patience.get(message["command"])
        if patience is None or patience.expired():
            return
        longer = asyncio.get_running_loop().time() + self._patience_s
        if longer > (patience.when() or 0.0):
            patience.reschedule(longer)

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
