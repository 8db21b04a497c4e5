"""`make up` before anything of ours runs: which models it adds, and which port it looks at."""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "tools/bootstrap.py"
PYTHON = """#!/bin/sh
[ "$1" = -c ] || echo "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is installed: its Python prints what it would run. The small model is there."""
    (tmp_path / "tools").mkdir()
    shutil.copy(SOURCE, tmp_path / "tools/bootstrap.py")
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_text(name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    parts = (b"requirements.lock", b"pyproject.toml", sys.version.encode())
    (tmp_path / ".venv/.install-stamp").write_text(hashlib.sha256(b"\0".join(parts)).hexdigest())
    model = tmp_path / ".run/models/gemma-3-270m.gguf"
    model.parent.mkdir(parents=True)
    model.touch()
    return tmp_path


def up(checkout: Path, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    ours = ("LLAMA_", "LLAMASTEAD_", "MODELS_", "PORT")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, str(checkout / "tools/bootstrap.py"), "up", *words],
        env=clean | dict(env or {}),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "env", "small"),
    [
        ([], {}, True),
        (["--models-max", "2"], {"PORT": "9000"}, True),
        ([], {"MODELS_DIR": "/m"}, False),
        (["--models-preset=m.ini"], {}, False),
        (["-m", "m.gguf"], {}, False),
        (["-hf", "o/n"], {}, False),
        ([], {"LLAMASTEAD_MODELS_DIR": "/m"}, False),
        ([], {"LLAMA_ARG_MODELS_PRESET": "m.ini"}, False),
        ([], {"LLAMA_ARG_HF_REPO": "o/n"}, False),
    ],
)
def test_the_small_model_is_for_those_who_name_none(
    checkout: Path, words: list[str], env: dict[str, str], small: bool
) -> None:
    """Start with each way of naming models and with none; only then the small one's folder is given."""
    done = up(checkout, *words, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("-m llamastead up")
    assert (f"--models-dir {checkout}/.run/models" in done.stdout) is small


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["--port", "{}"], {}),
        (["--port={}"], {"PORT": "1"}),
        ([], {"PORT": "{}"}),
        ([], {"LLAMASTEAD_PORT": "{}", "LLAMA_ARG_PORT": "1"}),
        ([], {"LLAMA_ARG_PORT": "{}"}),
    ],
)
def test_the_port_that_is_asked_for_is_looked_at_before_an_installation(
    checkout: Path, words: list[str], env: dict[str, str]
) -> None:
    """Take a port and ask for it in each way, not installed: it is refused by its number; installed it is
    left to `up`, which says who has it.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        asked = [word.format(port) for word in words]
        variables = {name: value.format(port) for name, value in env.items()}
        assert up(checkout, *asked, env=variables).returncode == 0
        (checkout / ".venv/.install-stamp").unlink()
        done = up(checkout, *asked, env=variables)
    assert done.returncode == 1
    assert f"can't listen on port {port} of 127.0.0.1" in done.stderr
