"""GET /metrics?model=: an instance's own page, read so that watching never keeps it awake nor wakes it.

To older engines a look at their metrics is a task: it wakes a sleeper and puts off falling asleep. So an
instance is asked again only after it did something; between, its last page is shown, with rates at nothing.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from redis.exceptions import RedisError
from starlette.types import Message, Receive, Scope, Send

from llamastead.gateway.answers import send_text
from llamastead.gateway.catalog import Catalog, CatalogModel
from llamastead.gateway.leases import is_peek
from llamastead.shared.store.errors import StoreError
from llamastead.shared.store.gateway import GatewayStore

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTENT_TYPE = "text/plain; version=0.0.4"
_GAUGE = re.compile(rb"^# TYPE (\S+) gauge$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """What an instance said of itself; `stamp` is what `InstanceMetrics` knew of its use then."""

    stamp: str
    text: bytes


class InstanceMetrics:
    """Answers for instances that have nothing new to tell, and asks the others through the proxy."""

    def __init__(self, catalog: Catalog, store: GatewayStore, proxy: Endpoint) -> None:
        self._catalog = catalog
        self._store = store
        self._proxy = proxy
        self._pages: dict[str, Page] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send, name: str) -> None:
        """Answer for the model `name`; what the proxy refuses, such as an unknown one, it refuses here."""
        model = self._catalog.resolve(name)
        if model is None or not model.running:
            await self._proxy(scope, receive, send)
            return
        kept, stamp = self._pages.get(model.name), await self._stamp(model)
        if model.asleep or (kept is not None and stamp and kept.stamp == stamp):
            text = at_rest(kept.text).decode() if kept is not None else ""
            await send_text(send, text, scope["state"]["request_id"], CONTENT_TYPE)
            return

        def keep(text: bytes) -> None:
            # Two who look at once are each other's lease: of the model's use it says nothing new.
            before = self._pages.get(model.name)
            self._pages[model.name] = Page(stamp or (before.stamp if before else ""), text)

        await self._proxy(scope, receive, _noting(send, keep) if scope["method"] == "GET" else send)

    async def _stamp(self, model: CatalogModel) -> str:
        """Return a word that stays the same until the model is used again; empty while it may be working."""
        try:
            fields = await self._store.read_model(model.name)
            instance = fields.get("instance", "")
            if not instance:
                return ""
            leases = await self._store.read_leases(instance)
            if not all(is_peek(lease) for lease in leases.values()):
                return ""
        except (RedisError, StoreError, OSError):
            return ""
        return f"{instance} {fields.get('last_used_ms', '')}"


def at_rest(page: bytes) -> bytes:
    """Return a page of metrics with each gauge at 0: counters stay, nothing is being done."""
    for name in set(_GAUGE.findall(page)):
        page = re.sub(rb"^(%s(?:\{.*\})?) .*$" % re.escape(name), rb"\1 0", page, flags=re.MULTILINE)
    return page


def _noting(send: Send, keep: Callable[[bytes], None]) -> Send:
    """Return a `send` that hands the body of a right answer to `keep` once it is whole."""
    right, parts = False, bytearray()

    async def note(message: Message) -> None:
        nonlocal right
        await send(message)
        if message["type"] == "http.response.start":
            right = message["status"] == 200
        elif right:
            parts.extend(message.get("body", b""))
            if not message.get("more_body", False):
                keep(bytes(parts))

    return note
