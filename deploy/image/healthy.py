"""`healthy.py ROLE`: ends with 0 if what this container is for works; the engine's health checks run it.

gateway: it is ready for requests. supervisor: somebody leads, has opened the herd and does not say of itself
that requests are left waiting. worker: one gave a sign of life in the last 20 s. Errors are for `docker
inspect`.
"""

import os
import sys
import urllib.request
from pathlib import Path

from llamastead.shared.clock import wall_ms
from llamastead.shared.store.connect import connect_sync
from llamastead.shared.store.keys import Keys

PATIENCE_S = 3.0
SILENCE_MS = 20_000


def gateway() -> bool:
    """Whether the gateway's own readiness says 200; anything else raises HTTPError."""
    with urllib.request.urlopen("http://127.0.0.1:8080/readyz", timeout=PATIENCE_S):
        return True


def herd(role: str) -> bool:
    """Whether Redis shows the role at work."""
    url = Path(os.environ["LLAMASTEAD_REDIS_URL_FILE"]).read_text().strip()
    keys = Keys(os.environ.get("LLAMASTEAD_REDIS_PREFIX", "llamastead:"))
    with connect_sync(url, socket_timeout=PATIENCE_S, connect_timeout=PATIENCE_S) as redis:
        if role == "supervisor":
            leads = redis.exists(keys.leader, keys.herd) == 2
            return leads and redis.hget(keys.leadership, "ready") != b"0"
        return bool(redis.zcount(keys.workers, wall_ms() - SILENCE_MS, "+inf"))


if __name__ == "__main__":
    role = sys.argv[1]
    sys.exit(0 if (gateway() if role == "gateway" else herd(role)) else f"no {role} at work")
