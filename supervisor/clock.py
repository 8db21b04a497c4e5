"""Between Redis time and the supervisor's monotonic clock."""

import time

DRIFT_S = 0.5


class RedisClock:
    """Translates Redis milliseconds to monotonic seconds and back, with one offset so that order is kept.

    The offset is moved only when it is off by more than half a second: small jitter of a look must not
    reorder arrivals that a look before has shown.
    """

    def __init__(self) -> None:
        self._offset: float | None = None

    def seen(self, redis_ms: int) -> None:
        """Note that Redis just said it is `redis_ms`."""
        offset = time.monotonic() - redis_ms / 1000
        if self._offset is None or abs(offset - self._offset) > DRIFT_S:
            self._offset = offset

    def monotonic(self, redis_ms: int) -> float:
        """Return monotonic seconds of a moment in Redis time."""
        return redis_ms / 1000 + self._need()

    def redis_ms(self, monotonic: float) -> int:
        """Return Redis milliseconds of a moment in monotonic seconds."""
        return round((monotonic - self._need()) * 1000)

    def _need(self) -> float:
        if self._offset is None:
            raise RuntimeError("Redis time was never seen")
        return self._offset
