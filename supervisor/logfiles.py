"""Reading a model's bounded log file in pieces, for `llamastead logs` and GET /logs/{model}."""

import codecs
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True)
class LogPiece:
    """Text of a log and where to go on: `next` is `<inode>:<offset>`, given back to read what came later."""

    text: str
    next: str


def log_path(run_dir: Path, model: str) -> Path:
    """Return the log file of a model; the name is quoted so that no model name leaves the folder."""
    return run_dir / "logs" / f"{quote(model, safe='')}.log"


def read_log(path: Path, lines: int, after: str = "") -> LogPiece:
    """Return the last `lines` lines of the log, or with `after` (an earlier `next`) what was written since.

    At most 64 KiB at a time. A log that was rotated in between goes on with the rest of the old file first.
    A model that never ran has no file: FileNotFoundError. A position that nobody was told: ValueError.
    """
    if after:
        return _read_on(path, after)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - CHUNK_BYTES))
        data = file.read(CHUNK_BYTES)
        return _piece(file, data[_start_of_last_lines(data, lines) :])


def _piece(file: BinaryIO, data: bytes) -> LogPiece:
    """Return what was just read; a character cut in two at its end is left for the next piece."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    cut, _ = decoder.getstate()
    return LogPiece(text, f"{os.fstat(file.fileno()).st_ino}:{file.tell() - len(cut)}")


def _start_of_last_lines(data: bytes, lines: int) -> int:
    if lines <= 0:
        return len(data)
    position = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(lines):
        position = data.rfind(b"\n", 0, position)
        if position < 0:
            return 0
    return position + 1


def _read_on(path: Path, after: str) -> LogPiece:
    inode, offset = (int(part) for part in after.split(":"))
    if offset < 0:
        raise ValueError(after)
    rotated = path.with_name(path.name + ".1")
    source = path
    if path.stat().st_ino != inode:
        if rotated.exists() and rotated.stat().st_ino == inode and rotated.stat().st_size > offset:
            source = rotated
        else:
            offset = 0
    with source.open("rb") as file:
        file.seek(offset)
        return _piece(file, file.read(CHUNK_BYTES))
