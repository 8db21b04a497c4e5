"""What tests of all layers share; it also puts tests/ on the import path, for `from tiny import ...`."""

import logging
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from redis.asyncio import Redis
from valkey_server import start_valkey

from llamastead.shared import log
from llamastead.shared.store.connect import connect
from llamastead.shared.store.keys import Keys

# How long an example takes is the machine's affair: a busy one stops a process for longer than that.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# In the background of a shell without job control SIGINT is ignored, and would be by all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """Where logs go and from which level on is a test's own affair: a role that one begins to start in this
    process leaves nothing of its logging to the next.
    """
    names = (None, *log.QUIET)
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each.formatter, log.OURS)]:
        root.removeHandler(handler)
        logging.captureWarnings(False)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


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
