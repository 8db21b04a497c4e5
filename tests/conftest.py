"""What tests of all layers share; it also puts tests/ on the import path, for `from tiny import ...`."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from valkey_server import start_valkey

from llamastead.shared.store.connect import connect
from llamastead.shared.store.keys import Keys


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder whose path is short enough for unix sockets below it (107 bytes in all)."""
    with tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as folder:
        yield Path(folder)


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
