"""The design page beside the supervisor's code speaks only of what is there."""

import ast
import re
from pathlib import Path

SUPERVISOR = Path(__file__).parent.parent / "supervisor"


def names_in_code() -> set[str]:
    """Return the classes and functions of the supervisor, and its modules' file names."""
    found = {path.name for path in SUPERVISOR.rglob("*.py")}
    for path in SUPERVISOR.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
    return found


def test_every_name_on_the_page_exists():
    """Collect what the page sets in code type and look each up in the code."""
    named = set(re.findall(r"`([^`]+)`", (SUPERVISOR / "design.md").read_text()))
    assert len(named) > 20
    assert named - names_in_code() == set()
