"""SECURITY.md names only tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_line_of_the_table_has_its_test():
    """Each attack is in the table with at least one file of tests."""
    text = (ROOT / "SECURITY.md").read_text().partition("## What is defended")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    named = [re.findall(r"tests/\S+?\.py", row) for row in rows]
    assert len(rows) >= 10
    assert all(named)
    assert [path for paths in named for path in paths if not (ROOT / path).is_file()] == []
