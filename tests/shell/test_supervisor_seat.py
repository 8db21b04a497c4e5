"""The seat of a leader: taken by one, free when its process is gone, never taken from a living one."""

import subprocess
import sys
from pathlib import Path

from llamastead.supervisor.seat import Seat

SIT = """
import sys
from pathlib import Path
from llamastead.supervisor.seat import Seat
seat = Seat(Path(sys.argv[1]))
seat.take(sys.argv[2])
print("sits", flush=True)
sys.stdin.read()
"""


def test_who_died_is_named_and_who_lives_is_not(short_tmp: Path) -> None:
    """Let another process sit: nobody is dead; KILL it: its token is told, also twice."""
    path = short_tmp / "leader"
    words = [sys.executable, "-c", SIT, str(path), "t-1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "sits\n"
        try:
            assert Seat(path).token_of_the_dead() == ""
        finally:
            other.kill()
    assert Seat(path).token_of_the_dead() == "t-1"
    assert Seat(path).token_of_the_dead() == "t-1"


def test_a_taken_seat_is_left_to_its_owner(short_tmp: Path) -> None:
    """Take the seat twice: the second finds it taken and does not wait, the first keeps its token there."""
    path = short_tmp / "leader"
    first, second = Seat(path), Seat(path)
    first.take("a-long-token")
    second.take("t-2")
    second.leave()
    first.leave()
    assert second.token_of_the_dead() == "a-long-token"
    second.take("t-2")
    second.leave()
    assert first.token_of_the_dead() == "t-2"


def test_without_a_leader_ever_nobody_is_dead(short_tmp: Path) -> None:
    """Look at a run folder in which nobody led."""
    assert Seat(short_tmp / "leader").token_of_the_dead() == ""
