"""Whether a source of the registry changed, told by looking at files and folders, without opening any."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from llamastead.shared.disk import raise_shortage
from llamastead.supervisor.registry.model import Registry, Sources

Marks = Mapping[str, tuple[int, int, int]]
"""Path → inode, size and time of change (ns) of what is there."""


def look(sources: Sources, registry: Registry) -> Marks:
    """Return the marks of all that the registry depends on: preset file, folders, and the models' files.

    Raises OSError where no more files can be opened.
    """
    marks = {}
    for path in {*_places(sources), *_files(registry)}:
        try:
            facts = Path(path).stat()
        except OSError:
            continue
        marks[path] = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return marks


def has_vanished(sources: Sources, seen: Marks, now: Marks) -> bool:
    """Whether a source as a whole is gone for now: an editor replaces the file, a disk is not mounted."""
    roots = (sources.models_preset, sources.models_dir, sources.hub_cache)
    return any(str(root) in seen and str(root) not in now for root in roots if root is not None)


def _files(registry: Registry) -> Iterator[str]:
    for entry in registry.entries.values():
        for file in entry.files:
            yield str(file)
            yield str(file.parent)


def _places(sources: Sources) -> Iterator[str]:
    if sources.models_preset:
        yield str(sources.models_preset)
    if sources.models_dir:
        yield str(sources.models_dir)
        yield from _folders(sources.models_dir)
    if sources.hub_cache:
        yield str(sources.hub_cache)
        for repository in _folders(sources.hub_cache):
            yield f"{repository}/refs/main"
            for part in ("refs", "snapshots"):
                folder = f"{repository}/{part}"
                yield from itertools.chain([folder], _folders(folder))


def _folders(folder: str | Path) -> Iterable[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir()]
    except OSError as error:
        raise_shortage(error)
        return []
