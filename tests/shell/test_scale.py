"""Thousands of models: what is done for them is counted, not timed."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from reign_kit import Court, reigning, settings_for
from tiny import tiny_model

from llamastead.shared import gguf
from llamastead.shared.jobs import REQUEUE_AFTER_MS, Jobs
from llamastead.shared.store.jobs import JobStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.book import Book
from llamastead.supervisor.bookkeeping import SLICE, Bookkeeping
from llamastead.supervisor.metadata import MOST_JOBS

MANY = 6 * SLICE
LAST = f"m{MANY - 1:04}"


class Work:
    """Counts files opened and models reckoned, and the models with fields of each publication.

    What is not wanted at once is not reckoned before `background` is set.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened: Counter[str] = Counter()
        self.reckoned = 0
        self.published: list[int] = []
        self.background = asyncio.Event()
        read_header, reckon = gguf._read_header, Book.reckon
        publish, run = LeaderStore.publish, Bookkeeping.run

        def opening(path):
            self.opened[path.name] += 1
            return read_header(path)

        def reckoning(book, names):
            found = reckon(book, names)
            self.reckoned += len(found)
            return found

        async def publishing(store, revision, models, aliases, changes=None):
            self.published.append(sum(fields is not None for fields in models.values()))
            await publish(store, revision, models, aliases, changes)

        async def running(of):
            await self.background.wait()
            await run(of)

        patch.setattr(gguf, "_read_header", opening)
        patch.setattr(Book, "reckon", reckoning)
        patch.setattr(LeaderStore, "publish", publishing)
        patch.setattr(Bookkeeping, "run", running)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Count from now on."""
    return Work(monkeypatch)


@pytest.fixture
def folder(run_dir: Path) -> Path:
    """A folder of many models: one file by many names."""
    found = run_dir.parent / "models"
    found.mkdir()
    source = tiny_model(run_dir.parent / "source.gguf", 1)
    for number in range(MANY):
        os.link(source, found / f"m{number:04}.gguf")
    return found


@pytest.fixture
async def court(
    run_dir: Path, stub: Path, redis: Redis, redis_url: str, keys: Keys, folder: Path, work: Work
) -> AsyncIterator[Court]:
    """A supervisor that has just opened the herd of all of them."""
    async for made in reigning(redis, keys, settings_for(run_dir, redis_url, models_dir=folder, engine=stub)):
        yield made


async def memory(court: Court, model: str) -> dict[str, object]:
    """Return what is shown of a model's memory."""
    return dict(json.loads(await court.redis.hget(court.keys.model(model), "memory") or "{}"))


async def all_reckoned(court: Court) -> None:
    """Wait until the last model has figures."""
    await court.until(lambda: memory(court, LAST))


async def test_the_herd_opens_before_its_models_are_reckoned_and_a_wanted_one_comes_first(court, work):
    """Open a herd of many: a slice is reckoned; then one that is wanted, before its load is booked; then all
    others, each file opened once.
    """
    assert await court.redis.zcard(court.keys.models) == MANY
    assert (len(work.opened), work.reckoned, work.published) == (SLICE, SLICE, [MANY])
    assert not await memory(court, LAST)
    served = await court.served(LAST)
    assert court.supervisor._reign._driver.state.instances[served["id"]].needs["host"] > 0
    assert (work.opened[f"{LAST}.gguf"], work.reckoned) == (1, SLICE + 1)
    shown = await memory(court, LAST)
    assert shown["min"]
    work.background.set()
    await court.until(lambda: memory(court, f"m{MANY - 2:04}"))
    assert set(work.opened.values()) == {1}
    assert (len(work.opened), work.reckoned, work.published) == (MANY, MANY, [MANY])


async def test_a_changed_model_costs_work_for_one(court, work, folder):
    """Change one file of many and reload: one is opened, reckoned and published."""
    work.background.set()
    await all_reckoned(court)
    before = work.opened.total(), work.reckoned
    revision = await court.redis.hget(court.keys.herd, "registry_revision")
    draft = folder.parent / "draft.gguf"
    tiny_model(draft, 2)
    draft.replace(folder / "m0007.gguf")  # at once: the watch sees no folder without it
    court.supervisor.reload.set()

    async def published() -> bool:
        return await court.redis.hget(court.keys.herd, "registry_revision") != revision

    await court.until(published)
    assert (work.opened.total(), work.reckoned) == (before[0] + 1, before[1] + 1)
    assert work.published == [MANY, 1]


async def test_a_new_reign_of_the_same_registry_publishes_nothing_anew(court, work):
    """End the reign: the next one finds all models in Redis as they are, and writes none of them."""
    number = await court.number()
    court.supervisor._reign.break_off(RuntimeError("a bug"))
    await court.reigns_after(number)

    async def published_again() -> bool:
        return len(work.published) == 2

    await court.until(published_again)
    assert work.published == [MANY, 0]


async def test_no_more_jobs_wait_than_a_worker_can_be_near_to(court, keys, redis):
    """Have headers of many files to read and no worker: some jobs are asked for, the others not yet."""

    async def full() -> bool:
        return await redis.zcard(keys.jobs) >= MOST_JOBS

    await court.until(full)
    assert await redis.zcard(keys.jobs) == MOST_JOBS


async def test_a_job_on_its_way_to_a_worker_is_not_lost(redis, redis_url, keys):
    """Look while a worker has taken a job and not begun it: it is left alone; what does not begin is lost."""
    jobs = Jobs(redis_url, keys)
    try:
        for name in ("begun", "lost"):
            await jobs.ask(name, "read_metadata", name, {})
            changed = (await jobs.record(name)).changed_ms - REQUEUE_AFTER_MS
            await redis.hset(keys.job(name), "changed_ms", changed)
        await redis.delete(f"{keys.rq}:queue:measure")  # both taken
        assert await jobs.sweep() == []
        await asyncio.to_thread(JobStore(jobs._client, keys).start, "begun", "w")
        await redis.set(f"{keys.prefix}worker:w", "lives")
        (line,) = await jobs.sweep()
        assert line.startswith("read_metadata of lost is handed in again")
        assert await redis.lrange(f"{keys.rq}:queue:measure", 0, -1) == ["lost"]
    finally:
        jobs.close()
