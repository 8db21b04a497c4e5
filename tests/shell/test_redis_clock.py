"""Ends of waits in Redis time, when somebody sets that clock."""

import time

import pytest

from llamastead.supervisor import clock
from llamastead.supervisor.clock import RedisClock

NOON_MS, HOUR_MS, WAIT_MS = 1_800_000_000_000, 3_600_000, 600_000


def set_ahead() -> RedisClock:
    """Return a clock that has seen noon, and then two in the afternoon a moment later."""
    made = RedisClock()
    made.seen(NOON_MS)
    made.seen(NOON_MS + 2 * HOUR_MS)
    return made


@pytest.mark.parametrize("said_ms", [NOON_MS, NOON_MS + 2 * HOUR_MS])
def test_who_comes_around_the_moment_at_which_the_clock_is_set_waits_as_long_as_all(said_ms: int) -> None:
    """Look first after the jump at a wait that began before it, or behind it: it ends in ten minutes."""
    ends = set_ahead().ends({"ticket": said_ms + WAIT_MS})
    assert ends["ticket"] - time.monotonic() == pytest.approx(WAIT_MS / 1000, abs=30)


def test_a_wait_that_was_seen_before_ends_as_it_was() -> None:
    """Look at a wait, set the clock ahead, look again: nothing has changed."""
    made = RedisClock()
    made.seen(NOON_MS)
    before = dict(made.ends({"ticket": NOON_MS + WAIT_MS}))
    made.seen(NOON_MS + 2 * HOUR_MS)
    assert made.ends({"ticket": NOON_MS + WAIT_MS}) == before


def test_what_is_over_stays_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a wait that ended an hour ago with a clock that nobody set, or that was set long ago."""
    made = RedisClock()
    made.seen(NOON_MS)
    assert made.ends({"ticket": NOON_MS - HOUR_MS})["ticket"] < time.monotonic()
    monkeypatch.setattr(clock, "AHEAD_S", 0.0)
    assert set_ahead().ends({"ticket": NOON_MS + WAIT_MS})["ticket"] < time.monotonic()
