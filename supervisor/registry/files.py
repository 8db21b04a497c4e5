"""What file names say: shards, projectors, drafts, and what a models folder holds."""

from dataclasses import dataclass
from pathlib import Path

from llamastead.shared.gguf import SHARD
from llamastead.supervisor.registry.model import Problem, RegistryError, Severity

_DRAFT_PREFIXES = ("mtp-", "dspark-", "dflash-")


@dataclass(frozen=True)
class FoundModel:
    """A model in a models folder: its weights (first shard), its projector and draft if it has them."""

    name: str
    path: Path
    mmproj: Path | None = None
    draft: Path | None = None


def scan_models_dir(folder: Path) -> tuple[list[FoundModel], list[Problem]]:
    """Return the models in `folder`: its GGUF files, and one for each of its sub-folders.

    Names are llama-server's: the file's without `.gguf`, the sub-folder's. Of several models in a sub-folder,
    none named like it, each is named `folder/file`. Raises RegistryError when the folder can't be read.
    """
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise RegistryError(f"models folder {folder} can't be read: {error.strerror}") from None
    files = [child for child in children if _is_gguf(child)]
    models = [FoundModel(_stem(file), file) for file in files if not _is_part(file)]
    problems = []
    for child in children:
        if child.is_dir():
            inside, odd = _scan_sub_folder(child)
            models += inside
            problems += odd
    return models, problems


def _scan_sub_folder(folder: Path) -> tuple[list[FoundModel], list[Problem]]:
    try:
        files = [file for file in sorted(folder.iterdir()) if _is_gguf(file)]
    except OSError as error:
        return [], [Problem(Severity.WARNING, str(folder), f"can't be read: {error.strerror}")]
    mmproj = next((file for file in files if "mmproj" in file.name), None)
    draft = next((file for file in files if file.name.startswith(_DRAFT_PREFIXES)), None)
    weights = [file for file in files if not _is_part(file)]
    main = [file for file in weights if "draft" not in file.name.lower()] or weights
    main = [file for file in main if _stem(file) == folder.name] or main
    main = [file for file in main if SHARD.fullmatch(file.name)] or main
    if not main and any(SHARD.fullmatch(file.name) for file in files):
        return [], [Problem(Severity.WARNING, str(folder), "the first shard of its model is missing")]
    if len(main) < 2:
        return [FoundModel(folder.name, file, mmproj, draft) for file in main], []
    models = [FoundModel(f"{folder.name}/{_stem(file)}", file, mmproj, draft) for file in main]
    names = ", ".join(model.name for model in models)
    return models, [Problem(Severity.NOTE, str(folder), f"holds several models, listed as {names}")]


def _is_gguf(path: Path) -> bool:
    return path.name.endswith(".gguf") and path.is_file()


def _is_part(path: Path) -> bool:
    """Whether this file is only a part of another's model: a later shard, a projector, a draft."""
    shard = SHARD.fullmatch(path.name)
    later = shard is not None and int(shard[2]) > 1
    return later or "mmproj" in path.name or path.name.startswith(_DRAFT_PREFIXES)


def _stem(path: Path) -> str:
    return path.name.replace(".gguf", "")
