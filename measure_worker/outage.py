"""Tells once that Redis, or something else that a worker needs, went away, and once that it is back."""

import logging
import time

from redis.exceptions import RedisError

from llamastead.shared.disk import unusable
from llamastead.shared.store.connect import explain

log = logging.getLogger(__name__)


class Outage:
    """Whether something is away, as the last call showed."""

    def __init__(self, redis_url: str) -> None:
        self._url = redis_url
        self._since: float | None = None
        self._what = ""

    def lost(self, error: RedisError | OSError) -> None:
        """A call failed."""
        if self._since is not None:
            return
        self._since = time.monotonic()
        if isinstance(error, RedisError):
            self._what = "Redis"
            log.warning("%s; trying until it is back", explain(self._url, error))
        else:
            self._what = error.filename or "a file"
            log.warning("%s; trying until it can", unusable(self._what, error))

    def over(self) -> None:
        """A call was answered."""
        if self._since is not None:
            log.info("%s is back after %.0f s", self._what, time.monotonic() - self._since)
            self._since = None
