"""Fixtures of the tests that start real processes or their stand-ins."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from gateway_kit import Desk, ScriptedLeader, open_desk, settings_for
from holder_kit import Watcher, cleaned
from redis.asyncio import Redis
from tiny import stub_engine, tiny_model
from waiting import PATIENCE_S

from llamastead.shared.secret import read_or_make_herd_secret
from llamastead.shared.store.keys import Keys
from llamastead.supervisor.engine import find_engine
from llamastead.supervisor.epoch import write_epoch

_BYTE_PATH = (
    "test_pool",
    "test_silence",
    "test_proxy",
    "test_edge",
    "test_writer",
    "test_pings",
    "test_timeouts",
)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Try the byte path on the event loop of gateways: how it connects and closes is its own code."""
    if item.path.name.startswith(_BYTE_PATH):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="session")
def real_engine() -> Path:
    """The llama-server that the installation would use."""
    return find_engine(None).path


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `--engine` that does what its model's knobs say."""
    return stub_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(params=["stub", "real"])
def engine(request: pytest.FixtureRequest) -> Path:
    """Both engines, one after the other."""
    path: Path = request.getfixturevalue({"stub": "stub", "real": "real_engine"}[request.param])
    return path


@pytest.fixture
def run_dir(short_tmp: Path) -> Iterator[Path]:
    """A run folder under leadership number 1, cleaned of instances afterwards."""
    path = short_tmp / "run"
    path.mkdir(mode=0o700)
    write_epoch(path / "epoch", 1)
    with cleaned(path):
        yield path


@pytest.fixture
def model(short_tmp: Path) -> Path:
    """A tiny model; beside it lie the stub's knobs and journal."""
    return tiny_model(short_tmp / "m.gguf", 1)


@pytest.fixture
async def watch(run_dir: Path) -> AsyncIterator[Callable[..., Watcher]]:
    """Make supervisors that only watch; they hang up at the end."""
    made: list[Watcher] = []

    def make(epoch: int | None = 1, leader: bool = True) -> Watcher:
        made.append(Watcher(run_dir, epoch, leader))
        return made[-1]

    yield make
    for watcher in made:
        watcher.holders.close()


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from outside, nothing said of colours and width."""
    for name in os.environ:
        if name.startswith(("LLAMA_", "LLAMASTEAD_")) or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)


@pytest.fixture
def own_run_dir(no_settings: None, monkeypatch: pytest.MonkeyPatch, short_tmp: Path) -> None:
    """No settings from outside but a run folder of our own."""
    monkeypatch.setenv("LLAMASTEAD_RUN_DIR", str(short_tmp / "run"))


@pytest.fixture
def path(short_tmp: Path) -> Path:
    """Where the instance listens."""
    return short_tmp / "e.sock"


@pytest.fixture
def env(redis_url: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings of gateways as processes, through their environment; returns the run folder."""
    read_or_make_herd_secret(short_tmp / "secret")
    monkeypatch.setenv("LLAMASTEAD_RUN_DIR", str(short_tmp))
    monkeypatch.setenv("LLAMASTEAD_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMASTEAD_STOP_TIMEOUT", str(2 * PATIENCE_S))
    monkeypatch.setenv("LLAMASTEAD_PING_INTERVAL", "-1")  # a slow machine would put comments between answers
    return short_tmp


@pytest.fixture
async def leader(redis: Redis, keys: Keys) -> ScriptedLeader:
    """A stand-in for the supervisor that has opened a herd of the models `a` and `b`."""
    leader = ScriptedLeader(redis, keys)
    await leader.open("a", "b")
    return leader


@pytest.fixture
async def desk(redis: Redis, keys: Keys, leader: ScriptedLeader, tmp_path: Path) -> AsyncIterator[Desk]:
    """A gateway's admission at work beside that leader."""
    async with open_desk(redis, keys, settings_for(tmp_path)) as desk:
        yield desk
