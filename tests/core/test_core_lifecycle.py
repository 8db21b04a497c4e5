"""The table of an instance's life, its words on the wire, and the page made from both."""

from pathlib import Path

import pytest

from llamastead.shared.words import InstanceState, WireStatus
from llamastead.supervisor.core import lifecycle
from llamastead.supervisor.core.lifecycle import Change, IllegalChangeError, after, wire_status

S = InstanceState
GONE = {S.STOPPED, S.FAILED}
NEWS = {Change.LOADING, Change.READY, Change.ASLEEP}
LEGAL = {
    S.RECOVERING: NEWS | {Change.FORCE, Change.STUCK, Change.BROKE},
    S.STARTING: {Change.LOADING, Change.READY, Change.ABORT, Change.FORCE, Change.STUCK, Change.BROKE},
    S.LOADING: {Change.LOADING, Change.READY, Change.ABORT, Change.FORCE, Change.STUCK, Change.BROKE},
    S.READY: NEWS | {Change.DRAIN, Change.STOP, Change.FORCE, Change.STUCK, Change.BROKE},
    S.DRAINING: NEWS | {Change.UNDRAIN, Change.STOP, Change.FORCE, Change.STUCK, Change.BROKE},
    S.SLEEPING: NEWS | {Change.WAKE, Change.DRAIN, Change.STOP, Change.FORCE, Change.STUCK, Change.BROKE},
    S.WAKING: NEWS | {Change.DRAIN, Change.STOP, Change.ABORT, Change.FORCE, Change.STUCK, Change.BROKE},
    S.STOPPING: set(Change) - {Change.WAKE, Change.ABORT},
    S.STOP_FAILED: set(Change) - {Change.WAKE, Change.ABORT},
    S.STOPPED: set(),
    S.FAILED: set(),
}


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("change", list(Change))
def test_every_pair_of_state_and_change_is_in_the_table_or_illegal(state: S, change: Change) -> None:
    """Try every change in every state: it leads to a state exactly where it is legal, else it raises."""
    if change in LEGAL[state]:
        assert after(state, change) in S
    else:
        with pytest.raises(IllegalChangeError, match=f"{state} cannot undergo {change}"):
            after(state, change)


def test_an_instance_can_end_from_every_state_it_lives_in() -> None:
    """Break an instance in every state: it is failed, and nothing follows an end."""
    for state in set(S) - GONE:
        assert after(state, Change.BROKE) is S.FAILED


def test_no_news_of_the_engine_brings_a_leaving_instance_back() -> None:
    """Send a stopping, stuck or draining instance every line an engine can print: it stays what it is."""
    for state in (S.STOPPING, S.STOP_FAILED, S.DRAINING):
        assert {after(state, news) for news in NEWS} == {state}


def test_c48_every_state_has_its_word_on_the_wire() -> None:
    """Ask for the word of every state and of no instance: all are llama-server's, and only ends are
    unloaded.
    """
    assert {state for state in S if wire_status(state) is WireStatus.UNLOADED} == GONE
    assert wire_status(None) is WireStatus.UNLOADED
    loading = {S.RECOVERING, S.STARTING, S.LOADING, S.WAKING}
    assert {s for s in S if wire_status(s) is WireStatus.LOADING} == loading
    assert wire_status(S.SLEEPING) is WireStatus.SLEEPING


def test_the_page_of_the_lifecycle_is_current() -> None:
    """Make docs/lifecycle.md again from the tables and compare."""
    page = Path(__file__).parents[2] / "docs" / "lifecycle.md"
    assert page.read_text() == lifecycle.page(), "write lifecycle.page() into docs/lifecycle.md"
