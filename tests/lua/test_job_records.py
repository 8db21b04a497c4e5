"""Records of jobs: each change happens once, and only to whom the job belongs."""

from collections.abc import Iterator

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from llamastead.shared.store.connect import connect_sync
from llamastead.shared.store.jobs import MOST_LOST, Beat, JobStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.words import JobState

FIELDS = {"name": "read_metadata", "queue": "measure", "model": "m", "arguments": '{"a": 1}', "stall_s": 60}


@pytest.fixture
def client(redis: AsyncRedis, redis_url: str) -> Iterator[Redis]:
    """A blocking client of the session's Valkey, emptied by `redis`."""
    made = connect_sync(redis_url)
    yield made
    made.close()


@pytest.fixture
def store(client: Redis, keys: Keys) -> JobStore:
    """The records."""
    return JobStore(client, keys)


def test_a_job_is_opened_once_and_its_record_says_what_it_is(
    store: JobStore, client: Redis, keys: Keys
) -> None:
    """Ask twice: once it is opened; the record has what was given, and runs out some day."""
    assert store.ask("j", FIELDS)
    assert not store.ask("j", FIELDS)
    (record,) = store.under_way()
    assert (record.id, record.state, record.model, record.stall_s) == ("j", JobState.QUEUED, "m", 60)
    assert record.arguments == {"a": 1}
    assert client.pttl(keys.job("j")) > 0


def test_c184_only_one_worker_begins_and_only_its_attempt_ends_a_job(store: JobStore) -> None:
    """Start twice, end with a wrong number, end, end again: the first end stays whatever comes later."""
    store.ask("j", FIELDS)
    assert (store.start("j", "w1"), store.start("j", "w2")) == (1, 0)
    assert not store.end("j", 2, "late word of somebody else")
    assert store.end("j", 1)
    assert not store.end("j", 1, "changed its mind")
    record = store.read("j")
    assert record is not None
    assert (record.state, record.worker, record.error) == (JobState.DONE, "w1", "")
    assert store.under_way() == []
    assert store.start("j", "w2") == 0
    assert store.start("never asked for", "w") == 0


def test_who_did_a_job_has_no_say_in_the_next_one_of_its_name(store: JobStore) -> None:
    """End a job, have the same asked for and begun again: what the first one still says does nothing."""
    store.ask("j", FIELDS)
    first = store.start("j", "w1")
    assert store.end("j", first)
    store.ask("j", FIELDS)
    second = store.start("j", "w2")
    assert second != first
    assert store.lose("j", first, given_back=True) is None
    assert not store.end("j", first)
    assert store.beat("j", first) is Beat.LOST
    assert store.beat("j", second) is Beat.GOING


def test_a_job_is_lost_with_its_worker_and_no_sooner(store: JobStore, client: Redis, keys: Keys) -> None:
    """Sweep while its worker lives, and once that is gone: only then it is queued, the old attempt is out."""
    store.ask("j", FIELDS)
    store.start("j", "w1")
    client.hset(keys.worker("w1"), "pid", 1)
    assert store.lose("j", 1) is None
    client.delete(keys.worker("w1"))
    assert store.lose("j", 1) is JobState.QUEUED
    queued = store.read("j")
    assert queued is not None
    assert queued.worker == ""
    assert store.lose("j", 1) is None
    assert store.beat("j", 1) is Beat.LOST
    assert store.start("j", "w2") == 2
    assert store.lose("j", 1, given_back=True) is None  # it is another's by now
    assert (store.beat("j", 1), store.beat("j", 2, "half")) == (Beat.LOST, Beat.GOING)
    assert not store.end("j", 1)
    record = store.read("j")
    assert record is not None
    assert (record.progress, record.lost) == ("half", 1)


def test_a_job_that_takes_its_workers_with_it_fails(store: JobStore) -> None:
    """Lose it again and again: it fails. Given back by a worker that is told to stop, it never does."""
    store.ask("given", FIELDS)
    store.ask("deadly", FIELDS)
    for _ in range(MOST_LOST + 2):
        assert store.lose("given", store.start("given", "w"), given_back=True) is JobState.QUEUED
    ends = [store.lose("deadly", store.start("deadly", "w")) for _ in range(MOST_LOST)]
    assert ends == [JobState.QUEUED] * (MOST_LOST - 1) + [JobState.FAILED]
    record = store.read("deadly")
    assert record is not None
    assert record.error == f"its worker died {MOST_LOST} times"
    assert [each.id for each in store.under_way()] == ["given"]


def test_a_job_called_off_vanishes_or_is_told(store: JobStore) -> None:
    """Call off a queued one, a running one, a lost one, one that is over; asking again calls it in again."""
    store.ask("queued", FIELDS)
    assert store.cancel("queued") is JobState.QUEUED
    assert store.read("queued") is None
    store.ask("j", FIELDS)
    store.start("j", "w")
    assert store.cancel("j") is JobState.RUNNING
    assert store.beat("j", 1) is Beat.CANCELLED
    assert not store.ask("j", FIELDS)
    assert store.beat("j", 1) is Beat.GOING
    store.cancel("j")
    assert store.lose("j", 1) is JobState.FAILED
    assert store.read("j") is None
    assert store.cancel("j") is None
    assert store.under_way() == []


def test_a_name_whose_record_ran_out_is_dropped(store: JobStore, client: Redis, keys: Keys) -> None:
    """Delete a record as its TTL would: the list of jobs under way forgets it."""
    store.ask("j", FIELDS)
    client.delete(keys.job("j"))
    assert store.under_way() == []
    assert client.zcard(keys.jobs) == 0
