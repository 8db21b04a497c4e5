"""Every history id in the code is explained in tests/histories.md, and every id explained there is tested."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("gateway", "supervisor", "measure_worker", "shared", "llamastead/cli", "llamastead/up", "tests")
ROW = re.compile(r"^\| ([CR]\d+) \|", re.MULTILINE)


def explained() -> set[str]:
    """Return the ids that open a row of the table in tests/histories.md."""
    return set(ROW.findall((ROOT / "tests/histories.md").read_text()))


def ids_in(text: str) -> set[str]:
    """Return the history ids in a text: parts of test names (`test_c03_…`) and upper case ones in prose."""
    named = re.findall(r"def test_\w*", text)
    found = {part.upper() for name in named for part in name.split("_") if re.fullmatch(r"[cr]\d{1,3}", part)}
    return found | set(re.findall(r"\b([CR]\d{1,3})\b", text))


def used_in(folders: tuple[str, ...]) -> set[str]:
    """Return the ids used in the Python files below the folders."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {found for path in files if path != Path(__file__) for found in ids_in(path.read_text())}


def test_every_id_has_one_row():
    """List the ids that open rows and find none twice."""
    rows = ROW.findall((ROOT / "tests/histories.md").read_text())
    assert sorted(rows) == sorted(set(rows))


def test_every_id_in_the_code_is_explained():
    """Collect the ids of all sources and compare with the table."""
    assert used_in(SOURCES) - explained() == set()


def test_every_explained_id_has_a_test():
    """Collect the ids of test names and compare with the table."""
    assert explained() - used_in(("tests",)) == set()
