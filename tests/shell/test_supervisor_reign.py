"""A supervisor in this process, Valkey and holders real: faults end a reign and the next one recovers."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from holder_kit import PATIENCE_S, alive, journal, spec_for
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from reign_kit import Court, reigning, settings_for
from tiny import tiny_model

from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor import effects, holders, main, news, recovery
from llamastead.supervisor.board import Board
from llamastead.supervisor.core.events import Tick
from llamastead.supervisor.driver import Driver
from llamastead.supervisor.health import Health
from llamastead.supervisor.holder_link import HolderExit, HolderLines
from llamastead.supervisor.holder_record import Record
from llamastead.supervisor.news import News


@pytest.fixture
async def court(run_dir: Path, stub: Path, redis: Redis, redis_url: str, keys: Keys) -> AsyncIterator[Court]:
    """A supervisor that leads, two models, and a registered gateway."""
    folder = run_dir.parent / "models"
    folder.mkdir()
    for seed, name in enumerate(("a", "b"), 1):
        tiny_model(folder / f"{name}.gguf", seed)
    async for made in reigning(redis, keys, settings_for(run_dir, redis_url, models_dir=folder, engine=stub)):
        yield made


def pids(settings_folder: Path, model: str) -> list[int]:
    """Return the pids of all engines that were started for a model."""
    entries = journal(settings_folder / "models" / f"{model}.gguf")
    return [entry["pid"] for entry in entries if entry["event"] == "start"]


async def test_a_fault_in_a_task_ends_the_reign_and_the_next_recovers(court, run_dir, monkeypatch, caplog):
    """Let the health watch fail once: another reign begins at once and adopts, nothing is loaded again."""
    before = await court.served("a")
    number, hits, probe = await court.number(), [], Health.answers

    async def faulty(self: Health, *asked: object) -> bool:
        if not hits:
            hits.append(asked)
            raise ZeroDivisionError("a bug")
        return await probe(self, *asked)

    monkeypatch.setattr(Health, "answers", faulty)
    assert await court.reigns_after(number) == number + 1
    assert len(hits) == 1
    after = await court.served("a")
    assert (after["id"], after["pid"]) == (before["id"], before["pid"])
    assert pids(run_dir.parent, "a") == [int(before["pid"])]
    assert "the reign broke off" in caplog.text
    await court.served("b")


async def test_who_hears_that_a_model_is_ready_finds_its_pid_there(court, monkeypatch):
    """Load a model while nothing is written of instances but by scripts: the model has the engine's pid with
    the change that makes it ready, as a gateway reads it when it hears of that.
    """

    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(Board, "_show_standing", nothing)
    ready = await court.served("a")
    assert await court.redis.hget(court.keys.model("a"), "pid") == ready["pid"] != "0"


async def test_an_ordered_drain_outlives_the_reign_that_began_it(court):
    """Order a busy model away, end the reign: under the next one it still drains, and goes once free."""
    busy = await court.served("a")
    await court.gateway.submit("unload", "g", 5000, {"model": "a"})

    async def drains() -> bool:
        return (await court.instance("a")).get("state") == "draining"

    await court.until(drains)
    number = await court.number()
    await court.redis.delete(court.keys.leader)
    await court.reigns_after(number)
    assert await drains()
    lease = await court.redis.hget(court.keys.leases(busy["id"]), "g")
    await court.gateway.release(busy["id"], "g", lease.partition(":")[0], used=True)

    async def gone() -> bool:
        return not await court.instance("a")

    await court.until(gone)
    assert await court.redis.hget(court.keys.model("a"), "end_class") == "stopped"


async def test_the_folder_of_a_dead_spare_is_removed(court, run_dir):
    """Leave a spare's folder without a holder behind, end the reign: the next one removes it, and only it."""
    dead = run_dir / "i" / "spare-dead"
    dead.mkdir()
    number = await court.number()
    await court.redis.delete(court.keys.leader)
    await court.reigns_after(number)

    async def gone() -> bool:
        return not dead.exists()

    await court.until(gone)
    await court.served("a")


async def test_a_fault_over_a_holders_message_ends_the_reign_not_the_engine(court, run_dir, monkeypatch):
    """Fail once over what a holder tells: its connection is not taken for lost, its engine lives on."""
    before = await court.served("a")
    number, hits, take = await court.number(), [], News.on_event

    def faulty(self: News, instance: str, event: Any) -> None:
        if isinstance(event, HolderLines) and not hits:
            hits.append(event)
            raise ZeroDivisionError("a bug")
        take(self, instance, event)

    monkeypatch.setattr(News, "on_event", faulty)
    await court.want("b")  # whose engine will say something
    assert await court.reigns_after(number) == number + 1
    assert len(hits) == 1
    await court.served("b")
    assert (await court.served("a"))["pid"] == before["pid"]
    assert [len(pids(run_dir.parent, model)) for model in ("a", "b")] == [1, 1]


async def test_no_spare_holder_is_no_reason_to_give_up(court, run_dir, monkeypatch, caplog):
    """Make spares impossible: the reign goes on, models are served by holders started for them."""
    number = await court.number()
    monkeypatch.setattr(holders, "SPARE_PREFIX", "spare-" + "x" * 200)
    first = await court.served("a")  # with the spare from before
    second = await court.served("b")
    assert first["epoch"] == second["epoch"] == str(number)
    assert await court.number() == number

    async def told() -> bool:
        return "no spare holder" in caplog.text

    await court.until(told)  # a spare is started a little after the load, so as not to be in its way
    await effects.keep_spare(court.supervisor._holders)


async def test_an_engine_that_is_missing_fails_its_model_only(run_dir, stub, redis, redis_url, keys):
    """Name a missing engine in a preset: its tickets are settled with the reason, the reign goes on."""
    model = tiny_model(run_dir.parent / "m.gguf", 1)
    preset = run_dir.parent / "m.ini"
    preset.write_text(f"[good]\nmodel = {model}\n[bad]\nmodel = {model}\nengine = {run_dir}/no-such-engine\n")
    settings = settings_for(run_dir, redis_url, models_preset=preset, engine=stub)
    async for court in reigning(redis, keys, settings):
        number = await court.number()
        await court.want("bad")

        async def failed(court: Court = court) -> str:
            return str(await court.redis.hget(court.keys.model("bad"), "reason") or "")

        assert "no-such-engine" in await court.until(failed)
        await court.served("good")
        assert await court.number() == number


async def test_what_is_wrong_with_the_registry_is_what_the_next_reign_finds(
    run_dir, stub, redis, redis_url, keys
):
    """Break the preset file between two reigns and mend it between two: each shows what it read itself."""
    preset = run_dir.parent / "m.ini"
    good = f"[good]\nmodel = {tiny_model(run_dir.parent / 'm.gguf', 1)}\n"
    preset.write_text(good)
    settings = settings_for(run_dir, redis_url, models_preset=preset, engine=stub, watch=3600.0)
    async for court in reigning(redis, keys, settings):
        for text, trouble in (("[broken\n", "m.ini:1"), (good, "")):
            number = await court.number()
            preset.write_text(text)
            await redis.delete(keys.leader)
            await court.reigns_after(number)

            async def told(trouble: str = trouble) -> bool:
                error = await redis.hget(keys.herd, "registry_error")
                return trouble in error if trouble else error == ""

            await court.until(told)
        await court.served("good")


async def test_a_long_reading_between_two_reigns_keeps_the_lead(court, monkeypatch):
    """Break a reign off and read the registry until the next lead was renewed twice: it goes on."""
    number, renewals, main_thread = await court.number(), asyncio.Semaphore(0), threading.current_thread()
    go, readers, renew = threading.Event(), [], LeaderStore.renew
    read_again = court.supervisor._configuration.read_again

    def slow() -> Any:
        readers.append(threading.current_thread())
        assert go.wait(PATIENCE_S)
        return read_again()

    async def renewing(store: LeaderStore, ttl_ms: int, info: Any = None) -> None:
        await renew(store, ttl_ms, info)
        if readers and not go.is_set():
            renewals.release()

    monkeypatch.setattr(court.supervisor._configuration, "read_again", slow)
    monkeypatch.setattr(LeaderStore, "renew", renewing)
    court.supervisor._reign.break_off(RuntimeError("a bug"))
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            await renewals.acquire()
    assert await court.number() == number + 1
    go.set()
    await court.served("a")
    assert await court.number() == number + 1
    assert main_thread not in readers


async def test_r13_what_proves_another_nonce_than_was_written_down_is_not_adopted(court):
    """Write another nonce down for a running instance and lead anew: it is ended, not adopted, and the model
    is loaded afresh; the one beside it is kept.
    """
    await court.served("b")
    before, number = await court.served("a"), await court.number()
    kept = await court.instance("b")
    await court.redis.hset(court.keys.instance(before["id"]), "nonce", "0" * 32)
    await court.redis.delete(court.keys.leader)
    await court.reigns_after(number)
    assert not await court.redis.exists(court.keys.instance(before["id"]))
    assert not alive(int(before["pid"]))
    after = await court.served("a")
    assert after["id"] != before["id"]
    assert (await court.instance("b"))["pid"] == kept["pid"]


async def test_a_number_that_cannot_be_written_gives_the_lead_back(court, monkeypatch):
    """Fail once to write the number of a new leadership: the lead is not kept from others till its end."""
    await court.served("a")
    number, hits, write = await court.number(), [], main.write_epoch

    def full(path: Path, new: int) -> bool:
        if not hits:
            hits.append(new)
            raise OSError(28, "No space left on device")
        return write(path, new)

    monkeypatch.setattr(main, "write_epoch", full)
    await court.redis.delete(court.keys.leader)
    assert await court.reigns_after(number + 1) == number + 2
    assert hits == [number + 1]
    assert len(await court.gateway.read_instances()) == 1


async def test_an_outage_is_told_once(court, monkeypatch, caplog):
    """Let the next elections fail alike five times: one warning says why, then the lead is taken."""
    number, tries, read = await court.number(), [], main.LeaderStore.read_number

    async def away(store: main.LeaderStore) -> int:
        tries.append(1)
        if len(tries) <= 5:
            raise RedisConnectionError("gone")
        return await read(store)

    monkeypatch.setattr(main.LeaderStore, "read_number", away)
    await court.redis.delete(court.keys.leader)
    assert await court.reigns_after(number) > number
    assert len(tries) > 5
    assert caplog.text.count("can't be reached (gone)") == 1


async def test_usr1_gives_the_lead_back_and_keeps_the_engine(run_dir, stub, redis, redis_url, keys):
    """Leave while a model runs: the lead is free at once, the next supervisor adopts the same pid."""
    tiny_model(run_dir.parent / "m.gguf", 1)
    settings = settings_for(run_dir, redis_url, models_dir=run_dir.parent, engine=stub)
    async for first in reigning(redis, keys, settings):
        before, number = await first.served("m"), await first.number()
        first.supervisor.leave.set()

        async def free(first: Court = first) -> bool:
            return await first.number() == 0

        await first.until(free)
        async for second in reigning(redis, keys, settings):
            assert await second.reigns_after(number) == number + 1
            assert (await second.served("m"))["pid"] == before["pid"]


async def test_a_standby_keeps_one_connection_to_the_holder_of_an_ended_engine(run_dir, stub, model, watch):
    """End an engine that two watch: both still know its holder, so that none connects again and again."""
    leads, stands_by = watch(), watch(None, False)
    spec = spec_for(run_dir, stub, model)
    await leads.holders.start(spec)
    await stands_by.holders.adopt(spec.folder)
    leads.holders.stop(spec.instance, 0.0, force=True)
    await stands_by.event(HolderExit)
    assert stands_by.holders.knows(spec.instance)
    leads.holders.forget(spec.instance)


def test_told_events_count_before_the_herd_is_empty():
    """Tell an idle driver something: it is not empty any more, since what was told may start an instance."""
    driver = Driver(*[None] * 5, reread=1.0, know=None)
    driver.empty.set()
    driver.put(Tick())
    assert not driver.empty.is_set()


async def test_c58_what_a_kill_does_not_end_keeps_its_room_and_ends_in_the_background(
    run_dir, stub, redis, redis_url, keys, monkeypatch
):
    """Find a record whose processes outlive KILL for a while: stop-failed with its pid, then gone."""
    folder = run_dir.parent / "models"
    folder.mkdir()
    for seed, name in enumerate(("a", "b"), 1):
        tiny_model(folder / f"{name}.gguf", seed)
    stuck = run_dir / "i" / "old-1-1"
    stuck.mkdir(parents=True)
    record = dict.fromkeys(Record.__dataclass_fields__, "x") | {"instance": "old-1-1", "model": "a"}
    numbers = {"holder_pid": 1, "holder_start": 1, "engine_pid": 77, "engine_start": 1}
    (stuck / "record.json").write_text(json.dumps(record | numbers))
    lives = [True]
    monkeypatch.setattr(news, "kill_recorded", lambda record: [record.engine_pid] if lives else [])
    monkeypatch.setattr(news, "KILL_AGAIN_S", 0.01)
    monkeypatch.setattr(news, "KILL_GIVES_UP_AFTER_S", 0.05)
    monkeypatch.setattr(recovery, "KILL_PATIENCE_S", 0.05)
    settings = settings_for(run_dir, redis_url, models_dir=folder, engine=stub, models_max=2)
    async for court in reigning(redis, keys, settings):
        await court.served("b")

        async def told(court: Court = court) -> dict[str, str]:
            found = await court.instance("a")
            return found if found.get("state") == "stop_failed" else {}

        assert (await court.until(told))["pid"] == "77"
        lives.clear()

        async def gone() -> bool:
            return not await redis.exists(keys.instance("old-1-1")) and not stuck.exists()

        await court.until(gone)
        await court.served("a")
