"""The leadership number on disk, written by several processes at once."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from llamastead.supervisor.epoch import read_epoch, write_epoch

WRITER = """
import sys
from pathlib import Path
from llamastead.supervisor.epoch import read_epoch, write_epoch
path, first, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sys.stdin.readline()
seen = 0
for number in range(first, 400, step):
    write_epoch(path, number)
    now = read_epoch(path)
    assert now >= seen and now >= number, (now, seen, number)
    seen = now
"""


WRITE_TWO = """
import sys
from pathlib import Path
from llamastead.supervisor.epoch import write_epoch
write_epoch(Path(sys.argv[1]), 2)
"""


def test_numbers_only_rise(tmp_path: Path) -> None:
    """Write rising, equal and lower numbers: a lower one is refused and changes nothing."""
    path = tmp_path / "epoch"
    assert read_epoch(path) == 0
    assert [write_epoch(path, number) for number in (3, 3, 2, 4)] == [True, True, False, True]
    assert read_epoch(path) == 4
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_empty_file_is_number_none(tmp_path: Path) -> None:
    """Find the file as a crash right after its making leaves it."""
    path = tmp_path / "epoch"
    path.touch()
    assert read_epoch(path) == 0
    assert write_epoch(path, 1)


def test_processes_that_write_at_once_never_lower_it(tmp_path: Path) -> None:
    """Four processes write interleaved numbers and read after each: no reader ever sees less than before."""
    path = tmp_path / "epoch"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(k + 1), "4"], stdin=subprocess.PIPE)
        for k in range(4)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=30)
        assert writer.returncode == 0
    assert read_epoch(path) == 399


def test_a_start_under_the_lock_holds_the_writer_off(tmp_path: Path) -> None:
    """Hold the file as a starting holder does: the writer waits for it, so no engine starts in between."""
    path = tmp_path / "epoch"
    write_epoch(path, 1)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        writer = subprocess.Popen([sys.executable, "-c", WRITE_TWO, str(path)])
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(0.5)
        assert read_epoch(path) == 1
    assert writer.wait(10) == 0
    assert read_epoch(path) == 2
