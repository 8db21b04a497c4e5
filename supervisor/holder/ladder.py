"""Stopping the engine, step by step to its end."""

import contextlib
import os
import signal
import time

from faults import fault_point
from question import Question

EXIT_LINE = "cmd_router_to_child:exit"
AFTER_READY_S = 0.05  # an exit line written in the instant of the ready line can be lost for good
AFTER_TERM_S = 1.0
CLOSING = "closing.sock"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25


class Ladder:
    """The steps from a running engine to a dead one; each is told through `holder.tell_step`.

    Ready: its socket gets a name nobody knows, so newcomers fail while we can still ask (a TCP port can't be
    renamed, there only Redis keeps them away); at zero requests,
    at the deadline, or at once with `force`, the exit line; after the stop-timeout KILL of the group.
    Asleep: the same with nothing to ask for. Not ready yet: it reads no exit line, so TERM, then KILL.
    """

    def __init__(self, holder):
        self._holder, self._loop, self._engine = holder, holder.loop, holder.engine
        self._question = self._next_step = self._deadline = None
        self._pause = FIRST_PAUSE_S
        self._leaving = False
        self._told = None
        kind, _, rest = holder.address.partition(":")
        host, _, port = rest.rpartition(":")
        self._place = CLOSING if kind == "unix" else (host, int(port))
        self.killed = False
        self.samples = ""

    def begin(self, deadline_s, force):
        """Take the first step. `deadline_s` bounds the wait for zero, None does not."""
        if self._holder.ready_at is None:
            self._terminate()
            return
        if self._place == CLOSING:
            with contextlib.suppress(FileNotFoundError):
                os.rename("e.sock", CLOSING)
            fault_point("holder.unlinked")
            self._holder.tell_step("unlinked")
        if self._holder.phase == "sleeping":
            self._leave()
        else:
            self.hurry(deadline_s, force)
            self._ask()

    def hurry(self, deadline_s, force):
        """Shorten the wait for zero; a longer deadline than before changes nothing."""
        if self._leaving or self._holder.ready_at is None:
            return
        if force:
            self._leave()
        elif deadline_s is not None:
            due = time.monotonic() + deadline_s
            if self._deadline is None or due < self._deadline:
                self._deadline = due
                self._loop.after(deadline_s, self._leave)

    def on_ready(self):
        """It became ready after our TERM: some builds then stop serving and wait for the exit line."""
        if not self.killed:
            self._loop.after(AFTER_READY_S, lambda: self._engine.say(EXIT_LINE))

    def end(self):
        """The engine is gone; nothing more is to be done."""
        self._leaving = True
        self._loop.cancel(self._next_step)
        if self._question is not None:
            self._question.drop()

    def _terminate(self):
        self._holder.tell_step("term")
        self._engine.signal_group(signal.SIGTERM)
        self._next_step = self._loop.after(AFTER_TERM_S, self._kill)

    def _ask(self):
        if not self._leaving:
            self._question = Question(self._loop, self._place, self._holder.key, self._on_count)

    def _on_count(self, count, samples):
        self._question = None
        self.samples = samples or self.samples
        if count == 0:
            self._leave()
            return
        if count is not None and count != self._told:
            self._told = count
            self._holder.tell_step("waiting", count)
        self._next_step = self._loop.after(self._pause, self._ask)
        self._pause = min(self._pause * 1.5, LONGEST_PAUSE_S)

    def _leave(self):
        if self._leaving:
            return
        self._leaving = True
        self._loop.cancel(self._next_step)
        if self._question is not None:
            self._question.drop()
        early = self._holder.ready_at + AFTER_READY_S - time.monotonic()
        self._next_step = self._loop.after(max(0.0, early), self._say_exit)

    def _say_exit(self):
        self._engine.say(EXIT_LINE)
        fault_point("holder.exit-said")
        self._holder.tell_step("exit")
        self._next_step = self._loop.after(self._holder.spec["stop_timeout_s"], self._kill)

    def _kill(self):
        self.killed = True
        self._holder.tell_step("kill")
        self._engine.signal_group(signal.SIGKILL)
