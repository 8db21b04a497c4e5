"""Downloads from the Hugging Face hub: who wants what, one job for each file, and what becomes of it.

What is to be brought stands in Redis (`download:<name>`), how far it has come on the disk. So a new leader
goes on from what is there: it asks for the jobs that are missing, and asking twice is harmless.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis

from llamastead.shared.clock import wall_ms
from llamastead.shared.errors import ApiError
from llamastead.shared.hub_cache import REMOTE_PRESET, HubCache, is_quant, is_repository, split_name
from llamastead.shared.hub_plan import HubFile, Places, Plan, fetch_job, job_id
from llamastead.shared.hub_tokens import HubTokens
from llamastead.shared.jobs import FETCH_FILE, PLACE_DOWNLOAD, PLAN_DOWNLOAD, Jobs
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import Fields, LeaderStore
from llamastead.shared.words import DownloadState, JobState, WaitReason
from llamastead.supervisor.core.state import State
from llamastead.supervisor.registry.model import ModelEntry
from llamastead.supervisor.registry.options import TRUE

log = logging.getLogger(__name__)

ACTIVE_LOOK_S = 0.25
IDLE_LOOK_S = 0.5
PROGRESS_S = 1.0  # between two events of progress
LINE_S = 10.0  # between two lines of the log about it
ANSWER_AFTER_S = 3.0  # a hub that says no by then is the answer to the order
NO_WORKER = "no worker runs, so it waits for one: start `llamastead worker`"

Answer = Callable[[str, Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Wanted:
    """A registered model whose files somebody waits for: `name` is `repo:quant`, `file` goes before that, and
    before both, with `presets`, a preset file in the repository.
    """

    model: str
    name: str
    file: str
    offline: bool
    presets: bool = False


@dataclass
class Download:
    """One download under way. `askers` wait for it: the last one to leave calls it off.

    `presets`: it may be, and from its plan on is, a preset file. `models` are registered models that wait for
    it, `waiting` commands that are not answered yet, `asked` the jobs that this leader has asked for, `told`
    and `logged` when progress was told, `given_up_at` the bytes that were here when its workers had died too
    often, `late` that its plan took longer than an order waits.
    """

    name: str
    file: str = ""
    presets: bool = False
    state: DownloadState = DownloadState.PLANNING
    askers: int = 1
    models: frozenset[str] = frozenset()
    plan: Plan | None = None
    done: Mapping[str, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    told: float = -PROGRESS_S
    logged: float = field(default_factory=time.monotonic)
    given_up_at: int = -1
    late: bool = False
    asked: set[str] = field(default_factory=set)

    @property
    def repo(self) -> str:
        """The repository."""
        return split_name(self.name)[0]

    @property
    def bytes(self) -> int:
        """Bytes of all its files that are here."""
        return sum(self.done.values())

    def job(self, verb: str) -> str:
        """Return the id of a job for all of it."""
        return job_id(verb, self.name, self.file)


class Downloads:
    """Runs as long as the reign; everything is done by its one loop and by orders, which only note things.

    `cache` is the cache's folder; `answer` answers a command; `arrived` is awaited with a download whose
    files are all in place, before it is forgotten; `wanted` returns the registered models that somebody
    waits for and whose files are not here, `failed` hears of those that wait in vain; `workers` returns
    those that live; `token_of` returns the hub's token of a registered model, "" for none.
    """

    def __init__(
        self,
        jobs: Jobs,
        redis: Redis,
        keys: Keys,
        store: LeaderStore,
        cache: Path | None,
        answer: Answer,
        arrived: Callable[[Download], Awaitable[None]],
        failed: Callable[[str, ApiError], None],
        wanted: Callable[[], Iterable[Wanted]],
        workers: Callable[[], Awaitable[Mapping[str, Any]]],
        tokens: HubTokens,
        token_of: Callable[[str], str],
    ) -> None:
        self._jobs = jobs
        self._redis = redis
        self._keys = keys
        self._store = store
        self._cache = cache
        self._answer = answer
        self._arrived = arrived
        self._failed = failed
        self._wanted = wanted
        self._workers = workers
        self._tokens, self._token_of = tokens, token_of
        self._known: dict[str, Download] = {}
        self._look = asyncio.Event()
        # Orders come while the loop waits for Redis: what one forgets, the other must not write again.
        self._lock = asyncio.Lock()

    def look(self) -> None:
        """Have the loop look at once."""
        self._look.set()

    def find(self, name: str) -> Download | None:
        """Return the download of that name, or the one that a registered model waits for."""
        return self._known.get(name) or next((d for d in self._known.values() if name in d.models), None)

    async def order(self, command: str, name: str, *, again: bool) -> None:
        """Take a person's order: begin a download or join one; the command is answered now or soon.

        `again`: an earlier leader may have taken it, then it counts as one asker all the same.
        """
        try:
            async with self._lock:
                await self._take_order(command, name, again)
        except ApiError as error:
            await self._answer(command, {"error": asdict(error)})

    async def _take_order(self, command: str, name: str, again: bool) -> None:
        repo, quant = split_name(name)
        if not is_repository(repo) or not is_quant(quant):
            raise ApiError(400, f"'{name}' is not owner/name[:quant]", {"param": "model"})
        if self._cache is None:
            raise ApiError(500, "there is no cache folder: set HF_HUB_CACHE or HOME for the supervisor")
        known = self._known.get(name)
        if known is None:
            cached = await asyncio.to_thread(HubCache(self._cache).find, name)
            if cached is not None and not cached.missing:
                raise ApiError(400, f"model '{name}' already exists", {"param": "model"})
            await self._begin(Download(name, waiting=[command]))
            return
        known.askers += not again
        await self._store.put_download(name, {"askers": known.askers})
        if known.state is DownloadState.PLANNING:
            known.waiting.append(command)
        else:
            await self._answer(command, _accepted(known))

    async def _want(self, wanted: Wanted) -> None:
        """Have a registered model's files brought: somebody waits for it. One more asker, once."""
        name, known = wanted.name, self._known.get(wanted.name)
        problem = self._cannot_have(wanted)
        if problem is not None:
            self._failed(wanted.model, problem)
        elif known is None:
            models = frozenset({wanted.model})
            await self._begin(Download(name, wanted.file, wanted.presets, models=models))
        elif wanted.model not in known.models:
            known.askers += 1
            known.models |= {wanted.model}
            fields: Fields = {"askers": known.askers, "models": json.dumps(sorted(known.models))}
            await self._store.put_download(name, fields)

    def _cannot_have(self, wanted: Wanted) -> ApiError | None:
        repo, quant = split_name(wanted.name)
        if self._cache is None or not is_repository(repo) or not is_quant(quant):
            return ApiError(400, f"hf-repo of '{wanted.model}': '{wanted.name}' is not owner/name[:quant]")
        if wanted.offline:
            text = f"'{wanted.name}' is not in the cache, and '{wanted.model}' is set to offline"
            return ApiError(503, text, {"reason": "offline"})
        return None

    async def cancel(self, command: str, name: str, *, force: bool = False) -> bool:
        """Take one asker away, or with `force` all; the last one's leaving ends it. False for no download."""
        async with self._lock:
            known = self.find(name)
            if known is None:
                return False
            known.askers = 0 if force else known.askers - 1
            if known.askers > 0:
                await self._store.put_download(known.name, {"askers": known.askers})
            else:
                await self._call_off(known)
            await self._answer(command, _accepted(known))
            return True

    async def run(self) -> None:
        """See all downloads through, those of an earlier leader too, until cancelled."""
        await self._resume()
        while True:
            self._look.clear()
            async with self._lock:
                for wanted in self._wanted():
                    await self._want(wanted)
            for known in list(self._known.values()):
                async with self._lock:
                    if self._known.get(known.name) is not known:
                        continue
                    try:
                        await self._advance(known)
                    except ApiError as error:
                        await self._fail(known, error)
            try:
                if not self._known:
                    self._tokens.forget()
                async with asyncio.timeout(ACTIVE_LOOK_S if self._known else IDLE_LOOK_S):
                    await self._look.wait()
            except TimeoutError:
                pass

    async def _resume(self) -> None:
        for name in cast("list[str]", await self._redis.zrange(self._keys.downloads, 0, -1)):
            found = await self._read(name)
            if not found or name in self._known:
                continue
            known = Download(
                name,
                found.get("file", ""),
                found.get("presets") == "1",
                askers=int(found.get("askers") or 1),
                models=frozenset(json.loads(found.get("models") or "[]")),
            )
            self._known[name] = known
            log.info("download goes on", extra={"model": name})

    async def _read(self, name: str) -> dict[str, str]:
        return cast("dict[str, str]", await self._redis.hgetall(self._keys.download(name)))

    async def _begin(self, known: Download) -> None:
        self._known[known.name] = known
        fields: dict[str, str | int] = {
            "state": known.state,
            "file": known.file,
            "presets": int(known.presets),
            "askers": known.askers,
            "models": json.dumps(sorted(known.models)),
            "began_ms": wall_ms(),
            "bytes": 0,
        }
        await self._store.put_download(known.name, fields, _event(known, "started"))
        log.info("download begins", extra={"model": known.name})
        self.look()

    async def _advance(self, known: Download) -> None:
        match known.state:
            case DownloadState.PLANNING:
                await self._advance_planning(known)
            case DownloadState.DOWNLOADING:
                await self._advance_files(known)
            case DownloadState.PLACING:
                await self._advance_placing(known)

    async def _advance_planning(self, known: Download) -> None:
        text = (await self._read(known.name)).get("plan")
        if text:
            known.plan = _read_plan(known, text)
            known.presets = known.presets and [f.path for f in known.plan.files] == [REMOTE_PRESET]
            await self._move(known, DownloadState.DOWNLOADING, presets=int(known.presets))
            await self._answer_all(known, _accepted(known))
            self.look()
            return
        arguments = {
            "name": known.name,
            "repo": known.repo,
            "quant": split_name(known.name)[1],
            "file": known.file,
            "presets": known.presets,
            "token": self._leave_token(known),
            "promised": sum(self._missing(other) for other in self._known.values() if other is not known),
        }
        await self._see_through(known, known.job("plan"), PLAN_DOWNLOAD, arguments)
        if time.monotonic() - known.began > ANSWER_AFTER_S and (known.waiting or not known.late):
            known.late = True
            warning = {} if await self._workers() else {"warning": NO_WORKER}
            if warning:
                log.warning("download waits: %s", NO_WORKER, extra={"model": known.name})
            await self._answer_all(known, _accepted(known) | warning)

    async def _advance_files(self, known: Download) -> None:
        assert known.plan is not None
        assert self._cache is not None
        places = Places(self._cache, known.repo)
        done, left = await asyncio.to_thread(_look_at, places, known.plan.files)
        if done != known.done and (not left or time.monotonic() - known.told >= PROGRESS_S):
            known.done, known.told = done, time.monotonic()
            event = _event(known, "progress")
            fields = {"bytes": known.bytes, "progress": event["progress"]}
            await self._store.put_download(known.name, fields, event)
            if known.told - known.logged >= LINE_S:
                known.logged = known.told
                share = f"{known.bytes / max(1, known.plan.total):.0%} of {known.plan.total / 2**20:.0f} MiB"
                log.info("download under way: %s", share, extra={"model": known.name})
        for file in left:
            arguments = {
                "plan": known.plan.to_json(),
                "path": file.path,
                "token": self._leave_token(known),
            }
            await self._see_through(known, fetch_job(known.repo, file), FETCH_FILE, arguments)
        if not left:
            await self._move(known, DownloadState.PLACING)
            self.look()

    async def _advance_placing(self, known: Download) -> None:
        assert known.plan is not None
        arguments = {"plan": known.plan.to_json()}
        if not await self._see_through(known, known.job("place"), PLACE_DOWNLOAD, arguments):
            return
        await self._store.put_download(known.name, {}, _event(known, "finished"))
        await self._arrived(known)
        self._known.pop(known.name, None)
        await self._store.drop_download(known.name)
        log.info("download is done", extra={"model": known.name, "bytes": known.bytes})

    async def _see_through(self, known: Download, job: str, verb: str, arguments: Mapping[str, Any]) -> bool:
        """Ask for a job unless it is under way; True when it is done. Raises its ApiError if it failed.

        A job that was asked for before our time is asked for again: only what became of it since counts.
        """
        record = await self._jobs.record(job) if job in known.asked else None
        if record is None or (record.state is JobState.DONE and verb == FETCH_FILE):
            known.asked.add(job)
            await self._jobs.ask(job, verb, known.name, arguments)
            return False
        if record.state is JobState.FAILED:
            if record.lost and verb == FETCH_FILE and known.bytes > known.given_up_at:
                # Machines may be restarted often while a big file comes: it counts whether it gets on.
                known.given_up_at = known.bytes
                await self._jobs.ask(job, verb, known.name, arguments)
                return False
            raise _error_of(known, record.error)
        return record.state is JobState.DONE

    def _leave_token(self, known: Download) -> str:
        """Return where the worker finds the token that a preset of these models has, "" for its own."""
        token = next((token for model in sorted(known.models) if (token := self._token_of(model))), "")
        try:
            return self._tokens.leave(token) if token else ""
        except OSError as error:
            log.warning("token not left for the worker: %s", error, extra={"model": known.name})
            return ""

    async def _move(self, known: Download, state: DownloadState, **fields: int) -> None:
        known.state = state
        await self._store.put_download(known.name, {"state": state, **fields})

    async def _fail(self, known: Download, error: ApiError) -> None:
        log.warning("download failed: %s", error.message, extra={"model": known.name})
        await self._forget(known, error)
        await self._answer_all(known, {"error": asdict(error)})

    async def _call_off(self, known: Download) -> None:
        """End a download that nobody wants: what came of files that no other one needs is removed."""
        log.info("download is called off", extra={"model": known.name})
        error = ApiError(503, f"the download of '{known.name}' was called off", {"reason": "cancelled"})
        await self._forget(known, error)
        await self._answer_all(known, {"error": asdict(error)})
        if known.plan and self._cache:
            await asyncio.to_thread(_remove, Places(self._cache, known.repo), await self._only_mine(known))

    async def _forget(self, known: Download, error: ApiError) -> None:
        self._known.pop(known.name, None)
        for file in await self._only_mine(known):
            await self._jobs.cancel(fetch_job(known.repo, file))
        await self._jobs.cancel(known.job("plan"))
        event = _event(known, "failed") | {
            "error": error.message,
            "reason": str(error.fields.get("reason", "")),
            "code": error.status,
        }
        await self._store.drop_download(known.name, event)
        for model in known.models:
            self._failed(model, error)

    async def _only_mine(self, known: Download) -> list[HubFile]:
        """Return the files that are not whole yet and that no other download waits for."""
        if known.plan is None or self._cache is None:
            return []
        others = [d for d in self._known.values() if d is not known and d.repo == known.repo and d.plan]
        wanted = {file.blob for other in others if other.plan for file in other.plan.files}
        mine = [file for file in known.plan.files if file.blob not in wanted]
        _, left = await asyncio.to_thread(_look_at, Places(self._cache, known.repo), mine)
        return left

    def _missing(self, known: Download) -> int:
        return known.plan.total - known.bytes if known.plan else 0

    async def _answer_all(self, known: Download, payload: Mapping[str, Any]) -> None:
        waiting, known.waiting = known.waiting, []
        for command in waiting:
            await self._answer(command, payload)


def absent_and_wanted(entries: Mapping[str, ModelEntry], state: State, *, offline: bool) -> list[Wanted]:
    """Return the models that somebody waits for and whose files are not here; `offline` is for all."""
    names = [name for name, wait in state.waits.items() if wait.reason is WaitReason.DOWNLOADING]
    found = [(entries[name], entries[name].options) for name in names if name in entries]
    return [
        Wanted(
            entry.name,
            said["hf-repo"],
            said.get("hf-file", ""),
            offline or said.get("offline") in TRUE,
            entry.may_be_presets,
        )
        for entry, said in found
        if "hf-repo" in said
    ]


def _look_at(places: Places, files: Sequence[HubFile]) -> tuple[dict[str, int], list[HubFile]]:
    """Return how many bytes of each file are here, and which are not whole. A slow disk takes its time."""
    done = {file.path: places.have(file) for file in files}
    return done, [file for file in files if not places.blob(file).is_file()]


def _remove(places: Places, files: Iterable[HubFile]) -> None:
    for file in files:
        places.partial(file).unlink(missing_ok=True)


def _read_plan(known: Download, text: str) -> Plan:
    """Return the plan that the worker kept. Raises ApiError for one that is not of this download."""
    try:
        plan = Plan.from_json(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ApiError(500, f"the plan of '{known.name}' can't be read: {error!r}") from None
    if plan.repo != known.repo:
        raise ApiError(500, f"the plan of '{known.name}' is one of '{plan.repo}'")
    return plan


def _accepted(known: Download) -> dict[str, Any]:
    shown: dict[str, Any] = {"success": True, "download": known.name, "askers": known.askers}
    if known.plan:
        shown |= {"bytes": known.bytes, "total": known.plan.total}
    return shown


def _event(known: Download, change: str) -> dict[str, str | int]:
    fields: dict[str, str | int] = {"kind": "download", "model": known.name, "change": change}
    if known.plan:
        progress = {
            known.plan.base + file.path: {"done": known.done.get(file.path, 0), "total": file.size}
            for file in known.plan.files
        }
        fields |= {"progress": json.dumps(progress), "bytes": known.bytes, "total": known.plan.total}
    return fields


def _error_of(known: Download, text: str) -> ApiError:
    try:
        return ApiError.from_json(text)
    except ValueError:
        # Not a refusal of the hub or the disk: the worker's process died, or met what nobody foresaw.
        return ApiError(500, f"the download of '{known.name}' failed: {text}", {"reason": "failed"})
