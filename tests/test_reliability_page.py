"""docs/reliability.md names tests only that exist, one in each line, for all that may fail."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("Gateway", "Supervisor", "Holder", "Instance", "Worker", "Redis", "Machine", "Disk", "Open files")


def test_every_test_named_on_the_page_exists() -> None:
    """Look each test id of the table up in its file, and see that each line of each part has one."""
    page = (ROOT / "docs/reliability.md").read_text().partition("## The soak")[0]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert missing == []
    for part in PARTS:
        table = page.partition(f"### {part}\n")[2].partition("\n### ")[0]
        rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
        assert rows, part
        assert [row for row in rows if "`tests/" not in row] == []
