"""The units of deploy/systemd, checked by systemd itself."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
INSTALLED = "/opt/llamastead/bin/llamastead"


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    """`systemd-analyze verify` is silent about every unit, once the command lies where they expect it."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    units = []
    for unit in sorted(UNITS.iterdir()):
        text = unit.read_text().replace(INSTALLED, str(Path(sys.executable).with_name("llamastead")))
        copy = tmp_path / unit.name.replace("@.", "@8080.")
        copy.write_text(text)
        units.append(str(copy))
    assert len(units) == 5
    done = subprocess.run(
        [analyze, "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
