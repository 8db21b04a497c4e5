"""The supervisor's part of downloads on a real Valkey, with jobs that are only written down."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from llamastead.shared.errors import ApiError
from llamastead.shared.hub_plan import HubFile, Places, Plan, fetch_job
from llamastead.shared.hub_tokens import HubTokens
from llamastead.shared.jobs import FETCH_FILE, PLACE_DOWNLOAD, PLAN_DOWNLOAD, Jobs
from llamastead.shared.store.jobs import JobRecord
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.words import JobState
from llamastead.supervisor import downloads
from llamastead.supervisor.downloads import Download, Downloads, Wanted

FILE = HubFile("m-Q4_K_M.gguf", 10, "a" * 64)
PLAN = Plan("org/m", "c" * 40, "Q4_K_M", (FILE,), "http://hub/")
DIED = "its worker died 3 times"


class FakeJobs:
    """Keeps what is asked for; `records` say what became of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.records: dict[str, JobRecord] = {}
        self.cancelled: list[str] = []

    async def ask(self, job: str, name: str, model: str, arguments: Mapping[str, Any]) -> bool:
        self.asked.append((name, arguments))
        self.records[job] = JobRecord(job, name, "q", JobState.QUEUED, model)
        return True

    async def record(self, job: str) -> JobRecord | None:
        return self.records.get(job)

    async def cancel(self, job: str) -> None:
        self.cancelled.append(job)

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.asked]

    def end(self, verb: str, state: JobState, **fields: Any) -> None:
        for job, record in self.records.items():
            if record.name == verb:
                self.records[job] = JobRecord(job, verb, "q", state, record.model, **fields)


class Bench:
    """Downloads that run, and what they told."""

    def __init__(self, redis: Redis, keys: Keys, cache: Path) -> None:
        self.redis, self.keys = redis, keys
        self.jobs, self.store = FakeJobs(), LeaderStore(redis, keys, "token")
        self.places = Places(cache, "org/m")
        self.answers: dict[str, Mapping[str, Any]] = {}
        self.failed: dict[str, ApiError] = {}
        self.wanted: list[Wanted] = []
        self.arrivals = 0
        self.workers: dict[str, Any] = {"w1": {}}
        self.tokens = HubTokens(cache)
        self.made = self.again()
        self.running: asyncio.Task[None] | None = None

    def again(self) -> Downloads:
        """Return the downloads of a new leader."""
        return Downloads(
            cast("Jobs", self.jobs),
            self.redis,
            self.keys,
            self.store,
            self.places.root,
            self._answer,
            self._arrived,
            lambda model, error: self.failed.update({model: error}),
            lambda: self.wanted,
            self._workers,
            self.tokens,
            lambda model: {"first": "hf_own"}.get(model, ""),
        )

    async def _answer(self, command: str, payload: Mapping[str, Any]) -> None:
        self.answers[command] = payload

    async def _workers(self) -> Mapping[str, Any]:
        return self.workers

    async def _arrived(self, _: Download) -> None:
        self.arrivals += 1

    async def until(self, what: Any) -> None:
        """Have it look until `what()` is true."""
        async with asyncio.timeout(20):
            while not what():
                self.made.look()
                await asyncio.sleep(0.01)

    async def plan(self) -> None:
        """Plan what is under way, as the worker does."""
        await self.until(lambda: PLAN_DOWNLOAD in self.jobs.verbs())
        await self.redis.hset(self.keys.download("org/m"), "plan", PLAN.to_json())

    def write(self, count: int) -> None:
        """Have so many bytes of the file here."""
        self.places.partial(FILE).parent.mkdir(parents=True, exist_ok=True)
        self.places.partial(FILE).write_bytes(b"x" * count)


@pytest.fixture
async def bench(
    redis: Redis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    monkeypatch.setattr(downloads, "PROGRESS_S", 0.0)
    monkeypatch.setattr(downloads, "ANSWER_AFTER_S", 3600.0)  # an order is answered when it is planned
    made = Bench(redis, keys, tmp_path)
    assert await made.store.lead(1, 60_000, {})
    made.running = asyncio.create_task(made.made.run())
    yield made
    made.running.cancel()


async def test_a_download_goes_on_under_a_new_leader(bench: Bench) -> None:
    """Plan under one leader, transfer and place under the next: nobody orders anything twice."""
    await bench.made.order("c1", "org/m", again=False)
    await bench.plan()
    await bench.until(lambda: "c1" in bench.answers)
    assert bench.answers["c1"]["total"] == 10
    # The old one must not go on looking beside the new one: what it asked for, too, would not be done yet.
    bench.running.cancel()
    await asyncio.wait([bench.running])
    bench.made = bench.again()
    bench.running = asyncio.create_task(bench.made.run())
    bench.write(10)
    bench.places.partial(FILE).rename(bench.places.blob(FILE))
    await bench.until(lambda: PLACE_DOWNLOAD in bench.jobs.verbs())
    bench.jobs.end(PLACE_DOWNLOAD, JobState.DONE)
    await bench.until(lambda: bench.arrivals)
    await bench.until(lambda: bench.made.find("org/m") is None)
    assert bench.jobs.verbs().count(PLAN_DOWNLOAD) == 1
    assert await bench.redis.zrange(bench.keys.downloads, 0, -1) == []


async def test_the_log_says_how_far_a_long_download_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Let a file come in two pieces, with no pause between two lines: the share of all bytes is told."""
    monkeypatch.setattr(downloads, "LINE_S", 0.0)
    caplog.set_level("INFO")
    await bench.made.order("c1", "org/m", again=False)
    await bench.plan()
    for count, share in ((4, "40% of"), (9, "90% of")):
        bench.write(count)
        await bench.until(lambda share=share: share in caplog.text)


async def test_a_slow_disk_holds_up_nobody_but_the_download(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have each look at a file note who looks, through transfer and calling off: never the event loop."""
    lookers, have = [], Places.have

    def slow(places: Places, file: HubFile) -> int:
        lookers.append(threading.current_thread())
        return have(places, file)

    monkeypatch.setattr(Places, "have", slow)
    await bench.made.order("c1", "org/m", again=False)
    await bench.plan()
    bench.write(4)
    await bench.until(lambda: getattr(bench.made.find("org/m"), "bytes", 0) == 4)
    assert await bench.made.cancel("c2", "org/m")
    assert bench.places.have(FILE) == 0
    assert lookers.pop() is threading.current_thread()  # this test's own look
    assert lookers
    assert threading.current_thread() not in lookers


async def test_workers_that_die_often_end_a_transfer_only_when_it_does_not_get_on(bench: Bench) -> None:
    """C181: its workers died three times: with more bytes than before it is asked for again, else it ends."""
    await bench.made.order("c1", "org/m", again=False)
    await bench.plan()
    for have in (4, 7):
        bench.write(have)
        await bench.until(lambda have=have: getattr(bench.made.find("org/m"), "bytes", 0) == have)
        before = bench.jobs.verbs().count(FETCH_FILE)
        bench.jobs.end(FETCH_FILE, JobState.FAILED, error=DIED, lost=3)
        await bench.until(lambda before=before: bench.jobs.verbs().count(FETCH_FILE) > before)
    bench.jobs.end(FETCH_FILE, JobState.FAILED, error=DIED, lost=3)
    await bench.until(lambda: bench.made.find("org/m") is None)
    (event,) = [e for _, e in await bench.redis.xrange(bench.keys.events) if e.get("change") == "failed"]
    assert DIED in event["error"]
    assert bench.places.have(FILE) == 7  # kept for the next order


@pytest.mark.parametrize("text", ["[]", "{}", "nonsense", PLAN.to_json().replace("org/m", "org/other")])
async def test_a_plan_that_is_none_ends_the_download_alone(bench: Bench, text: str) -> None:
    """Somebody wrote into Redis: the order is refused, nothing else stops."""
    await bench.made.order("c1", "org/m", again=False)
    await bench.redis.hset(bench.keys.download("org/m"), "plan", text)
    await bench.until(lambda: "c1" in bench.answers)
    assert "the plan of 'org/m'" in bench.answers["c1"]["error"]["message"]
    await bench.made.order("c2", "org/m", again=False)
    await bench.plan()
    await bench.until(lambda: "c2" in bench.answers)
    assert bench.answers["c2"]["success"]


async def test_an_order_that_no_worker_takes_is_told_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Order twice while no worker lives, then once more while one does: both are warned, in the log too,
    and the download goes on when a worker comes.
    """
    monkeypatch.setattr(downloads, "ANSWER_AFTER_S", 0.0)
    bench.workers = {}
    for command in ("c1", "c2"):
        await bench.made.order(command, "org/m", again=False)
        await bench.until(lambda command=command: command in bench.answers)
        assert bench.answers[command]["success"]
        assert "start `llamastead worker`" in bench.answers[command]["warning"]
    assert sum("no worker runs" in record.message for record in caplog.records) == 2
    bench.workers = {"w1": {}}
    await bench.made.order("c3", "org/m", again=False)
    await bench.until(lambda: "c3" in bench.answers)
    assert bench.answers["c3"] == {"success": True, "download": "org/m", "askers": 3}
    await bench.plan()
    await bench.until(lambda: FETCH_FILE in bench.jobs.verbs())


async def test_the_same_order_again_counts_once(bench: Bench) -> None:
    """A command that an earlier leader took is no second asker; a second person is."""
    await bench.made.order("c1", "org/m", again=False)
    await bench.made.order("c1", "org/m", again=True)
    await bench.made.order("c2", "org/m", again=False)
    await bench.plan()
    await bench.until(lambda: len(bench.answers) == 2)
    assert bench.answers["c2"]["askers"] == 2
    await bench.until(lambda: FETCH_FILE in bench.jobs.verbs())
    assert not await bench.made.cancel("c3", "org/none")
    assert await bench.made.cancel("c3", "org/m", force=True)
    assert bench.answers["c3"]["askers"] == 0
    assert bench.jobs.cancelled.count(fetch_job("org/m", FILE)) == 1


async def test_models_that_wait_hear_why_they_wait_in_vain(bench: Bench) -> None:
    """An offline preset, one with a name that can't be, and one whose repository is refused."""
    bench.wanted = [Wanted("shut", "org/m", "", True), Wanted("odd", "../x", "", False)]
    await bench.until(lambda: len(bench.failed) == 2)
    assert "set to offline" in bench.failed["shut"].message
    assert "is not owner/name" in bench.failed["odd"].message
    assert bench.jobs.asked == []
    bench.wanted = [Wanted("first", "org/m", "", False, presets=True)]
    await bench.until(lambda: PLAN_DOWNLOAD in bench.jobs.verbs())
    assert bench.jobs.asked[0][1]["presets"] is True
    left = bench.jobs.asked[0][1]["token"]
    assert (bench.tokens.take(left), "hf_own" in json.dumps(bench.jobs.asked)) == ("hf_own", False)
    assert (bench.places.root / "hub-tokens" / left).stat().st_mode & 0o777 == 0o600
    bench.wanted = []
    refusal = ApiError(404, "'org/m' is not on the hub", {"reason": "not_found"})
    bench.jobs.end(PLAN_DOWNLOAD, JobState.FAILED, error=refusal.to_json())
    await bench.until(lambda: "first" in bench.failed)
    assert bench.failed["first"] == refusal
    await bench.until(lambda: not bench.tokens.take(left))
    assert json.loads((await bench.redis.hget(bench.keys.download("org/m"), "models")) or "[]") == []
