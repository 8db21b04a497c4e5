"""The only place that reads wall time; everything that measures uses `time.monotonic`."""

import time


def wall_ms() -> int:
    """Wall time in milliseconds since the epoch, for records and log lines only, never for decisions."""
    return time.time_ns() // 1_000_000


def wall_s() -> int:
    """Wall time in whole seconds since the epoch, as the `created` field of the OpenAI API wants it."""
    return time.time_ns() // 1_000_000_000
