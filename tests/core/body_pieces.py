"""What the tests of bodies share: data in pieces, and the verdict of a reader on it."""

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

Verdict = tuple[str, Any]
cuts = st.lists(st.integers(0, 10_000), max_size=12)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut `data` at the given places, taken modulo its length."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]
