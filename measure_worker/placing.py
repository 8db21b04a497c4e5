"""Puts whole files into a snapshot of the Hugging Face cache, and takes a model's files out of it again."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from llamastead.shared.errors import ApiError
from llamastead.shared.faults import fault_point
from llamastead.shared.hub_cache import CachedRepository, read_repository
from llamastead.shared.hub_plan import Places, Plan


def place(root: Path, plan: Plan) -> None:
    """Have the snapshot of `plan` name its files, then have `main` point at it. Raises ApiError, OSError.

    Files of the snapshot that was current before stay current if the new one has none of their name.
    """
    places = Places(root, plan.repo)
    if lost := [file.path for file in plan.files if not places.blob(file).is_file()]:
        raise ApiError(500, f"'{plan.repo}': {', '.join(lost)} vanished before all files were there")
    for file in plan.files:
        _link(places.link(plan.commit, file), places.blob(file))
    fault_point("place.linked")
    places.ref.parent.mkdir(parents=True, exist_ok=True)
    note = places.ref.with_name(f".main.{os.getpid()}")
    try:
        note.write_text(plan.commit)
        note.replace(places.ref)
    except OSError:
        note.unlink(missing_ok=True)
        raise


def remove(root: Path, name: str, quant: str) -> int:
    """Remove a model's files, those that nothing else uses, and return the bytes that became free.

    What its repository has beside stays; when nothing is left of that, its folder goes. Raises OSError.
    """
    repository = read_repository(root, name)
    model = repository.find(quant) if repository else None
    if repository is None or model is None:
        return 0
    mine = {path for path in (*model.shards, model.mmproj, model.draft) if path is not None}
    for other in repository.models():
        if other.path != model.path:
            mine -= {*other.shards, other.mmproj, other.draft}
    places = Places(root, name)
    named = [each for each in (places.folder / "snapshots").rglob("*") if each.is_file()]
    used = {each.resolve() for each in named if each not in mine}
    freed = 0
    for path in mine:
        blob = path.resolve()
        # The bytes first: without their name nobody would find them again. What is no link is its own name.
        if blob != path and blob not in used and blob.is_relative_to((places.folder / "blobs").resolve()):
            freed += blob.stat().st_size if blob.is_file() else 0
            blob.unlink(missing_ok=True)
            fault_point("remove.freed")
        path.unlink(missing_ok=True)
    _prune(places, repository)
    return freed


def _link(link: Path, blob: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(blob, link.parent)
    if link.is_symlink() and link.readlink() == Path(target):
        return
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)


def _prune(places: Places, repository: CachedRepository) -> None:
    """Remove folders that are empty now, and the repository's own if no file is left in any snapshot."""
    snapshots = places.folder / "snapshots"
    _remove_empty(snapshots.rglob("*"))
    if not repository.snapshot.is_dir() and not any(snapshots.glob("*")):
        blobs = places.folder / "blobs"
        if not blobs.is_dir() or not any(blobs.iterdir()):
            shutil.rmtree(places.folder)
            return
    if not repository.snapshot.is_dir():
        places.ref.unlink(missing_ok=True)


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in sorted((f for f in folders if f.is_dir() and not f.is_symlink()), reverse=True):
        with suppress(OSError):
            folder.rmdir()
