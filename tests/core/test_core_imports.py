"""The core does no I/O: what it imports is all pure."""

import ast
from pathlib import Path

import llamastead.supervisor.core as core

PURE = {
    "collections.abc",
    "dataclasses",
    "enum",
    "hashlib",
    "itertools",
    "json",
    "math",
    "typing",
    "llamastead.shared.errors",
    "llamastead.shared.waiting",
    "llamastead.shared.words",
}


def imported(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(f"{'.' * node.level}{node.module}")
    return names


def test_core_imports_nothing_that_does_io() -> None:
    """Walk the imports of every module of the core and of the shared ones it uses; all are in a short
    list.
    """
    folder = Path(core.__path__[0])
    shared = folder.resolve().parents[1] / "shared"
    files = [*folder.glob("*.py"), shared / "errors.py", shared / "waiting.py", shared / "words.py"]
    assert len(files) > 12
    for file in files:
        others = {n for n in imported(file.read_text()) if not n.startswith("llamastead.supervisor.core")}
        assert others <= PURE, file.name


def test_core_never_asks_for_time_or_chance() -> None:
    """No module of the core names a clock or a source of chance: both come as arguments."""
    for file in Path(core.__path__[0]).glob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"time", "random", "datetime", "open", "print"}, file.name
