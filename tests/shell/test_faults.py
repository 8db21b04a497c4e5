"""Fault points strike whom they are ordered for, once, prove it, and are nothing where not asked for."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fault_orders import FaultOrders

ROOT = Path(__file__).resolve().parents[2]
HOLDER = f"import sys; sys.path.insert(0, {str(ROOT / 'supervisor' / 'holder')!r}); from faults import "
OURS = "from llamastead.shared.faults import "
SCRIPT = """fault_point
print("before", flush=True)
try:
    fault_point("ready.after")
except OSError as error:
    print("failed", error.errno)
print("after", flush=True)
"""


def run(imports: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start a process that comes by the point once."""
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.Popen(
        [sys.executable, "-c", imports + SCRIPT], stdout=subprocess.PIPE, text=True, env=here
    )


@pytest.mark.parametrize("imports", [OURS, HOLDER])
def test_r10_an_ordered_fault_strikes_one_process_once_and_proves_it(short_tmp: Path, imports: str) -> None:
    """Order a kill and a failure: the first process dies, the second is told, the third runs on; each is
    named.
    """
    orders = FaultOrders(short_tmp / "orders")
    orders.order("ready.after")
    killed = run(imports, orders.env)
    assert killed.communicate()[0] == "before\n"
    assert killed.returncode == -signal.SIGKILL
    assert orders.struck("ready.after") == [killed.pid]
    orders.order("ready.after", "fail")
    failed = run(imports, orders.env)
    assert failed.communicate()[0] == "before\nfailed 5\nafter\n"
    spared = run(imports, orders.env)
    assert spared.communicate()[0] == "before\nafter\n"
    assert orders.struck("ready.after") == sorted([killed.pid, failed.pid])


@pytest.mark.parametrize("imports", [OURS, HOLDER])
def test_a_paused_process_goes_on_when_woken(short_tmp: Path, imports: str) -> None:
    """Order a pause: the process stands still with its order taken, and ends as usual once it is woken."""
    orders = FaultOrders(short_tmp / "orders")
    orders.order("ready.after", "pause")
    paused = run(imports, orders.env)
    assert os.WIFSTOPPED(os.waitpid(paused.pid, os.WUNTRACED)[1])
    assert orders.struck("ready.after") == [paused.pid]
    paused.send_signal(signal.SIGCONT)
    assert paused.communicate()[0] == "before\nafter\n"


def test_faults_are_off_unless_asked_for_in_a_folder_of_ones_own(short_tmp: Path) -> None:
    """Leave the variable out, or let others write to the folder: no order is looked at."""
    orders = FaultOrders(short_tmp / "orders")
    orders.order("ready.after")
    assert run(OURS, {}).communicate()[0] == "before\nafter\n"
    orders.folder.chmod(0o770)
    assert run(OURS, orders.env).communicate()[0] == "before\nafter\n"
    assert orders.struck("ready.after") == []
