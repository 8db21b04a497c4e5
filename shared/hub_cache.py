"""The Hugging Face cache of this machine: what `org/repo:quant` means there, told from file names alone.

Nothing here opens a model file or asks the network. Layout:
https://huggingface.co/docs/huggingface_hub/guides/manage-cache. Names and choices are llama-server's, but the
prefix of a quantisation (`UD-Q4_K_XL`) stays part of its tag, so two files never share a name by losing it.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from llamastead.shared.disk import raise_shortage
from llamastead.shared.files import is_file, is_folder, is_text
from llamastead.shared.gguf import SHARD

_ROOTS = (
    ("LLAMA_CACHE", ""),
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
    ("HOME", ".cache/huggingface/hub"),
)
_FOLDER = "models--"
_REPOSITORY = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*/[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*")
_QUANT = re.compile(r"[A-Za-z0-9_.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TAG = re.compile(r"(?:(?:^|[-./])((?:UD|I1)-[A-Z0-9_]+)|[-.]([A-Z0-9_]+))$", re.IGNORECASE)
_PREFIX = re.compile(r"(?:UD|I1)-")
# Repositories with a folder per quantisation need not repeat it in the file's name.
_QUANT_FOLDER = re.compile(
    r"(?:(?:UD|I1)-)?(?:I?Q[1-8]|T?Q[1-8]|BF16|F16|F32|MXFP4)[A-Z0-9_]*", re.IGNORECASE
)
_BITS = re.compile(r"[A-Z](\d+)")
_DRAFTS = ("mtp-", "eagle3-", "dflash-", "dspark-")
_PARTS = ("mmproj", "imatrix", *_DRAFTS)
_DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
_UNKNOWN_BITS = 16
REMOTE_PRESET = "preset.ini"


@dataclass(frozen=True)
class Choice:
    """The files of one model of a repository, by their names in it.

    `shards` are all that the first one's name counts, whether they are there or not. `mmproj` and `draft` are
    the projector and the draft model that lie beside it, "" for none.
    """

    tag: str
    shards: tuple[str, ...]
    mmproj: str = ""
    draft: str = ""


@dataclass(frozen=True)
class CachedModel:
    """One model of a cached repository, `name` being `org/repo:TAG`.

    `path` is its first shard by the name of its link, `missing` the names of shards that are not there,
    `plain` the name that llama-server gives it. `twins` are files of the same tag that are not taken.
    """

    name: str
    path: Path
    shards: tuple[Path, ...]
    mmproj: Path | None = None
    draft: Path | None = None
    missing: tuple[str, ...] = ()
    plain: str = ""
    twins: tuple[str, ...] = ()


@dataclass(frozen=True)
class CachedRepository:
    """One revision of a repository in the cache: the names of its files in order, and of links to nothing."""

    name: str
    snapshot: Path
    files: tuple[str, ...]
    broken: tuple[str, ...] = ()

    def find(self, quant: str = "", file: str = "") -> CachedModel | None:
        """Return the model that a quantisation ("" for the usual one) or a file's name means, or None."""
        choice = choose_file(self.files, file) if file else choose(self.files, quant)
        return None if choice is None else self._model(choice)

    def models(self) -> list[CachedModel]:
        """Return the models that llama-server would list, one for each tag."""
        by_tag: dict[str, list[str]] = {}
        for file in self.files:
            if is_main(file) and (tag := tag_of(file)):
                by_tag.setdefault(tag, []).append(file)
        return [self._model(_complete(self.files, files[0]), files[1:]) for files in by_tag.values()]

    def _model(self, choice: Choice, twins: Sequence[str] = ()) -> CachedModel:
        there = set(self.files)
        name = f"{self.name}:{choice.tag}" if choice.tag else self.name
        return CachedModel(
            name=name,
            path=self.snapshot / choice.shards[0],
            shards=tuple(self.snapshot / shard for shard in choice.shards),
            mmproj=self.snapshot / choice.mmproj if choice.mmproj else None,
            draft=self.snapshot / choice.draft if choice.draft else None,
            missing=tuple(shard for shard in choice.shards if shard not in there),
            plain=f"{self.name}:{_PREFIX.sub('', choice.tag)}",
            twins=tuple(twins),
        )


@dataclass(frozen=True)
class HubCache:
    """A cache folder, read when first asked and not again."""

    root: Path

    @cached_property
    def repositories(self) -> Mapping[str, CachedRepository]:
        """The cached repositories by name, in order; none when there is no cache.

        Raises OSError where no more files can be opened.
        """
        try:
            folders = sorted(folder.name for folder in self.root.iterdir())
        except OSError as error:
            raise_shortage(error)
            return {}
        names = (folder.removeprefix(_FOLDER).replace("--", "/") for folder in folders if _is_cached(folder))
        found = (read_repository(self.root, name) for name in names)
        return {repository.name: repository for repository in found if repository is not None}

    def find(self, model: str, file: str = "") -> CachedModel | None:
        """Return what `org/repo` or `org/repo:quant` means here, missing shards named; None for nothing.

        `file` is the name of a file in the repository, which goes before the quantisation.
        """
        name, quant = split_name(model)
        repository = self.repositories.get(name)
        return repository.find(quant, file) if repository else None


def hub_cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the cache folder that llama-server uses in this environment; None without any home."""
    for variable, below in _ROOTS:
        if environ.get(variable):
            return (Path(environ[variable]) / below).expanduser().absolute()
    return None


def is_repository(name: str) -> bool:
    """Whether a name can be that of a repository: `org/name`."""
    return _REPOSITORY.fullmatch(name) is not None


def is_quant(name: str) -> bool:
    """Whether a name can be that of a quantisation, or "" for the usual one."""
    return _QUANT.fullmatch(name) is not None


def split_name(model: str) -> tuple[str, str]:
    """Part `org/repo:quant` into repository and quantisation, the latter "" where none is said."""
    repository, colon, quant = model.rpartition(":")
    return (repository, quant) if colon and "/" not in quant else (model, "")


def canonical_tag(quant: str) -> str:
    """Return a quantisation as tags spell it: `ud-q4_k_xl` is UD-Q4_K_XL, `big-q5_k_m` is Q5_K_M."""
    found = _TAG.search(quant)
    return ((found[1] or found[2]) if found else quant).upper()


def tag_of(file: str) -> str:
    """Return the tag of a model file by its name in the repository, "" for a file that llama-server skips."""
    stem = _stem(file)
    if found := _TAG.search(stem):
        return (found[1] or found[2]).upper()
    folder = PurePosixPath(file).parent.name
    return folder.upper() if _QUANT_FOLDER.fullmatch(folder) else ""


def choose(files: Sequence[str], quant: str = "") -> Choice | None:
    """Return the files that a quantisation means among the names in a repository; None when none fits.

    Its own tag goes before one that differs by a prefix, that before a name holding it. Without one: Q4_K_M,
    else Q8_0, else the first model. Where several fit, the first by name is taken.
    """
    main = sorted(filter(is_main, files))
    if quant:
        chosen = _first_of(main, quant)
    else:
        usual = (_first_of(main, tag) for tag in _DEFAULT_TAGS)
        chosen = next((file for file in usual if file), main[0] if main else "")
    return _complete(files, chosen) if chosen else None


def choose_file(files: Sequence[str], name: str) -> Choice | None:
    """Return the files of the model whose first one has that name in the repository; None without it."""
    return _complete(files, name) if name in files else None


def read_repository(root: Path, name: str) -> CachedRepository | None:
    """Return what the cache holds of a repository; None for nothing, or for no revision that it points at.

    Raises OSError where no more files can be opened.
    """
    folder = root / f"{_FOLDER}{name.replace('/', '--')}"
    commit = _commit(folder / "refs")
    snapshot = folder / "snapshots" / commit
    if not commit or not is_repository(name) or not is_folder(snapshot):
        return None
    files: list[str] = []
    broken: list[str] = []
    for folder_name, _, names in os.walk(snapshot, onerror=raise_shortage):
        below = Path(folder_name)
        for file in filter(is_text, (below / name for name in names)):
            (files if is_file(file) else broken).append(file.relative_to(snapshot).as_posix())
    return CachedRepository(name, snapshot, tuple(sorted(files)), tuple(sorted(broken)))


def _is_cached(folder: str) -> bool:
    return folder.startswith(_FOLDER) and is_repository(folder.removeprefix(_FOLDER).replace("--", "/"))


def _commit(refs: Path) -> str:
    """Return the commit that `main` points at, else any other reference; "" for none."""
    try:
        others = sorted(path for path in refs.iterdir() if path.name != "main")
    except OSError as error:
        raise_shortage(error)
        return ""
    for path in (refs / "main", *others):
        try:
            first = path.read_text().partition("\n")[0].strip()
        except OSError as error:
            raise_shortage(error)
            continue
        except UnicodeDecodeError:
            continue
        if _COMMIT.fullmatch(first):
            return first
    return ""


def _stem(file: str) -> str:
    """Return a name without shard number and ending, its folders included."""
    folder, slash, name = file.rpartition("/")
    shard = SHARD.fullmatch(name)
    return folder + slash + (shard[1] if shard else name.removesuffix(".gguf"))


def is_main(file: str) -> bool:
    """Whether a file is a model's first: no later shard, projector, draft or table of importance."""
    shard = SHARD.fullmatch(file.rpartition("/")[2])
    return (
        file.endswith(".gguf")
        and not any(part in file for part in _PARTS)
        and (shard is None or int(shard[2]) == 1)
    )


def _first_of(main: Sequence[str], quant: str) -> str:
    wanted = canonical_tag(quant)
    holds = re.compile(re.escape(quant) + "[.-]", re.IGNORECASE)
    fitting = (
        *(file for file in main if tag_of(file) == wanted),
        *(file for file in main if _PREFIX.sub("", tag_of(file)) == wanted),
        *(file for file in main if holds.search(file)),
    )
    return next(iter(fitting), "")


def _complete(files: Sequence[str], first: str) -> Choice:
    """Return a model with all its shards and with what lies beside it."""
    folder, slash, name = first.rpartition("/")
    shards: tuple[str, ...] = (first,)
    if shard := SHARD.fullmatch(name):
        numbers = range(1, int(shard[3]) + 1)
        shards = tuple(f"{folder}{slash}{shard[1]}-{number:05}-of-{shard[3]}.gguf" for number in numbers)
    beside = [file for file in files if file.endswith(".gguf") and _depth_beside(file, folder) >= 0]
    drafts = [file for file in beside if file.rpartition("/")[2].startswith(_DRAFTS)]
    bits = _bits(tag_of(first))
    return Choice(
        tag_of(first),
        shards,
        _nearest([file for file in beside if "mmproj" in file.rpartition("/")[2]], folder, bits),
        _nearest(drafts, folder, bits),
    )


def _nearest(candidates: Sequence[str], folder: str, bits: int) -> str:
    """Return the deepest candidate, of equally deep ones that with the closest number of bits."""

    def rank(file: str) -> tuple[int, int, str]:
        return -_depth_beside(file, folder), abs(_bits(tag_of(file)) - bits), file

    return min(candidates, key=rank, default="")


def _depth_beside(file: str, folder: str) -> int:
    """How deep a file lies that is in `folder` or above it; -1 for one elsewhere."""
    own = file.rpartition("/")[0]
    return len(PurePosixPath(own).parts) if own in ("", folder) or folder.startswith(f"{own}/") else -1


def _bits(tag: str) -> int:
    found = _BITS.search(tag)
    return int(found[1]) if found else _UNKNOWN_BITS
