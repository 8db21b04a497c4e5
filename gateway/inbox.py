"""The one reader of this process: inbox and `events` in one blocking call, fanned out to those concerned."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from redis.exceptions import RedisError

from llamastead.gateway.admission import Admission
from llamastead.gateway.catalog import Catalog
from llamastead.gateway.commands import Commands
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.records import Cursors

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class Inbox:
    """Reads what Redis has for this gateway, from its own last ids on."""

    def __init__(
        self,
        store: GatewayStore,
        gateway: str,
        block_s: float,
        admission: Admission,
        commands: Commands,
        catalog: Catalog,
        on_event: Callable[[Mapping[str, str]], None],
        on_instance_gone: Callable[[str], None],
        on_conversation_over: Callable[[Mapping[str, str]], None],
        on_cut: Callable[[str], None],
    ) -> None:
        """`on_event` gets each event of the herd; `on_instance_gone` the id of an instance that has ended;
        `on_conversation_over` the message about a conversation that is not to wait any more; `on_cut`
        the id of an instance that is stopped whoever is busy with it.
        """
        self._store = store
        self._gateway = gateway
        self._block_ms = round(block_s * 1000)
        self._admission = admission
        self._commands = commands
        self._catalog = catalog
        self._on_event = on_event
        self._on_instance_gone = on_instance_gone
        self._on_conversation_over = on_conversation_over
        self._on_cut = on_cut

    async def run(self) -> None:
        """Read until cancelled, through any outage of Redis."""
        # The inbox is this process's own, so all of it is news; of the events only what comes from now on.
        cursors: Cursors | None = None
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if cursors is None:
                    latest = await self._store.read_cursors(self._gateway)
                    cursors = Cursors("0-0", latest.events_id)
                    self._catalog.mark_all()
                cursors = await self._read(cursors)
                pause_s = FIRST_PAUSE_S
            except (RedisError, OSError) as problem:
                log.debug("inbox not read", extra={"problem": str(problem)})
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                self._catalog.mark_all()

    async def _read(self, cursors: Cursors) -> Cursors:
        inbox_id, events_id = cursors.inbox_id, cursors.events_id
        new = await self._store.read_wait(self._gateway, inbox_id, events_id, self._block_ms)
        for message in new.inbox:
            self._on_message(message.fields)
            inbox_id = message.id
        for event in new.events:
            self._take_event(event.fields)
            events_id = event.id
        if new.inbox:
            self._admission.on_inbox_read(inbox_id)
        return Cursors(inbox_id, events_id)

    def _on_message(self, message: Mapping[str, str]) -> None:
        match message["type"]:
            case "granted":
                self._admission.on_granted(message)
            case "failed":
                self._admission.on_failed(message)
            case "answer":
                self._commands.on_answer(message)
            case "at_work":
                self._commands.on_at_work(message)
            case "wanted":
                self._admission.leases.hurry(message["instance"])
            case "draining" | "ended":
                self._admission.on_instance_gone(message["instance"])
            case "conversation_over":
                self._on_conversation_over(message)
            case other:
                log.warning("message not understood", extra={"type": other})

    def _take_event(self, event: Mapping[str, str]) -> None:
        if event["kind"] in ("registry", "herd"):
            # A registry that is published before its herd is open can't be read yet.
            self._catalog.mark_all()
        elif event["kind"] == "download":
            self._catalog.mark_downloads()
        elif "model" in event:
            self._catalog.mark(event["model"])
        if event["kind"] == "cut":
            self._on_cut(event["instance"])
        if event.get("status") == "unloaded" and "instance" in event:
            self._on_instance_gone(event["instance"])
        self._on_event(event)
