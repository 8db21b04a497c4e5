"""`llamastead doctor`: what it finds on a machine, and when it fails."""

import json
import re
from pathlib import Path

import pytest

from llamastead.cli.main import main

pytestmark = pytest.mark.usefixtures("own_run_dir")


def test_doctor_tells_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that can run a herd all checks are there, and none fails."""
    assert main(["doctor", "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    names = [
        "platform",
        "llamastead",
        "run folder",
        "engine",
        "engine runs",
        "devices",
        "models",
        "memory",
        "redis",
        "open files",
    ]
    assert list(findings) == names
    assert "llama-server" in findings["engine"]["text"]


def test_doctor_goes_on_where_the_address_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Give an address that is no Redis URL: one finding fails, the others are told."""
    assert main(["doctor", "--redis-url", "http://x"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"redis +fail +http://x is no Redis address", text)
    assert "open files" in text


def test_doctor_fails_when_something_is_missing(capsys: pytest.CaptureFixture[str], short_tmp: Path) -> None:
    """Name an engine that can't run and a Redis that isn't there: both are told, the exit code is 1."""
    broken = short_tmp / "llama-server"
    broken.write_text("#!/bin/sh\nkill -ILL $$\n")
    broken.chmod(0o755)
    assert main(["doctor", "--engine", str(broken), "--redis-url", "redis://:s3cret@127.0.0.1:1"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"engine +fail +.*illegal instruction", text, re.IGNORECASE)
    assert re.search(r"redis +fail +Redis at redis://:\*\*\*@127.0.0.1:1", text)


def test_doctor_warns_of_devices_that_only_the_engine_tells_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stub: Path
) -> None:
    """List a card that NVML does not know; its own findings say so, and how it is counted."""
    monkeypatch.setenv("GGML_STUB_DEVICES", "Vulkan0: Radeon (16384 MiB, 12000 MiB free)")
    main(["doctor", "--json", "--engine", str(stub)])
    found = [f for f in json.loads(capsys.readouterr().out) if f["what"] == "devices"]
    assert [finding["verdict"] for finding in found] == ["warn"]
    assert "Vulkan0: Radeon, 16384 MiB, 12000 MiB free; only the engine tells of it" in found[0]["text"]
