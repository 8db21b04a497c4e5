"""Looks at files whose names come from elsewhere."""

from pathlib import Path


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
