"""What file names say: shards, projectors, drafts, and what a models folder holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamastead.shared.disk import raise_shortage
from llamastead.shared.files import is_file, is_folder
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


def adapter_files(options: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files of the adapters (LoRA) that options name, with a scale behind each or not."""
    plain = options.get("lora", "").split(",")
    scaled = (word.rpartition(":") for word in options.get("lora-scaled", "").split(","))
    names = [*plain, *(name or scale for name, _, scale in scaled)]
    return tuple(Path(name).absolute() for name in names if name)


def scan_models_dir(folder: Path) -> tuple[list[FoundModel], list[Problem]]:
    """Return the models in `folder`: its GGUF files, and one for each of its sub-folders.

    Names are llama-server's: the file's without `.gguf`, the sub-folder's. Of several models in a sub-folder,
    none named like it, each is named `folder/file`. A projector is looked for beside a linked model, then
    beside the file that the link leads to. Raises RegistryError when the folder can't be read, OSError
    where no more files can be opened.
    """
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise_shortage(error)
        raise RegistryError(f"models folder {folder} can't be read: {error.strerror}") from None
    files = [child for child in children if _is_gguf(child)]
    models = [
        FoundModel(model_name(file), file, _projector_of_target(file)) for file in files if not _is_part(file)
    ]
    problems = []
    for child in children:
        if is_folder(child):
            inside, odd = _scan_sub_folder(child)
            models += inside
            problems += odd
    return models, problems


def _scan_sub_folder(folder: Path) -> tuple[list[FoundModel], list[Problem]]:
    try:
        files = [file for file in sorted(folder.iterdir()) if _is_gguf(file)]
    except OSError as error:
        raise_shortage(error)
        return [], [Problem(Severity.WARNING, str(folder), f"can't be read: {error.strerror}")]
    mmproj = next((file for file in files if "mmproj" in file.name), None)
    draft = next((file for file in files if file.name.startswith(_DRAFT_PREFIXES)), None)
    weights = [file for file in files if not _is_part(file)]
    main = [file for file in weights if "draft" not in file.name.lower()] or weights
    main = [file for file in main if model_name(file) == folder.name] or main
    main = [file for file in main if SHARD.fullmatch(file.name)] or main
    if not main and any(SHARD.fullmatch(file.name) for file in files):
        return [], [Problem(Severity.WARNING, str(folder), "the first shard of its model is missing")]
    if len(main) < 2:
        return [
            FoundModel(folder.name, file, mmproj or _projector_of_target(file), draft) for file in main
        ], []
    models = [FoundModel(f"{folder.name}/{model_name(file)}", file, mmproj, draft) for file in main]
    names = ", ".join(model.name for model in models)
    return models, [Problem(Severity.NOTE, str(folder), f"holds several models, listed as {names}")]


def _projector_of_target(file: Path) -> Path | None:
    """Return the projector beside the file that a link leads to, if that is the only model there."""
    if not file.is_symlink():
        return None
    try:
        beside = sorted(file.resolve().parent.iterdir())
    except OSError as error:
        raise_shortage(error)
        return None
    files = [other for other in beside if _is_gguf(other)]
    alone = sum(not _is_part(other) for other in files) == 1
    return next((other for other in files if alone and "mmproj" in other.name), None)


def _is_gguf(path: Path) -> bool:
    return path.name.endswith(".gguf") and is_file(path)


def _is_part(path: Path) -> bool:
    """Whether this file is only a part of another's model: a later shard, a projector, a draft."""
    shard = SHARD.fullmatch(path.name)
    later = shard is not None and int(shard[2]) > 1
    return later or "mmproj" in path.name or path.name.startswith(_DRAFT_PREFIXES)


def model_name(path: Path) -> str:
    """Return the name that a model file gives its model: its own without `.gguf`, as in llama-server."""
    return path.name.replace(".gguf", "")
