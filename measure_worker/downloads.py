"""The jobs of downloads: what to bring, bringing one file, putting a model's files into place, removing them.

What a job is told comes from Redis, so nothing in it may lead outside of the cache, and nothing secret is in
it: the hub's token is in this process's environment.
"""

import errno
import os
import time
from pathlib import Path

from redis.exceptions import RedisError

from llamastead.measure_worker import fetching, hub, placing
from llamastead.measure_worker.attempt import Desk, JobError, patiently
from llamastead.shared.disk import unusable
from llamastead.shared.errors import ApiError
from llamastead.shared.hub_cache import hub_cache_folder, is_repository
from llamastead.shared.hub_plan import Places, Plan
from llamastead.shared.hub_tokens import HubTokens
from llamastead.shared.jobs import DOWNLOAD, MEASURE
from llamastead.shared.store.downloads import DownloadRecords

SLICE_S = 20.0  # of a file's transfer while others wait for theirs
LOOK_S = 0.5


def on_plan_download(
    desk: Desk,
    name: str,
    repo: str,
    quant: str,
    file: str,
    promised: int,
    presets: bool = False,
    token: str = "",
) -> None:
    """Ask the hub which files `repo:quant` means, see that there is room, and keep that with the download.

    `promised` is what other downloads still need of the disk; `presets`: a preset file goes before a model;
    `token` is the name of the token to use, "" for this process's own.
    """
    _use_token(desk, token)
    try:
        places = Places(_cache(), _checked(repo))
        made = hub.plan(repo, quant, file, _pinned(places), presets=presets)
        missing = sum(each.size - places.have(each) for each in made.files)
        if missing > fetching.free_bytes(places) - promised:
            raise fetching.no_room(places, missing, promised)
    except ApiError as error:
        raise JobError(error.to_json()) from None
    patiently(lambda: DownloadRecords(desk.redis, desk.keys).keep_plan(name, made))


def on_fetch_file(desk: Desk, plan: str, path: str, token: str = "") -> None:
    """Bring one file of a plan, or a part of it if others wait: then the job is asked for again."""
    _use_token(desk, token)
    made = Plan.from_json(plan)
    file = next(each for each in made.files if each.path == path)
    pause = _Pause(desk, *(f"{desk.keys.rq}:queue:{name}" for name in (MEASURE, DOWNLOAD)))
    places = Places(_cache(), made.repo)
    work = fetching.Fetch(places, made.commit, file, lambda have: desk.attempt.beat(str(have)), pause.wanted)
    try:
        with hub.refusals(made.repo, path):
            work.run()
    except ApiError as error:
        raise JobError(error.to_json()) from None


def on_place_download(desk: Desk, plan: str) -> None:
    """Have the cache name the files of a plan, all of which are there."""
    desk.attempt.check()
    try:
        placing.place(_cache(), Plan.from_json(plan))
    except ApiError as error:
        raise JobError(error.to_json()) from None
    except OSError as error:
        raise JobError(_disk_error(error).to_json()) from None


def on_remove_model(desk: Desk, repo: str, quant: str) -> None:
    """Remove a model's files from the cache."""
    desk.attempt.check()
    try:
        placing.remove(_cache(), _checked(repo), quant)
    except OSError as error:
        raise JobError(_disk_error(error).to_json()) from None


def leave_to_record(desk: Desk, why: str, **arguments: object) -> None:
    """Write nothing: the supervisor reads why from the job's record."""


class _Pause:
    """Whether a transfer should make way: at once for short jobs and for a stop of the worker, after a while
    for other transfers.
    """

    def __init__(self, desk: Desk, short: str, long: str) -> None:
        self._desk = desk
        self._short, self._long = short, long
        self._began = self._looked = time.monotonic()

    def wanted(self) -> bool:
        """Return it, as read at most twice a second; while Redis is away nobody waits."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        if self._desk.stopping():
            return True
        redis = self._desk.redis
        try:
            waits = redis.llen(self._short) or (now - self._began > SLICE_S and redis.llen(self._long))
        except RedisError:
            return False
        return bool(waits)


def _use_token(desk: Desk, name: str) -> None:
    """Use a preset's token from now on: this process is forked for one job."""
    if token := HubTokens(desk.run_dir).take(name):
        os.environ["HF_TOKEN"] = token


def _pinned(places: Places) -> str:
    """Return the commit that the cache is at: what it has stays listed when more of the same comes."""
    try:
        commit = places.ref.read_text().strip()
    except OSError:
        return ""
    return commit if (places.folder / "snapshots" / commit).is_dir() else ""


def _cache() -> Path:
    root = hub_cache_folder(os.environ)
    if root is None:
        raise ApiError(500, "there is no cache folder: set HF_HUB_CACHE or HOME")
    return root


def _checked(repo: str) -> str:
    if not is_repository(repo):
        raise ApiError(400, f"'{repo}' is not the name of a repository: owner/name")
    return repo


def _disk_error(error: OSError) -> ApiError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ApiError(507 if full else 500, unusable(error.filename or _cache(), error))
