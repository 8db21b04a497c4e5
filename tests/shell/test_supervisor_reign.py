"""A supervisor in this process, Valkey and holders real: faults end a reign and the next one recovers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from holder_kit import PATIENCE_S, journal, spec_for
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from tiny import tiny_model

from llamastead.shared.settings import Settings
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.words import UseKind
from llamastead.supervisor import effects, holders, main
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.core.events import Tick
from llamastead.supervisor.driver import Driver
from llamastead.supervisor.health import Health
from llamastead.supervisor.holder_link import HolderExit, HolderLines
from llamastead.supervisor.news import News

LEADER_TTL_S = 60.0  # whoever waits for it fails the test


class Court:
    """A supervisor, what it serves, and a gateway that asks for it."""

    def __init__(self, redis: Redis, keys: Keys, settings: Settings) -> None:
        self.redis, self.keys = redis, keys
        self.gateway = GatewayStore(redis, keys)
        self.supervisor = main.Supervisor(settings, Configuration(settings))
        self._tickets = 0

    async def number(self) -> int:
        """Return the number of the present leadership, 0 while nobody leads."""
        if not await self.redis.exists(self.keys.leader):
            return 0
        return int(await self.redis.hget(self.keys.leadership, "number") or 0)

    async def instance(self, model: str) -> dict[str, str]:
        """Return the record of the model's instance, {} when there is none."""
        name = await self.redis.hget(self.keys.model(model), "instance")
        return {"id": name, **await self.redis.hgetall(self.keys.instance(name))} if name else {}

    async def want(self, model: str) -> None:
        """Stand in the queue for a model."""
        self._tickets += 1
        await self.gateway.acquire(model, f"t{self._tickets}", "g", UseKind.INFERENCE, 60_000)

    async def served(self, model: str) -> dict[str, str]:
        """Ask for a model and return the record of its instance once it is READY."""
        await self.want(model)

        async def look() -> dict[str, str]:
            found = await self.instance(model)
            return found if found.get("state") == "ready" else {}

        return dict(await self.until(look))

    async def until(self, look: Callable[[], Any]) -> Any:
        """Return the first true value of `look`, which asks Redis."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if found := await look():
                    return found
                await asyncio.sleep(0.01)

    async def reigns_after(self, number: int) -> int:
        """Wait for a later leadership under which all instances were adopted and return its number."""

        async def look() -> int:
            now = await self.number()
            records = (await self.gateway.read_instances()).values()
            return now if now > number and {r.get("epoch") for r in records} <= {str(now)} else 0

        return int(await self.until(look))


def settings_for(run_dir: Path, redis_url: str, **changes: Any) -> Settings:
    """Return settings with quick clocks, and a lead that outlasts the test."""
    quick = {"reread": 0.2, "heartbeat": 0.2, "leader_ttl": LEADER_TTL_S, "leader_renew": 0.2, "host_id": "h"}
    return Settings(run_dir=run_dir, redis_url=redis_url, **{**quick, **changes})


@pytest.fixture
async def court(run_dir: Path, stub: Path, redis: Redis, redis_url: str, keys: Keys) -> AsyncIterator[Court]:
    """A supervisor that leads, two models, and a registered gateway."""
    folder = run_dir.parent / "models"
    folder.mkdir()
    for seed, name in enumerate(("a", "b"), 1):
        tiny_model(folder / f"{name}.gguf", seed)
    async for made in reigning(redis, keys, settings_for(run_dir, redis_url, models_dir=folder, engine=stub)):
        yield made


async def reigning(redis: Redis, keys: Keys, settings: Settings) -> AsyncIterator[Court]:
    """Yield a court whose supervisor runs, and let it stop in order."""
    (settings.run_dir / "i").mkdir(exist_ok=True, mode=0o700)
    made = Court(redis, keys, settings)
    task = asyncio.create_task(made.supervisor.run())

    async def open_herd() -> bool:
        return bool(await redis.exists(keys.herd)) and bool(await redis.zcard(keys.models))

    await made.until(open_herd)
    await made.gateway.heartbeat("g", 1, {}, {}, {}, [])
    yield made
    await made.gateway.leave("g")
    made.supervisor.stop.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await task == 0


def pids(settings_folder: Path, model: str) -> list[int]:
    """Return the pids of all engines that were started for a model."""
    entries = journal(settings_folder / "models" / f"{model}.gguf")
    return [entry["pid"] for entry in entries if entry["event"] == "start"]


async def test_a_fault_in_a_task_ends_the_reign_and_the_next_recovers(court, run_dir, monkeypatch, caplog):
    """Let the health watch fail once: another reign begins at once and adopts, nothing is loaded again."""
    before = await court.served("a")
    number, hits, probe = await court.number(), [], Health._answers

    async def faulty(self: Health, socket: Path | None) -> bool:
        if not hits:
            hits.append(socket)
            raise ZeroDivisionError("a bug")
        return await probe(self, socket)

    monkeypatch.setattr(Health, "_answers", faulty)
    assert await court.reigns_after(number) == number + 1
    assert len(hits) == 1
    after = await court.served("a")
    assert (after["id"], after["pid"]) == (before["id"], before["pid"])
    assert pids(run_dir.parent, "a") == [int(before["pid"])]
    assert "the reign broke off" in caplog.text
    await court.served("b")


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
    assert "no spare holder" in caplog.text
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
    driver = Driver(*[None] * 5, reread=1.0)
    driver.empty.set()
    driver.put(Tick())
    assert not driver.empty.is_set()
