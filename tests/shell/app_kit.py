"""The gateway's application without a server, on a real Valkey, before an instance that only takes notes."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from gateway_kit import ScriptedLeader, until
from redis.asyncio import Redis
from starlette.types import Receive, Scope, Send

from llamastead.gateway.answers import send_json
from llamastead.gateway.app import App
from llamastead.gateway.auth import Keys as ApiKeys
from llamastead.gateway.runtime import Gateway, open_gateway
from llamastead.shared.secret import read_or_make_herd_secret
from llamastead.shared.settings import Settings
from llamastead.shared.store.keys import Keys


@dataclass
class NotingProxy:
    """Answers in place of an instance, and notes what it was asked."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    routes: list[Any] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append((scope["method"], scope["path"]))
        self.routes.append(scope["state"]["route"])
        await send_json(send, 200, {"proxied": scope["path"]}, scope["state"]["request_id"])


@dataclass
class Served:
    """An application, how to call it, and who leads its herd."""

    app: App
    gateway: Gateway
    client: httpx.AsyncClient
    proxy: NotingProxy
    leader: ScriptedLeader

    async def knows(self, *models: str) -> None:
        """Return once the gateway's own copy of the registry has these models."""
        await until(lambda: all(self.gateway.catalog.resolve(name) for name in models), "the registry")


@asynccontextmanager
async def open_app(
    redis: Redis, settings: Settings, api_keys: ApiKeys, *models: str, **aliases: str
) -> AsyncIterator[Served]:
    """Serve a herd with these models; the leader is opened, the gateway registered and up to date."""
    read_or_make_herd_secret(settings.run_dir / "secret")
    leader = ScriptedLeader(redis, Keys("llamastead:"))
    await leader.open(*models, aliases=aliases)
    async with open_gateway(settings) as gateway:
        proxy = NotingProxy()
        app = App(gateway, proxy, api_keys, proxy)
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            served = Served(app, gateway, client, proxy, leader)
            await served.knows(*models)
            await until(lambda: gateway.heartbeat.reached_redis, "the first heartbeat")
            yield served


class OpenRequest:
    """One request driven message by message, as a server would, for answers that don't end by themselves."""

    def __init__(self, app: App, path: str, query: str = "") -> None:
        self.sent: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._told = False
        scope = {
            "type": "http",
            "asgi": {"spec_version": "2.3"},
            "method": "GET",
            "path": path,
            "query_string": query.encode(),
            "headers": [],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self.sent.put))

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._told:
            self._told = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers."""
        start = await self.sent.get()
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers

    async def chunk(self) -> bytes | None:
        """Return the next bytes, None at the end."""
        while True:
            message = await self.sent.get()
            if message["body"]:
                return bytes(message["body"])
            if not message.get("more_body"):
                return None

    def leave(self) -> None:
        """Close the client's side."""
        self._gone.set()
