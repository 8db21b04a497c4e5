"""Fixtures of the tests that start real processes or their stand-ins."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from holder_kit import Watcher, cleaned
from tiny import stub_engine, tiny_model

from llamastead.supervisor.engine import find_engine
from llamastead.supervisor.epoch import write_epoch


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
