"""Looks at files whose names come from elsewhere."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

NAMED = 4
"""So many missing files are named; a model may have thousands of shards."""


def absolute_path(text: str | Path) -> Path:
    """Return a path from the root, `~` filled in. Raises ValueError for the home of a user who has none."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError("expected a path; no such user has a home") from None


def is_file(path: Path) -> bool:
    """Whether a file can be found there; a name that is too long or behind a closed folder finds none."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether a folder can be found there, in the same sense."""
    try:
        return path.is_dir()
    except OSError:
        return False


def missing(files: Iterable[Path]) -> list[Path]:
    """Return those files that can't be found."""
    return [file for file in files if not is_file(file)]


def some_of(names: Sequence[str | Path]) -> str:
    """Return the first of some names, and how many more there are."""
    text = ", ".join(map(str, names[:NAMED]))
    return text if len(names) <= NAMED else f"{text} and {len(names) - NAMED} more"


def is_text(path: str | Path) -> bool:
    """Whether a file's name is UTF-8. Any other can stand neither in JSON nor in Redis."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(path: str | Path) -> str:
    """Return a file's name as it can be printed: bytes that are no text as `\\xff`."""
    return os.fsencode(path).decode(errors="backslashreplace")
