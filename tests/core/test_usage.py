"""What is read from an engine's page of metrics."""

from llamastead.shared.usage import COUNTERS, GAUGES, named, samples

PAGE = """\
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 8
llamacpp:prompt_seconds_total 0.25
llamacpp:predicted_tokens_seconds inf
llamacpp:requests_processing 1
llamacpp:odd many
other:tokens_predicted_total 9
"""


def test_samples_are_numbers_by_the_herds_names() -> None:
    """Read a page with a rate of no time and a word: both are left out."""
    found = samples(PAGE)
    assert named(found, COUNTERS) == {"predicted_tokens": 8, "prompt_seconds": 0.25}
    assert named(found, GAUGES) == {"slots_busy": 1}
