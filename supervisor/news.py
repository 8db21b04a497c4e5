"""What holders tell, turned into what the core understands and into the supervisor's own output."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from llamastead.shared.devices.host import read_oom_kills
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

# What follows a load waits until those who waited for it are served: it would take their time.
SAY_AFTER_S = 0.2
TOOK_AFTER_S = 0.1
SAID_AT_ONCE = 20
KILL_AGAIN_S = 0.2
KILL_GIVES_UP_AFTER_S = 30.0


class News:
    """Takes the holders' events during one reign.

    `running` are the notes kept of each instance, `tell` reaches the driver, `spawn` runs a task, `on_took`
    is called when an instance that is ready has said what memory it took, `on_ran_out` when a load that could
    not have it has said what it wanted, `on_counted` with instance, model and what an ended one had counted.
    """

    def __init__(
        self,
        run_dir: Path,
        running: Mapping[str, Running],
        tell: Callable[[events.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_took: Callable[[str], None],
        on_ran_out: Callable[[str], None],
        on_counted: Callable[[str, str, str], None],
    ) -> None:
        self._run_dir = run_dir
        self._running = running
        self._tell = tell
        self._spawn = spawn
        self._on_took = on_took
        self._on_ran_out = on_ran_out
        self._on_counted = on_counted
        self._cleaned: set[str] = set()
        self._unsaid: deque[tuple[str, dict[str, str]]] = deque()
        self._saying = False
        self._took: set[str] = set()

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
                    self._unsaid.append((line, {"model": model, "instance": instance}))
                    if running:
                        running.effective.take(line)
                if self._unsaid and not self._saying:
                    self._saying = True
                    asyncio.get_running_loop().call_later(SAY_AFTER_S, self._say_some)
                if running and not running.loading and running.effective.figures != before:
                    self._note_took(instance)
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
                self._say(len(self._unsaid))
                running = self._running.get(instance)
                out = running is not None and read_oom_kills() > running.oom_kills
                end_class, reason = classify_exit(event, kernel_ran_out=out)
                if end_class is EndClass.OUT_OF_MEMORY and running and running.loading:
                    self._on_ran_out(instance)
                doomed = is_doomed(event)
                code = event.code if event.signal is None else -event.signal
                if running:
                    self._on_counted(instance, running.model, event.samples)
                self._tell(events.Exited(instance, end_class, reason, code, doomed, event.tail))
            case HolderRefused(op, why, epoch):
                log.error(
                    "holder refused", extra={"instance": instance, "op": op, "why": why, "epoch": epoch}
                )
            case HolderLost():
                self.clean_up(instance)

    def close(self) -> None:
        """The reign is over: put out what is unsaid, tell no more."""
        self._say(len(self._unsaid))
        self._running = {}

    def _say_some(self) -> None:
        """Put out what engines said, which for a load is hundreds of lines, a few at a time."""
        self._say(SAID_AT_ONCE)
        self._saying = bool(self._unsaid)
        if self._saying:
            asyncio.get_running_loop().call_soon(self._say_some)

    def _say(self, lines: int) -> None:
        for _ in range(min(lines, len(self._unsaid))):
            line, facts = self._unsaid.popleft()
            engine_log.info(line, extra=facts)

    def _note_took(self, instance: str) -> None:
        """Tell what an instance took a little later, once: with that all models are reckoned anew."""
        if instance not in self._took:
            self._took.add(instance)
            asyncio.get_running_loop().call_later(TOOK_AFTER_S, self._tell_took, instance)

    def _tell_took(self, instance: str) -> None:
        self._took.remove(instance)
        if instance in self._running:
            self._on_took(instance)

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
                self._tell(events.BecameReady(instance))
                if running:
                    self._note_took(instance)
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

    def clean_up(
        self,
        instance: str,
        why: str = "its holder process died, so it was ended",
        end_class: EndClass = EndClass.LOST,
    ) -> None:
        """End what is left of an instance without its holder, and tell its exit when nothing is left."""
        if instance not in self._cleaned:
            self._cleaned.add(instance)
            self._spawn(self._clean_up(instance, why, end_class))

    async def _clean_up(self, instance: str, why: str, end_class: EndClass) -> None:
        folder = self._run_dir / "i" / instance
        if not await end_recorded(folder, KILL_GIVES_UP_AFTER_S):
            log.error("instance does not end", extra={"instance": instance})
            self._tell(events.StopFailed(instance))
            await end_recorded(folder, math.inf)
        remove_folder(folder)
        log_tail = (why,) if end_class is EndClass.FAILED_TO_START else ()
        self._tell(events.Exited(instance, end_class, why, log=log_tail))


async def end_recorded(folder: Path, patience_s: float) -> bool:
    """KILL what the record in an instance's folder names until nothing is left; False if it won't go."""
    record = read_record(folder)
    if record is None:
        return True
    gives_up_at = time.monotonic() + patience_s
    while kill_recorded(record):
        if time.monotonic() > gives_up_at:
            return False
        await asyncio.sleep(KILL_AGAIN_S)
    return True
