"""Reading a model's log in pieces, also across its rotation."""

from pathlib import Path

import pytest

from llamastead.supervisor.logfiles import CHUNK_BYTES, log_path, read_log


def rotate(path: Path) -> None:
    """Do what a holder does when the file is full."""
    path.replace(path.with_name(path.name + ".1"))
    path.touch()


def test_no_name_leaves_the_folder(tmp_path: Path) -> None:
    """Ask for the files of nasty names: each lies right in the folder and no two share one."""
    names = ["a", "../a", "a/b", "a%2Fb", "..", "", "ä", "a:Q4_K_M"]
    paths = [log_path(tmp_path, name) for name in names]
    assert {path.parent for path in paths} == {tmp_path / "logs"}
    assert len(set(paths)) == len(names)


def test_the_last_lines(tmp_path: Path) -> None:
    """Ask for none, some, exactly all and too many lines, with and without an end of the last one."""
    path = tmp_path / "m.log"
    for end in ("", "\n"):
        path.write_text("one\ntwo\nthree" + end)
        wanted = {0: "", 1: "three", 2: "two\nthree", 3: "one\ntwo\nthree", 9: "one\ntwo\nthree"}
        assert {n: read_log(path, n).text for n in wanted} == {
            n: t + (end if t else "") for n, t in wanted.items()
        }
    path.write_text("")
    assert read_log(path, 5).text == ""


def test_reading_on(tmp_path: Path) -> None:
    """Follow a growing file: each piece is what came since, nothing twice."""
    path = tmp_path / "m.log"
    path.write_text("one\n")
    first = read_log(path, 10)
    assert read_log(path, 0, first.next).text == ""
    with path.open("a") as file:
        file.write("two\nth")
    second = read_log(path, 0, first.next)
    with path.open("a") as file:
        file.write("ree\n")
    third = read_log(path, 0, second.next)
    assert (first.text, second.text, third.text) == ("one\n", "two\nth", "ree\n")


def test_reading_on_across_a_rotation(tmp_path: Path) -> None:
    """Rotate with a rest unread: the rest of the old file comes first, then the new one from its start."""
    path = tmp_path / "m.log"
    path.write_text("one\n")
    piece = read_log(path, 10)
    with path.open("a") as file:
        file.write("two\n")
    rotate(path)
    path.write_text("three\n")
    texts = []
    for _ in range(3):
        piece = read_log(path, 0, piece.next)
        texts.append(piece.text)
    assert texts == ["two\n", "three\n", ""]


def test_reading_on_after_two_rotations(tmp_path: Path) -> None:
    """Rotate twice: what is lost is skipped, the present file comes from its start."""
    path = tmp_path / "m.log"
    path.write_text("one\n")
    piece = read_log(path, 10)
    kept = path.open()  # so that no new file gets the number of this one
    rotate(path)
    path.write_text("two\n")
    rotate(path)
    path.write_text("three\n")
    assert read_log(path, 0, piece.next).text == "three\n"
    kept.close()


def test_a_long_log_comes_in_pieces_of_whole_characters(tmp_path: Path) -> None:
    """Read on through 150 KiB of three-byte characters: put together they are the text."""
    path = tmp_path / "m.log"
    path.write_text("")
    piece = read_log(path, 1)
    text = "x" + "€" * 50_000
    path.write_text(text)
    pieces = []
    while (piece := read_log(path, 0, piece.next)).text:
        pieces.append(piece.text)
        assert len(piece.text.encode()) <= CHUNK_BYTES
    assert "".join(pieces) == text


@pytest.mark.parametrize("after", ["x", "1", "1:x", "1:2:3", "{inode}:-5"])
def test_a_position_that_is_none_is_refused(tmp_path: Path, after: str) -> None:
    """Give positions that nobody was told: ValueError, whatever is wrong with them."""
    path = tmp_path / "m.log"
    path.write_text("one\n")
    with pytest.raises(ValueError):
        read_log(path, 0, after.format(inode=path.stat().st_ino))


def test_a_model_that_never_ran_has_no_file(tmp_path: Path) -> None:
    """Ask for the log of nothing, at its end and from a position."""
    for after in ("", "1:0"):
        with pytest.raises(FileNotFoundError):
            read_log(tmp_path / "no.log", 1, after)
