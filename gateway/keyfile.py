"""The file with clients' keys, read anew when it changes."""

import asyncio
import logging
from pathlib import Path

from llamastead.gateway.auth import Keys
from llamastead.shared.settings import Settings, SettingsError

log = logging.getLogger(__name__)

LOOK_S = 1.0


def read_keys(settings: Settings) -> Keys:
    """Return the keys that the settings name, the file's included; SettingsError if it can't be read."""
    admin = tuple(key.get_secret_value() for key in settings.admin_keys)
    probe = tuple(key.get_secret_value() for key in settings.probe_keys)
    return Keys(tuple(sorted(settings.inference_keys())), admin, probe)


async def follow_key_file(settings: Settings, keys: Keys) -> None:
    """Keep `keys` as the file has them, until cancelled; returns at once without a file.

    A file that is gone, can't be read or leaves no key at all changes nothing: that would let everybody in
    or lock everybody out.
    """
    path = settings.api_key_file
    if path is None:
        return
    seen = _looks(path)
    while True:
        await asyncio.sleep(LOOK_S)
        looks = _looks(path)
        if looks == seen:
            continue
        seen = looks
        try:
            found = read_keys(settings).inference
        except SettingsError as problem:
            log.warning("the keys stay as they are", extra={"problem": str(problem)})
            continue
        if not found:
            log.warning("the keys stay as they are", extra={"problem": f"--api-key-file {path} has no key"})
        elif found != keys.inference:
            keys.inference = found
            log.info("keys read anew", extra={"file": str(path), "keys": len(found)})


def _looks(path: Path) -> tuple[int, int, int] | None:
    """Return what tells one state of the file from another, None while it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
