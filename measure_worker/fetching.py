"""One file from the hub: resumed where it stopped, checked before it gets its name."""

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from typing import BinaryIO

import httpx2
from huggingface_hub.errors import HfHubHTTPError

from llamastead.measure_worker.hub import open_file, refusals
from llamastead.shared.errors import ApiError
from llamastead.shared.faults import fault_point
from llamastead.shared.hub_plan import HubFile, Places

TRIES = 5  # in a row without a byte
FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 8.0
_HASHED = 8 << 20
_PASSING = frozenset({500, 502, 503, 504})
_SHORT_WAIT_S = 10  # a longer one that the hub asks for is an answer, not a pause


class Fetch:
    """Brings one file. `beat` is called at each piece with the bytes that are here, and may raise to end it;
    `pause_wanted` says when the work is to be left for later: what is here then is kept.
    """

    def __init__(
        self,
        places: Places,
        commit: str,
        file: HubFile,
        beat: Callable[[int], None],
        pause_wanted: Callable[[], bool],
    ) -> None:
        self._places = places
        self._commit = commit
        self._file = file
        self._beat = beat
        self._pause_wanted = pause_wanted

    def run(self) -> bool:
        """Return True when the file is whole and has its name, False when there is more to do later.

        Raises ApiError, and what `beat` raises. What came so far is kept, save content that is wrong.
        """
        blob, partial = self._places.blob(self._file), self._places.partial(self._file)
        if blob.is_file():
            return True
        blob.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("a+b") as target:
                try:
                    # A process that was believed dead may still be at it.
                    fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                if not self._fill(target):
                    return False
                os.fsync(target.fileno())
                right = self._is_right(target)
                self._beat(self._file.size)
                if not self._is_ours(target):
                    return False  # called off, and perhaps begun again by somebody else
                if not right:
                    partial.unlink()
                    text = f"{self._what()}: what arrived is not what the hub announced (wrong checksum)"
                    raise ApiError(502, text)
                fault_point("fetch.checked")
                partial.rename(blob)
                fault_point("fetch.named")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise no_room(self._places, self._missing()) from error
        _sync_folder(blob.parent)
        return True

    def _missing(self) -> int:
        return self._file.size - self._places.have(self._file)

    def _fill(self, target: BinaryIO) -> bool:
        """Append what is missing; False when that was put off."""
        failures = 0
        while (have := target.seek(0, os.SEEK_END)) != self._file.size:
            if failures and self._pause_wanted():
                return False
            if have > self._file.size:
                target.truncate(0)
                continue
            try:
                if self._stream(target, have):
                    return False
                failures = 0
            except ApiError:
                raise
            except (httpx2.HTTPError, HfHubHTTPError) as error:
                failures = failures + 1 if target.seek(0, os.SEEK_END) == have else 1
                self._after(error, failures)
            if target.seek(0, os.SEEK_END) == have and not failures:
                raise ApiError(502, f"{self._what()}: the hub sends less than it announced")
        return True

    def _stream(self, target: BinaryIO, have: int) -> bool:
        """Append what one request brings; True when it is to be left for later."""
        with open_file(self._places.repo, self._commit, self._file.path, have) as answer:
            if have and answer.status_code == 200:  # it does not do ranges
                target.truncate(0)
            elif have and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise ApiError(502, f"{self._what()}: the hub sends another part than was asked for")
            for piece in answer.iter_raw():
                target.write(piece)
                if target.tell() > self._file.size:
                    target.truncate(0)
                    raise ApiError(502, f"{self._what()}: the hub sends more than it announced")
                self._beat(target.tell())
                if self._pause_wanted():
                    target.flush()
                    return True
        target.flush()
        return False

    def _after(self, error: Exception, failures: int) -> None:
        """Wait before the next try, or raise what ends the work."""
        response = error.response if isinstance(error, HfHubHTTPError) else None
        status = response.status_code if response is not None else 0
        if status == 416:
            self._places.partial(self._file).unlink(missing_ok=True)
            raise ApiError(502, f"{self._what()}: the hub has another file than it announced") from error
        pause = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1))
        wait = response.headers.get("Retry-After", "") if response is not None else ""
        soon = wait.isdecimal() and int(wait) <= _SHORT_WAIT_S
        passing = status == 0 or status in _PASSING or (status == 429 and soon)
        if not passing or failures >= TRIES:
            with refusals(self._places.repo, self._file.path):
                raise error
        ends = time.monotonic() + max(pause, int(wait) if soon else 0)
        while time.monotonic() < ends:
            self._beat(self._places.have(self._file))
            time.sleep(0.1)

    def _is_right(self, target: BinaryIO) -> bool:
        """Whether the content has the hash that the hub announced."""
        digest = hashlib.sha256() if len(self._file.blob) == 64 else hashlib.sha1(usedforsecurity=False)
        if len(self._file.blob) == 40:
            digest.update(b"blob %d\0" % self._file.size)
        target.seek(0)
        while piece := target.read(_HASHED):
            digest.update(piece)
            self._beat(self._file.size)
        return digest.hexdigest() == self._file.blob

    def _is_ours(self, target: BinaryIO) -> bool:
        """Whether the partial file still is the one that this process fills."""
        try:
            return os.fstat(target.fileno()).st_ino == self._places.partial(self._file).stat().st_ino
        except FileNotFoundError:
            return False

    def _what(self) -> str:
        return f"'{self._places.repo}' ({self._file.path})"


def free_bytes(places: Places) -> int:
    """Return what is free where the cache is, or will be."""
    folder = places.root
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def no_room(places: Places, needed: int, promised: int = 0) -> ApiError:
    """Return the error of a disk that is too small; `promised` is what other downloads still need."""
    free = max(0, free_bytes(places) - promised)
    others = f" beside {size_text(promised)} for other downloads" if promised else ""
    text = (
        f"'{places.repo}' needs {size_text(needed)}, but {size_text(free)} are free in {places.root}{others}"
        ": make room there and order it again"
    )
    return ApiError(507, text, {"reason": "no_space", "needed": needed, "free": free})


def size_text(size: int) -> str:
    """Return bytes as people say them."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _sync_folder(folder: os.PathLike[str]) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
