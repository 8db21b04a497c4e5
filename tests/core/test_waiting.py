"""The sentences that say why a queue entry waits."""

from llamastead.shared.waiting import sentence
from llamastead.shared.words import WaitReason


def test_residence_reads_as_a_sentence_with_and_without_its_end() -> None:
    """Wait for a model that was loaded just now, its end known and not."""
    text = "waits for c: loaded a moment ago, may go"
    assert sentence(WaitReason.RESIDENCE, ["c"]) == text
    assert sentence(WaitReason.RESIDENCE, ["c"], seconds_left=1.2) == f"{text} in 1 s"
