"""What file names say: shards, projectors, drafts, and what a models folder holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llamastead.shared.disk import raise_shortage
from llamastead.shared.files import is_file, is_folder, is_text, shown
from llamastead.shared.gguf import SHARD
from llamastead.supervisor.registry.model import Problem, RegistryError, Severity

_NO_TEXT = "its name is not UTF-8"
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
    beside the file that the link leads to. What has a name that is no UTF-8 is left out. Raises RegistryError
    when the folder can't be read or is named so itself, OSError where no more files can be opened.
    """
    if not is_text(folder):
        raise RegistryError(f"models folder {shown(folder)}: {_NO_TEXT}")
    try:
        children, problems = _named(folder.iterdir())
    except OSError as error:
        raise_shortage(error)
        raise RegistryError(f"models folder {folder} can't be read: {error.strerror}") from None
    files = [child for child in children if _is_gguf(child)]
    models = [
        FoundModel(model_name(file), file, _projector_of_target(file)) for file in files if not _is_part(file)
    ]
    for child in children:
        if is_folder(child):
            inside, odd = _scan_sub_folder(child)
            models += inside
            problems += odd
    return models, problems


def _scan_sub_folder(folder: Path) -> tuple[list[FoundModel], list[Problem]]:
    try:
        children, problems = _named(folder.iterdir())
    except OSError as error:
        raise_shortage(error)
        return [], [Problem(Severity.WARNING, str(folder), f"can't be read: {error.strerror}")]
    files = [child for child in children if _is_gguf(child)]
    mmproj = next((file for file in files if "mmproj" in file.name), None)
    draft = next((file for file in files if file.name.startswith(_DRAFT_PREFIXES)), None)
    weights = [file for file in files if not _is_part(file)]
    main = [file for file in weights if "draft" not in file.name.lower()] or weights
    main = [file for file in main if model_name(file) == folder.name] or main
    main = [file for file in main if SHARD.fullmatch(file.name)] or main
    if not main and any(SHARD.fullmatch(file.name) for file in files):
        problems.append(Problem(Severity.WARNING, str(folder), "the first shard of its model is missing"))
        return [], problems
    if len(main) < 2:
        return [
            FoundModel(folder.name, file, mmproj or _projector_of_target(file), draft) for file in main
        ], problems
    models = [FoundModel(f"{folder.name}/{model_name(file)}", file, mmproj, draft) for file in main]
    names = ", ".join(model.name for model in models)
    problems.append(Problem(Severity.NOTE, str(folder), f"holds several models, listed as {names}"))
    return models, problems


def _named(children: Iterable[Path]) -> tuple[list[Path], list[Problem]]:
    """Return in order those whose names are UTF-8, and a remark on each model or folder whose name is not."""
    there = sorted(children)
    odd = [child for child in there if not is_text(child.name) and (_is_gguf(child) or is_folder(child))]
    problems = [Problem(Severity.WARNING, shown(child), f"not listed: {_NO_TEXT}") for child in odd]
    return [child for child in there if is_text(child.name)], problems


def _projector_of_target(file: Path) -> Path | None:
    """Return the projector beside the file that a link leads to, if that is the only model there."""
    if not file.is_symlink():
        return None
    try:
        beside = sorted(filter(is_text, file.resolve().parent.iterdir()))
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
