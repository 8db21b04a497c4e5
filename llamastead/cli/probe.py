"""One request of a drill: as short as its kind allows, and timed."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

TOKENS = 8

# Kind → route and body. The stream shows the first token's time apart from the last's.
_ASKED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": TOKENS, "stream": True}),
    "embedding": ("/v1/embeddings", {"input": "Hello"}),
    "rerank": ("/v1/rerank", {"query": "Hello", "documents": ["Hello", "Goodbye"]}),
}
_NUMBERS = ("wait_ms", "load_ms")


@dataclass
class Answer:
    """What came of one request. Times are milliseconds since it was sent; `path` is hot or cold.

    `wait_ms` and `load_ms` are the gateway's own figures. `error` is empty for a whole answer.
    """

    model: str
    kind: str
    request_id: str
    status: int = 0
    path: str = ""
    instance: str = ""
    wait_ms: int | None = None
    load_ms: int | None = None
    first_byte_ms: float | None = None
    total_ms: float = 0.0
    error: str = ""
    process: dict[str, Any] | None = None


async def ask(http: httpx.AsyncClient, model: str, kind: str, request_id: str, patience_s: float) -> Answer:
    """Ask a model for a short answer and return how that went; nothing but a cancellation is raised."""
    answer = Answer(model, kind, request_id)
    route, body = _ASKED[kind]
    began = time.monotonic()
    try:
        async with (
            asyncio.timeout(patience_s),
            http.stream(
                "POST",
                route,
                json={"model": model, **body},
                headers={"X-Request-Id": request_id},
                timeout=None,
            ) as response,
        ):
            _read_head(answer, response)
            await _read_body(answer, response, began)
    except TimeoutError:
        answer.error = f"no answer within {patience_s:g} s"
    except httpx.HTTPError as error:
        answer.error = f"the answer broke off: {error}"
    answer.total_ms = _since(began)
    return answer


def _read_head(answer: Answer, response: httpx.Response) -> None:
    headers = response.headers
    answer.status = response.status_code
    answer.path = headers.get("x-llamastead-path", "")
    answer.instance = headers.get("x-llamastead-instance", "")
    for name in _NUMBERS:
        text = headers.get(f"x-llamastead-{name.replace('_', '-')}", "")
        setattr(answer, name, int(text) if text.isdigit() else None)


async def _read_body(answer: Answer, response: httpx.Response, began: float) -> None:
    lines = []
    async for line in response.aiter_lines():
        if line and not line.startswith(":"):  # a comment of a stream is no answer
            if answer.first_byte_ms is None:
                answer.first_byte_ms = _since(began)
            lines.append(line)
    if not response.is_success:
        answer.error = _message("\n".join(lines)) or f"status {answer.status}"
    elif answer.kind == "completion" and lines[-1:] != ["data: [DONE]"]:
        answer.error = next(filter(None, map(_message, lines)), "the answer ended early")
    elif not lines:
        answer.error = "the answer is empty"


def _message(text: str) -> str:
    """Return the message of an error, as a body or an event of a stream; empty when it is none."""
    try:
        return str(json.loads(text.removeprefix("data: "))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _since(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 1)
