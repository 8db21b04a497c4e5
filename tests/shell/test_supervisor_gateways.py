"""Silence of gateways, on a clock of the test's own."""

from llamastead.supervisor.gateways import Silence


def test_a_gateway_that_beats_is_never_suspect() -> None:
    """Move the number a little within each time limit: nothing is said, however long it goes on."""
    silence = Silence(suspect_after=10, swept_after=5)
    for beat in range(100):
        assert silence.look({"g": beat}, beat * 9.9) == ([], [])


def test_c165_silence_ends_in_two_passes() -> None:
    """Stop a number: suspect once after ten seconds, dead five after that and not before."""
    silence = Silence(suspect_after=10, swept_after=5)
    looks = [silence.look({"g": 7}, float(now)) for now in range(18)]
    assert looks[:10] == [([], [])] * 10
    assert looks[10] == (["g"], [])
    assert looks[11:15] == [([], [])] * 4
    assert looks[15:] == [([], ["g"])] * 3  # until the sweep has taken it away


def test_a_beat_clears_the_suspicion() -> None:
    """Beat once while suspect: all of the time counts anew."""
    silence = Silence(suspect_after=10, swept_after=5)
    silence.look({"g": 1}, 0)
    assert silence.look({"g": 1}, 10) == (["g"], [])
    assert silence.look({"g": 2}, 14) == ([], [])
    assert silence.look({"g": 2}, 16) == ([], [])
    assert silence.look({"g": 2}, 24) == (["g"], [])
    assert silence.look({"g": 2}, 28.9) == ([], [])
    assert silence.look({"g": 2}, 29) == ([], ["g"])


def test_a_number_that_goes_back_is_a_beat_too() -> None:
    """Restart a gateway under its old name, so that its numbers begin anew: it lives."""
    silence = Silence(suspect_after=10, swept_after=5)
    silence.look({"g": 50}, 0)
    assert silence.look({"g": 1}, 10) == ([], [])
    assert silence.look({"g": 1}, 19) == ([], [])


def test_gateways_are_judged_apart_and_the_gone_are_forgotten() -> None:
    """One is silent, one leaves and comes back with its old number: only the first is suspect."""
    silence = Silence(suspect_after=10, swept_after=5)
    silence.look({"a": 1, "b": 1}, 0)
    assert silence.look({"a": 1}, 5) == ([], [])
    assert silence.look({"a": 1, "b": 1}, 10) == (["a"], [])
    assert silence.look({"a": 1, "b": 1}, 15) == ([], ["a"])
