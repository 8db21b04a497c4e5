"""C sources of the tests, compiled to libraries that processes load."""

import shutil
import subprocess
from pathlib import Path

import pytest

_COMPILER = shutil.which("cc")
NEEDS_COMPILER = pytest.mark.skipif(_COMPILER is None, reason="no C compiler for the tests' own libraries")


def compile_library(source: Path, library: Path) -> None:
    """Compile a C file. Requires: a compiler, as NEEDS_COMPILER sees to."""
    assert _COMPILER is not None
    subprocess.run([_COMPILER, "-shared", "-fPIC", "-o", library, source], check=True)
