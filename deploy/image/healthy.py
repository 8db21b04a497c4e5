"""`healthy.py ROLE`: ends with 0 if what this container is for works; the engine's health checks run it.

gateway: it is ready for requests. supervisor: somebody leads, has opened the herd and does not say of itself
that requests are left waiting. worker: one of this machine gave a sign of life in the last 20 s, and its
process is there. Errors are for `docker inspect`.
"""

import os
import socket
import ssl
import sys
import urllib.request
from pathlib import Path

from redis import Redis

from llamastead.shared.clock import wall_ms
from llamastead.shared.store.connect import connect_sync
from llamastead.shared.store.keys import Keys

PATIENCE_S = 3.0
SILENCE_MS = 20_000


def gateway() -> bool:
    """Whether the gateway's own readiness says 200; anything else raises HTTPError."""
    names = ("LLAMASTEAD_SSL_CERT_FILE", "LLAMA_ARG_SSL_CERT_FILE")
    cert = next((os.environ[name] for name in names if os.environ.get(name)), None)
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=_trust(cert)))
    with opener.open(f"http{'s' if cert else ''}://127.0.0.1:8080/readyz", timeout=PATIENCE_S):
        return True


def _trust(cert: str | None) -> ssl.SSLContext | None:
    """Return what the gateway is trusted by: its own certificate, which need not be for this address."""
    if cert is None:
        return None
    context = ssl.create_default_context(cafile=cert)
    context.check_hostname = False
    return context


def herd(role: str) -> bool:
    """Whether Redis shows the role at work."""
    url = Path(os.environ["LLAMASTEAD_REDIS_URL_FILE"]).read_text().strip()
    keys = Keys(os.environ.get("LLAMASTEAD_REDIS_PREFIX", "llamastead:"))
    with connect_sync(url, socket_timeout=PATIENCE_S, connect_timeout=PATIENCE_S) as redis:
        if role == "supervisor":
            leads = redis.exists(keys.leader, keys.herd) == 2
            return leads and redis.hget(keys.leadership, "ready") != b"0"
        return any(is_ours(redis, keys, name) for name in recent(redis, keys))


def recent(redis: Redis, keys: Keys) -> list[str]:
    """Return the workers that gave a sign of life lately."""
    names = redis.zrangebyscore(keys.workers, wall_ms() - SILENCE_MS, "+inf")
    return [name.decode() for name in names]


def is_ours(redis: Redis, keys: Keys, name: str) -> bool:
    """Whether a worker that Redis lists is a process of this container."""
    machine, pid = redis.hmget(keys.worker(name), "machine", "pid")
    return machine == socket.gethostname().encode() and Path(f"/proc/{int(pid or 0)}").exists()


if __name__ == "__main__":
    role = sys.argv[1]
    sys.exit(0 if (gateway() if role == "gateway" else herd(role)) else f"no {role} at work")
