"""A gateway that says what a test wants, for tests of the command."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

MODELS = [
    {
        "id": "qwen",
        "aliases": ["default", "q"],
        "status": {"value": "unloaded", "state": "stopped"},
        "source": "preset",
        "metadata": {"size_bytes": 1 << 30},
    },
    {
        "id": "gemma",
        "aliases": [],
        "status": {"value": "loaded", "state": "ready"},
        "source": "models_dir",
        "meta": {"n_ctx": 4096},
    },
    {
        "id": "broken",
        "aliases": ["old"],
        "status": {"value": "unloaded", "state": "failed", "failed": True, "reason": "out of memory"},
        "source": "models_dir",
    },
    {
        "id": "slow",
        "aliases": [],
        "status": {"value": "loading", "state": "loading", "progress": {"value": 0.42}},
        "source": "models_dir",
    },
]

QUEUE = {
    "queue": [
        {
            "model": "qwen",
            "position": 1,
            "waiting_ms": 4200,
            "reason": "busy",
            "wait": "waits for tiny: 2 requests in flight, drains in 12 s",
            "requests": [{"request_id": "r1"}, {}],
        }
    ],
    "waiting": 2,
}


class FakeGateway(ThreadingHTTPServer):
    """Answers with what a test put into `answers`: (method, path) → (status, JSON or text)."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {("GET", "/models"): (200, {"data": MODELS})}
        self.asked: list[tuple[str, str, str | None, bytes]] = []
        super().__init__(("127.0.0.1", 0), Answerer)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answerer(BaseHTTPRequestHandler):
    server: FakeGateway

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization"), body))
        answers, path = self.server.answers, self.path.partition("?")[0]
        status, content = answers.get((self.command, self.path)) or answers.get(
            (self.command, path), (404, {"error": {"message": "no"}})
        )
        sent = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_POST = answer  # noqa: N815 - names of the base class

    def log_message(self, *_: Any) -> None:
        """Stay quiet."""


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    """A gateway that client commands find through LLAMASTEAD_URL."""
    with FakeGateway() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("LLAMASTEAD_URL", server.url)
        yield server
        server.shutdown()
        thread.join()
