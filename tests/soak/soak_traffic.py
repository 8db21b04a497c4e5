"""The clients of the soak: mixed requests through random gateways, and a line of what became of each."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from soak_stage import MODELS, QUEUE_TIMEOUT_S, STUBS, TOKEN_S, Stage

TALK_TOKENS = 30
DONE = b"data: [DONE]\n\n"
# A request waits at most for the queue, then for its answer; what takes longer than this is stuck.
BOUND_S = 2 * QUEUE_TIMEOUT_S + 20.0
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Outcome:
    """One request. `result` is answered, refused, broken (a stream that said so or lost its connection), cut
    (no byte of an answer), left (by the client), lost (a conversation that nobody knows any more), truncated
    (an end that looks whole and is not) or stuck.
    """

    kind: str
    model: str
    gateway: str
    began: float
    ended: float = 0.0
    result: str = ""
    status: int = 0
    detail: str = ""
    first_byte_at: float = 0.0
    beside: str = ""  # the gateway where a conversation was taken up again


class Traffic:
    """Clients that ask until `stop` is set; `outcomes` is what they saw, also in a file, a line each."""

    def __init__(self, stage: Stage, seed: int, clients: int, log: Path) -> None:
        self._stage = stage
        self._clients = clients
        self._seed = seed
        self._log = log
        self.stop = asyncio.Event()
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """Ask until told to stop, and end what is under way in its own time."""
        with self._log.open("w") as self._file:
            async with asyncio.TaskGroup() as clients:
                for number in range(self._clients):
                    clients.create_task(self._ask_on(random.Random(f"{self._seed}-client-{number}")))

    async def _ask_on(self, choice: random.Random) -> None:
        while not self.stop.is_set():
            kinds = {
                "short": 6,
                "stream": 4,
                "long": 1,
                "embedding": 2,
                "leave": 2,
                "list": 1,
                "conversation": 3,
            }
            kind = choice.choices(list(kinds), list(kinds.values()))[0]
            model = choice.choice(STUBS if kind in ("embedding", "long") else MODELS)
            gateway = choice.choice(list(self._stage.port_of))
            outcome = Outcome(kind, model, gateway, time.monotonic())
            if kind == "conversation":
                outcome.beside = choice.choice(list(self._stage.port_of))
                await self._converse(outcome, choice)
                self._note(outcome)
                continue
            if not await self._reaches(outcome):
                await asyncio.sleep(0.05)  # as a balancer would, it goes elsewhere
                continue
            self._note(outcome)
            await asyncio.sleep(choice.uniform(0.0, 0.3))

    def _note(self, outcome: Outcome) -> None:
        if outcome.result:
            self.outcomes.append(outcome)
            self._file.write(json.dumps(asdict(outcome)) + "\n")
            self._file.flush()

    # Conversations

    async def _converse(self, outcome: Outcome, choice: random.Random) -> None:
        """Begin a conversation, leave it after its first piece, then stop it, forget it, or take it up again
        through another gateway until it is told to its end.
        """
        name = f"talk-{choice.randrange(1 << 40)}"
        then = choice.choices(("resume", "stop", "forget"), (6, 3, 1))[0]
        try:
            async with asyncio.timeout(BOUND_S):
                if not await self._begin(outcome, name):
                    return
                await asyncio.sleep(choice.uniform(0.0, 1.0))
                if then == "resume":
                    await self._resume(outcome, name)
                else:
                    outcome.result = "left"
                    if then == "stop":
                        await self._stop(outcome, name)
        except TimeoutError:
            outcome.result = "stuck"
        finally:
            outcome.ended = time.monotonic()

    def _client(self, gateway: str) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self._stage.port_of[gateway]}"
        return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(None, connect=5.0))

    async def _begin(self, outcome: Outcome, name: str) -> bool:
        """Return whether it has begun; otherwise the outcome says how it ended, or nothing: never reached."""
        body = {"model": outcome.model, **CHAT, "max_tokens": TALK_TOKENS, "stream": True}
        headers = {"X-Conversation-Id": name}
        try:
            async with (
                self._client(outcome.gateway) as client,
                client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer,
            ):
                if answer.status_code != 200:
                    await answer.aread()
                    self._take(outcome, answer)
                    return False
                async with contextlib.aclosing(answer.aiter_raw()) as pieces:
                    async for piece in pieces:
                        if b"data: {" in piece:
                            outcome.first_byte_at = time.monotonic()
                            break
                if b'"error"' in piece:
                    error = json.loads(piece.rpartition(b"data: ")[2])["error"]
                    outcome.result, outcome.status = "refused", error["code"]
                    outcome.detail = error["message"]
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return False
        except httpx.HTTPError as error:
            outcome.result, outcome.detail = "cut", repr(error)
        return not outcome.result

    async def _resume(self, outcome: Outcome, name: str) -> None:
        """Read it from its first byte; a gateway that is away, or says to come back, is asked again."""
        where = {"conv_id": name, "from": 0}
        while True:
            end = b""
            try:
                async with (
                    self._client(outcome.beside) as client,
                    client.stream("GET", "/v1/stream", params=where) as answer,
                ):
                    if answer.status_code == 200:
                        async for piece in answer.aiter_raw():
                            end = (end + piece)[-4096:]
                        self._judge_end(outcome, end)
                        return
                    await answer.aread()
                    if answer.status_code != 503:
                        outcome.result, outcome.status = "lost", answer.status_code
                        outcome.detail = answer.text[:300]
                        return
            except httpx.HTTPError as error:
                outcome.detail = repr(error)
            await asyncio.sleep(0.2)

    async def _stop(self, outcome: Outcome, name: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            async with self._client(outcome.beside) as client:
                answer = await client.delete("/v1/stream", params={"conv_id": name})
                if answer.status_code not in (204, 503):
                    outcome.result, outcome.detail = "truncated", f"DELETE: {answer.text[:300]}"

    async def _reaches(self, outcome: Outcome) -> bool:
        url = f"http://127.0.0.1:{self._stage.port_of[outcome.gateway]}"
        async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(None, connect=5.0)) as client:
            try:
                async with asyncio.timeout(BOUND_S):
                    await self._ask(client, outcome)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                return False
            except TimeoutError:
                outcome.result = "stuck"
            except httpx.HTTPError as error:
                outcome.result = "broken" if outcome.first_byte_at else "cut"
                outcome.detail = repr(error)
        outcome.ended = time.monotonic()
        return True

    async def _ask(self, client: httpx.AsyncClient, outcome: Outcome) -> None:
        if outcome.kind == "list":
            self._take(outcome, await client.get("/models"))
        elif outcome.kind == "embedding":
            body = {"model": outcome.model, "input": "hello"}
            self._take(outcome, await client.post("/v1/embeddings", json=body))
        elif outcome.kind == "short":
            body = {"model": outcome.model, **CHAT, "max_tokens": 2}
            self._take(outcome, await client.post("/v1/chat/completions", json=body))
        else:
            await self._stream(client, outcome)

    def _take(self, outcome: Outcome, answer: httpx.Response) -> None:
        outcome.status, outcome.first_byte_at = answer.status_code, time.monotonic()
        outcome.result = "answered" if answer.status_code == 200 else "refused"
        try:
            body = answer.json()
            outcome.detail = "" if answer.status_code == 200 else str(body["error"]["message"])
        except (ValueError, LookupError, TypeError):
            outcome.result, outcome.detail = "truncated", f"in no known shape: {answer.text[:200]}"

    async def _stream(self, client: httpx.AsyncClient, outcome: Outcome) -> None:
        tokens = {"stream": 20, "long": round(5 / TOKEN_S), "leave": 60}[outcome.kind]
        body = {"model": outcome.model, **CHAT, "max_tokens": tokens, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._take(outcome, answer)
                return
            outcome.status = 200
            end = b""
            try:
                async with contextlib.aclosing(answer.aiter_raw()) as pieces:
                    async for piece in self._until_left(outcome, pieces):
                        end = (end + piece)[-4096:]
            except httpx.HTTPError:
                if (
                    b'"error"' not in end.rstrip().rpartition(b"data: ")[2]
                ):  # what a gateway says when it cuts
                    raise
        if outcome.result == "left":
            return
        self._judge_end(outcome, end)

    @staticmethod
    def _judge_end(outcome: Outcome, end: bytes) -> None:
        last = end.rstrip().rpartition(b"data: ")[2]
        if end.endswith(DONE):
            outcome.result = "answered"
        elif b'"error"' in last and not outcome.first_byte_at:  # comments came before it, but no answer
            error = json.loads(last)["error"]
            outcome.result, outcome.status, outcome.detail = "refused", error["code"], error["message"]
        elif b'"error"' in last:
            outcome.result, outcome.detail = "broken", last.decode()[:300]
        else:
            outcome.result, outcome.detail = "truncated", end[-300:].decode()

    async def _until_left(self, outcome: Outcome, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            if b"data: {" in piece and b'"error"' not in piece:
                outcome.first_byte_at = outcome.first_byte_at or time.monotonic()
            yield piece
            if outcome.kind == "leave" and b"data: {" in piece:
                outcome.result = "left"
                return
