"""A short run of the soak with a seed of its own: what the long one would find early shows here."""

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "system"))

from soak_run import soak


@pytest.mark.timeout(240)
async def test_r10_random_faults_under_load_break_nothing() -> None:
    """Strike the herd under mixed load for half a minute: each request ends as it may, all is right then.

    With an odd seed instances listen on TCP ports.
    """
    seed = int(os.environ.get("SEED") or random.randrange(1 << 31))
    print(f"seed {seed}")
    report = await soak(seed, seconds=25.0, pause_s=1.5, clients=6, tcp=bool(seed % 2))
    print(report.text())
    assert report.breaches == []
    assert report.faults
    assert report.outcomes["answered"] > 0
