"""What a download consists of, and where its parts lie in the Hugging Face cache.

Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache. A file is written under another name
(`.incomplete`) and gets its own only when its checksum is right; a snapshot names it only when all files of
its model are there.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from llamastead.shared.hub_cache import is_repository

_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: its name there, its bytes, and the hash that is its name below `blobs`:
    SHA-256, or git's SHA-1 for a small one.
    """

    path: str
    size: int
    blob: str


@dataclass(frozen=True)
class Plan:
    """All files of `repo:tag` at one commit; `base` is the address that their names continue."""

    repo: str
    commit: str
    tag: str
    files: tuple[HubFile, ...]
    base: str = ""

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def name(self) -> str:
        """What the model will be called."""
        return f"{self.repo}:{self.tag}" if self.tag else self.repo

    def to_json(self) -> str:
        """Return it as JSON text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan that `to_json` wrote. Raises ValueError for names that could lead elsewhere."""
        fields = json.loads(text)
        files = tuple(HubFile(**file) for file in fields.pop("files"))
        made = cls(**fields, files=files)
        if not is_repository(made.repo) or not _COMMIT.fullmatch(made.commit):
            raise ValueError(f"not a revision of a repository: {made.repo!r} {made.commit!r}")
        for file in files:
            if not _BLOB.fullmatch(file.blob) or not is_safe(file.path):
                raise ValueError(f"not a file of a repository: {file.path!r} {file.blob!r}")
        return made


@dataclass(frozen=True)
class Places:
    """Where the cache `root` has what belongs to a repository."""

    root: Path
    repo: str

    @property
    def folder(self) -> Path:
        """The repository's folder."""
        return self.root / f"models--{self.repo.replace('/', '--')}"

    @property
    def ref(self) -> Path:
        """The file that says which snapshot is current."""
        return self.folder / "refs" / "main"

    def blob(self, file: HubFile) -> Path:
        """A whole file, by its hash."""
        return self.folder / "blobs" / file.blob

    def partial(self, file: HubFile) -> Path:
        """What there is of it before it is whole and checked."""
        return self.folder / "blobs" / f"{file.blob}.incomplete"

    def link(self, commit: str, file: HubFile) -> Path:
        """Its name in a snapshot."""
        return self.folder / "snapshots" / commit / file.path

    def have(self, file: HubFile) -> int:
        """Return how many bytes of a file are here."""
        try:
            if self.blob(file).is_file():
                return file.size
            return min(self.partial(file).stat().st_size, file.size)
        except OSError:
            return 0


def is_safe(path: str) -> bool:
    """Whether a file's name stays below the folder that it is put into."""
    pure = PurePosixPath(path)
    return bool(path) and not pure.is_absolute() and ".." not in pure.parts and "\0" not in path


def job_id(verb: str, *about: str) -> str:
    """Return the id of a job about these things: the same for the same, fit for RQ."""
    return f"{verb}-{hashlib.sha256(chr(0).join(about).encode()).hexdigest()[:32]}"


def fetch_job(repo: str, file: HubFile) -> str:
    """Return the id of the one job that brings a file, whoever wants it."""
    return job_id("fetch", repo, file.blob)
