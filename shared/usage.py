"""What an engine's own page of metrics says of its work, and what the herd calls that."""

import math
import re
from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "prompt_tokens_total": "prompt_tokens",
    "tokens_predicted_total": "predicted_tokens",
    "prompt_seconds_total": "prompt_seconds",
    "tokens_predicted_seconds_total": "predicted_seconds",
    "n_decode_total": "decodes",
}
"""The engine's counters (without its prefix) and the herd's names of them."""
GAUGES: Mapping[str, str] = {
    "requests_processing": "slots_busy",
    "requests_deferred": "requests_deferred",
    "prompt_tokens_seconds": "prompt_tokens_per_second",
    "predicted_tokens_seconds": "predicted_tokens_per_second",
}
"""The same of what is so at one moment."""

_SAMPLE = re.compile(r"^llamacpp:(\w+) (\S+)$", re.MULTILINE)


def samples(page: str) -> dict[str, float]:
    """Return the samples of an engine's page by its names; those that are no finite number are left out."""
    found = {}
    for name, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if math.isfinite(value):
            found[name] = value
    return found


def named(found: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """Return the samples that have a name here, by that."""
    return {ours: found[theirs] for theirs, ours in names.items() if theirs in found}
