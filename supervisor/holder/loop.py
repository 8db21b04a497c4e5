"""One thread, file descriptors and timers."""

import selectors
import time

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Loop:
    """Calls back when a descriptor is usable or a time has come; `run` returns after `stop`."""

    def __init__(self):
        self._selector = selectors.DefaultSelector()
        self._timers = {}
        self._last_timer = 0
        self._running = True

    def watch(self, fd, events, call):
        """Call `call(events)` whenever `fd` is ready for one of `events`; replaces an earlier watch."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, call)
        else:
            self._selector.register(fd, events, call)

    def unwatch(self, fd):
        """Stop watching `fd`; must come before it is closed."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def after(self, seconds, call):
        """Call `call()` once, in `seconds`; returns a handle for `cancel`."""
        self._last_timer += 1
        self._timers[self._last_timer] = (time.monotonic() + seconds, call)
        return self._last_timer

    def cancel(self, handle):
        """Forget a timer; one that ran, was cancelled or is None is fine."""
        self._timers.pop(handle, None)

    def stop(self):
        """Let `run` return after the callback that is running."""
        self._running = False

    def run(self):
        """Serve until `stop`."""
        while self._running:
            for key, events in self._selector.select(self._patience()):
                # A callback earlier in this round may have closed or replaced this one.
                if self._selector.get_map().get(key.fd) is key and self._running:
                    key.data(events)
            self._run_due_timers()

    def _patience(self):
        if not self._timers:
            return None
        return max(0.0, min(when for when, _ in self._timers.values()) - time.monotonic())

    def _run_due_timers(self):
        now = time.monotonic()
        for handle, (when, call) in sorted(self._timers.items()):
            if when <= now and handle in self._timers and self._running:
                del self._timers[handle]
                call()
