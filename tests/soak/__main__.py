"""`make soak`: SEED, DURATION and PAUSE between faults (seconds), CLIENTS, TCP come from the environment."""

import asyncio
import os
import random
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "system")]

from soak_run import soak  # noqa: E402 - the folders of the tests come first

seed = int(os.environ.get("SEED") or random.randrange(1 << 31))
print(f"seed {seed}", flush=True)
report = asyncio.run(
    soak(
        seed,
        float(os.environ.get("DURATION") or 600),
        float(os.environ.get("PAUSE") or 3),
        int(os.environ.get("CLIENTS") or 8),
        tcp=bool(os.environ.get("TCP")),
    )
)
print(report.text())
sys.exit(bool(report.breaches))
