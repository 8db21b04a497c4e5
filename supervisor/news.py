"""What holders tell, turned into what the core understands and into the supervisor's own output."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from llamastead.shared.words import EndClass
from llamastead.supervisor.core import events
from llamastead.supervisor.ends import classify_exit, is_doomed
from llamastead.supervisor.holder_link import (
    HolderEvent,
    HolderExit,
    HolderLines,
    HolderLost,
    HolderRefused,
    HolderState,
    HolderStop,
    HolderView,
)
from llamastead.supervisor.holder_record import kill_recorded, read_record, remove_folder
from llamastead.supervisor.running import Running

log = logging.getLogger(__name__)
engine_log = logging.getLogger("llamastead.engine")

KILL_AGAIN_S = 0.2
KILL_GIVES_UP_AFTER_S = 30.0


class News:
    """Takes the holders' events during one reign.

    `running` are the notes kept of each instance, `tell` reaches the driver, `spawn` runs a task, `on_took`
    is called when an instance that is ready has said what memory it took.
    """

    def __init__(
        self,
        run_dir: Path,
        running: Mapping[str, Running],
        tell: Callable[[events.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_took: Callable[[str], None],
    ) -> None:
        self._run_dir = run_dir
        self._running = running
        self._tell = tell
        self._spawn = spawn
        self._on_took = on_took

    def on_event(self, instance: str, event: HolderEvent) -> None:
        """Take one event of an instance's holder."""
        match event:
            case HolderState(state, payload):
                self._on_state(instance, state, payload if isinstance(payload, dict) else {})
            case HolderLines(lines):
                running = self._running.get(instance)
                model = running.model if running else ""
                before = running.effective.figures if running else None
                for line in lines:
                    engine_log.info(line, extra={"model": model, "instance": instance})
                    if running:
                        running.effective.take(line)
                if running and not running.loading and running.effective.figures != before:
                    self._on_took(instance)
                if running and running.loading:
                    self._tell(events.Moved(instance))
            case HolderStop(step, processing):
                facts = {"instance": instance, "step": step, "processing": processing}
                log.info("instance stopping", extra=facts)
                if step == "unlinked":
                    # After an order of ours this says nothing new.
                    self._tell(events.TurnsAway(instance))
                elif step == "kill":
                    self._spawn(self._expect_end(instance))
            case HolderExit():
                end_class, reason = classify_exit(event)
                doomed = is_doomed(event)
                code = event.code if event.signal is None else -event.signal
                self._tell(events.Exited(instance, end_class, reason, code, doomed, event.tail))
            case HolderRefused(op, why, epoch):
                log.error(
                    "holder refused", extra={"instance": instance, "op": op, "why": why, "epoch": epoch}
                )
            case HolderLost():
                self._spawn(self._clean_up(instance))

    def on_view(self, instance: str, view: HolderView) -> None:
        """Take what a holder says of itself when first asked, which it does not tell again."""
        if view.exit is not None:
            self.on_event(instance, view.exit)
        elif view.state is not None:
            self.on_event(instance, HolderState(view.state, view.payload))

    def _on_state(self, instance: str, state: str, payload: dict[str, Any]) -> None:
        running = self._running.get(instance)
        match state:
            case "loading":
                value = payload.get("value")
                if running:
                    running.progress, running.loading = payload, True
                self._tell(events.Loading(instance, value if isinstance(value, int | float) else None))
            case "ready":
                if running:
                    running.loading = False
                    running.meta = payload or running.meta
                    if running.effective.figures:
                        self._on_took(instance)
                self._tell(events.BecameReady(instance))
            case "sleeping":
                self._tell(events.FellAsleep(instance))
            case _:
                log.debug("engine says", extra={"instance": instance, "state": state})

    async def _expect_end(self, instance: str) -> None:
        """Tell when a KILL has no effect: its process hangs in the kernel, and holds what it holds."""
        running = self._running.get(instance)
        await asyncio.sleep(KILL_GIVES_UP_AFTER_S)
        if running is not None and self._running.get(instance) is running:
            log.error("instance does not end", extra={"instance": instance, "pid": running.pid})
            self._tell(events.StopFailed(instance))

    async def _clean_up(self, instance: str) -> None:
        """End what is left of an instance whose holder is gone; tell its exit when nothing is left."""
        folder = self._run_dir / "i" / instance
        end = await end_recorded(folder)
        if not end:
            self._tell(events.StopFailed(instance))
            return
        remove_folder(folder)
        self._tell(events.Exited(instance, EndClass.LOST, "its holder process died, so it was ended"))


async def end_recorded(folder: Path) -> bool:
    """KILL what the record in an instance's folder names until nothing is left; False if it won't go."""
    record = read_record(folder)
    if record is None:
        return True
    gives_up_at = time.monotonic() + KILL_GIVES_UP_AFTER_S
    while kill_recorded(record):
        if time.monotonic() > gives_up_at:
            return False
        await asyncio.sleep(KILL_AGAIN_S)
    return True
