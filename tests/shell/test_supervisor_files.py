"""Parts of the supervisor in a process that may open no more files: nothing is left, nobody is blamed."""

import errno
import os
from pathlib import Path

import pytest
from few_files import no_more_files
from holder_kit import spec_for
from test_holder_supervisors import Watch
from tiny import tiny_model
from waiting import until

from llamastead.shared.addresses import UnixAddress
from llamastead.shared.hub_cache import HubCache
from llamastead.supervisor import reserve
from llamastead.supervisor.core.events import Event
from llamastead.supervisor.health import Health
from llamastead.supervisor.holder_link import HolderError
from llamastead.supervisor.holder_record import instance_folders
from llamastead.supervisor.registry.files import scan_models_dir

NONE_LEFT = "Too many open files"


def children() -> set[str]:
    """Return the pids of our children, dead ones that were not reaped included."""
    own = os.getpid()
    return set(Path(f"/proc/{own}/task/{own}/children").read_text().split())


def files_open() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("beyond", range(6))
async def test_a_start_that_finds_no_file_leaves_no_holder(
    stub: Path, model: Path, run_dir: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    """Have the files run out at each step of a start: it fails or works, and what failed leaves no folder."""
    monkeypatch.setattr(reserve, "SIZE", 0)
    watcher, before = watch(), children()
    why = ""
    with no_more_files(os.getpid(), beyond):
        try:
            await watcher.holders.start_spare()
        except HolderError as error:
            why = str(error)
    assert bool(why) == (beyond < 3)
    if why:
        assert NONE_LEFT in why
        assert "ulimit -n" in why
        assert list((run_dir / "i").iterdir()) == []
        await until(lambda: children() == before, "the end of its holder")
    view = await watcher.holders.start(spec_for(run_dir, stub, model))
    assert view.pid is not None


async def test_what_is_kept_back_is_let_go_with_all_holders(watch: Watch) -> None:
    """Start a spare, which fills what is kept back, and hang up: these files are closed."""
    watcher = watch()
    await watcher.holders.start_spare()
    opened = files_open()
    watcher.holders.close()
    assert files_open() <= opened - reserve.SIZE


async def test_nothing_is_started_out_of_the_last_files(
    stub: Path, model: Path, run_dir: Path, watch: Watch
) -> None:
    """Let fewer files be left than are kept back: a start fails before it opens any, and works with more."""
    watcher, spec = watch(), spec_for(run_dir, stub, model)
    with no_more_files(os.getpid(), reserve.SIZE - 1):
        with pytest.raises(HolderError, match=NONE_LEFT):
            await watcher.holders.start(spec)
        assert instance_folders(run_dir) == []
    await watcher.holders.start(spec)
    with no_more_files(os.getpid()), pytest.raises(OSError, match=NONE_LEFT):
        model.open()
    with no_more_files(os.getpid()):
        watcher.holders.reserve.release()
        model.open().close()


async def test_an_instance_is_not_blamed_for_files_that_we_lack(short_tmp: Path) -> None:
    """Probe a ready instance where no connection can be opened: that is no silence of its, as one would be
    that nobody listens for.
    """
    told: list[Event] = []
    health, where = Health(1.0, told.append), UnixAddress(str(short_tmp / "nobody"))
    assert not await health.answers(where, may_refuse=False)
    with no_more_files(os.getpid()):
        assert await health.answers(where, may_refuse=False)


def test_models_do_not_vanish_where_no_folder_can_be_opened(tmp_path: Path) -> None:
    """Read a models folder with a sub-folder, and a cache, while no folder can be opened, or only some: an
    error each time, never fewer models than there are.
    """
    folder, cache = tmp_path / "models", tmp_path / "cache"
    (folder / "sub").mkdir(parents=True)
    tiny_model(folder / "sub" / "m.gguf", 1)
    repository = cache / "models--org--m"
    snapshot = repository / "snapshots" / ("a" * 40)
    for made in (snapshot, repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    tiny_model(snapshot / "m-Q4_K_M.gguf", 1)
    for read, most in (
        (lambda: len(scan_models_dir(folder)[0]), 1),
        (lambda: len(HubCache(cache).repositories), 1),
    ):
        told = []
        for beyond in range(4):
            with no_more_files(os.getpid(), beyond):
                try:
                    told.append(read())
                except OSError as error:
                    told.append(error.errno)
        assert told[0] == errno.EMFILE
        assert set(told) == {errno.EMFILE, most}
