"""Tokens for the hub that presets hold, on their way to the worker: files of the run folder, not Redis's."""

import hashlib
import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"[0-9a-f]{32}")


class HubTokens:
    """The folder of a herd; a job names the file of the token that it is to use."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "hub-tokens"

    def leave(self, token: str) -> str:
        """Leave a token (0600) for who shares the run folder, and return its file's name. Raises OSError."""
        name = hashlib.sha256(f"hub token {token}".encode()).hexdigest()[:32]
        place = self._folder / name
        if not place.exists():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = place.with_name(f".{name}.{os.getpid()}")
            with open(draft, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(token)
            draft.replace(place)
        return name

    def take(self, name: str) -> str:
        """Return the token of that name, "" where it is not to be had."""
        if not _NAME.fullmatch(name):
            return ""
        try:
            return (self._folder / name).read_text().strip()
        except OSError:
            return ""

    def forget(self) -> None:
        """Remove all: nobody needs them now."""
        shutil.rmtree(self._folder, ignore_errors=True)
