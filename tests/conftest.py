"""What tests of all layers share; it also puts tests/ on the import path, for `from tiny import ...`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder whose path is short enough for unix sockets below it (107 bytes in all)."""
    with tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as folder:
        yield Path(folder)
