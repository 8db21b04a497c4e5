"""Between Redis time and the supervisor's monotonic clock."""

import time
from collections.abc import Mapping

DRIFT_S = 0.5
AHEAD_S = 60.0  # so long after the clock was set ahead what it said before may turn up unseen


class RedisClock:
    """Translates Redis milliseconds to monotonic seconds and back, with one offset so that order is kept.

    The offset is moved only when it is off by more than half a second: small jitter of a look must not
    reorder arrivals that a look before has shown.

    Whoever set Redis's clock back left moments that are yet to come by it. They have passed: they are taken
    as the clock before said, or as just now by a supervisor that did not see that one.
    """

    def __init__(self) -> None:
        self._offset: float | None = None
        self._before: float | None = None
        self._set_ahead: tuple[float, float] | None = None
        self._ends: dict[str, float] = {}

    def seen(self, redis_ms: int) -> None:
        """Note that Redis just said it is `redis_ms`."""
        now = time.monotonic()
        offset = now - redis_ms / 1000
        if self._offset is None or abs(offset - self._offset) > DRIFT_S:
            if self._offset is not None and offset > self._offset:
                self._before = self._offset
            elif self._offset is not None:
                self._set_ahead = self._offset, now
            self._offset = offset

    def monotonic(self, redis_ms: int) -> float:
        """Return monotonic seconds of a moment of the past in Redis time."""
        now, told = time.monotonic(), redis_ms / 1000
        if told + self._need() <= now + DRIFT_S:
            return told + self._need()
        if self._before is None or told + self._before > now:
            self._before = now - told
        return told + self._before

    def ends(self, ends_ms: Mapping[str, int]) -> Mapping[str, float]:
        """Return when each of these waits, by name, ends in monotonic seconds, as it was at first sight.

        So a clock that is set ahead ends nobody's wait, nor that of who came right before it was set.
        """
        self._ends = {
            name: known if (known := self._ends.get(name)) is not None else self._end(end_ms)
            for name, end_ms in ends_ms.items()
        }
        return self._ends

    def _end(self, end_ms: int) -> float:
        now, end = time.monotonic(), end_ms / 1000 + self._need()
        if end <= now and self._set_ahead is not None and now - self._set_ahead[1] < AHEAD_S:
            return end_ms / 1000 + self._set_ahead[0]
        return end

    def redis_ms(self, monotonic: float) -> int:
        """Return Redis milliseconds of a moment in monotonic seconds."""
        return round((monotonic - self._need()) * 1000)

    def _need(self) -> float:
        if self._offset is None:
            raise RuntimeError("Redis time was never seen")
        return self._offset
