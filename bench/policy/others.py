"""The policies ours is compared with: strict first come first served, and llama-server's own router."""

from collections import deque

from bench.policy.world import Engine, Herd, Phase, Request


class StrictFifo:
    """One queue of requests. The first is let in before the second, and swaps its model in if it must.

    Nothing else than the order is made worse than need be: answers run side by side, idle engines stay
    loaded, the least recently used one goes.
    """

    def __init__(self, herd: Herd) -> None:
        self._herd = herd
        self._queue: deque[Request] = deque()

    def on_arrival(self, request: Request) -> None:
        """Put it last."""
        self._queue.append(request)
        self._go_on()

    def on_ready(self, _: Engine) -> None:
        """Go on with the first."""
        self._go_on()

    def on_done(self, _: Engine) -> None:
        """Go on with the first."""
        self._go_on()

    def on_gone(self, _: Engine) -> None:
        """Go on with the first."""
        self._go_on()

    def _go_on(self) -> None:
        herd = self._herd
        while self._queue:
            own = herd.engine_of(self._queue[0].model)
            if own is None or own.phase is not Phase.READY:
                if own is None:
                    self._make_room(self._queue[0].model)
                return
            herd.admit(own, self._queue.popleft())

    def _make_room(self, model: str) -> None:
        herd = self._herd
        if len(herd.engines) < herd.trace.models_max:
            herd.start(model)
        elif not any(engine.phase is Phase.STOPPING for engine in herd.engines):
            idle = [e for e in herd.engines if e.phase is Phase.READY and not e.busy]
            if idle:
                herd.stop(min(idle, key=lambda e: e.last_used))


class Router:
    """llama-server's router: a request for a ready model is let in at once, whoever waits for another one.

    The others wait by model. Whenever something ends, as many idle engines are stopped as models wait, the
    least recently used first; only the model that waits longest may take free room. A busy engine is never
    asked to finish, so a model whose clients overlap keeps its room for as long as they come.
    """

    def __init__(self, herd: Herd) -> None:
        self._herd = herd
        self._queue: list[str] = []
        self._waiting: dict[str, list[Request]] = {}

    def on_arrival(self, request: Request) -> None:
        """Let it in where its model is ready, else have it join those who wait for the model."""
        own = self._herd.engine_of(request.model)
        if own is not None and own.phase is Phase.READY:
            self._herd.admit(own, request)
            return
        self._waiting.setdefault(request.model, []).append(request)
        if request.model not in self._queue and (own is None or own.phase is Phase.STOPPING):
            self._queue.append(request.model)
        self._tick()

    def on_ready(self, engine: Engine) -> None:
        """Let all in who waited for it."""
        for request in self._waiting.pop(engine.model, []):
            self._herd.admit(engine, request)
        self._tick()

    def on_done(self, _: Engine) -> None:
        """See who may go now."""
        self._tick()

    def on_gone(self, _: Engine) -> None:
        """See who may come now."""
        self._tick()

    def _tick(self) -> None:
        herd = self._herd
        while self._queue and len(herd.engines) < herd.trace.models_max:
            if herd.engine_of(self._queue[0]):
                break
            herd.start(self._queue.pop(0))
        stopping = sum(engine.phase is Phase.STOPPING for engine in herd.engines)
        free = herd.trace.models_max - len(herd.engines) + stopping
        while free < len(self._queue):
            idle = [e for e in herd.engines if e.phase is Phase.READY and not e.busy]
            if not idle:
                return
            herd.stop(min(idle, key=lambda e: e.last_used))
            free += 1
