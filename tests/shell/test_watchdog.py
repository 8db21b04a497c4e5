"""The supervisor notices of itself that a request is left waiting, and says so where health is checked."""

import asyncio
from dataclasses import replace

from gateway_kit import until
from redis.asyncio import Redis

from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.words import UseKind, WaitReason
from llamastead.supervisor.core.state import Policy, State, Wait, initial
from llamastead.supervisor.watchdog import Watchdog


class Stuck:
    """A scheduler that took in what was there at `looked_ms`, and knows these reasons."""

    def __init__(self, store: LeaderStore) -> None:
        self.state: State = initial(Policy(), "h-1", {})
        self.looked_ms = 0
        self.looks = 0
        self.watchdog = Watchdog(store, lambda: self.state, lambda: self.looked_ms, self.look, 0.05)

    def look(self) -> None:
        self.looks += 1

    def knows(self, *models: str) -> None:
        self.state = replace(self.state, waits={model: Wait(WaitReason.BUSY) for model in models})


async def open_herd(redis: Redis, keys: Keys) -> LeaderStore:
    """Return the store of a leader whose herd has a model and a waiting request for it."""
    leader, gateway = LeaderStore(redis, keys, "token"), GatewayStore(redis, keys)
    assert await leader.lead(1, 10_000, {})
    await leader.publish("r1", {"a": {"source": "preset"}}, {})
    await leader.open_herd({})
    await gateway.heartbeat("g1", 1, {}, {}, {}, ())
    await gateway.acquire("a", "g1.1", "g1", UseKind.INFERENCE, 60_000)
    return leader


async def leadership_once(redis: Redis, keys: Keys, ready: str) -> dict[str, str]:
    """Return the hash `leadership` once it says so."""

    async def look() -> dict[str, str]:
        found = await redis.hgetall(keys.leadership)
        return found if found.get("ready") == ready else {}

    return dict(await until(look, f"ready to be {ready}"))


async def test_r5_a_scheduler_that_looks_at_nothing_is_not_ready(redis: Redis, keys: Keys) -> None:
    """Enrol a ticket that the scheduler never takes in: not ready, with its age; looked at, ready again."""
    leader = await open_herd(redis, keys)
    stuck = Stuck(leader)
    running = asyncio.create_task(stuck.watchdog.run(0.01, 10_000))
    try:
        found = await leadership_once(redis, keys, "0")
        assert int(found["oldest_demand_ms"]) >= 50
        assert "was not looked at" in found["trouble"]
        assert stuck.looks > 0
        stuck.knows("a")
        stuck.looked_ms = (await leader.observe()).now_ms
        found = await leadership_once(redis, keys, "1")
        assert (found["oldest_demand_ms"], found["trouble"]) == ("0", "")
    finally:
        running.cancel()


async def test_c04_a_ticket_without_a_reason_is_an_error(redis: Redis, keys: Keys, caplog) -> None:
    """Let the scheduler know a ticket and no reason for it: told once it lasts, then it is named."""
    leader = await open_herd(redis, keys)
    stuck = Stuck(leader)
    facts = await leader.observe()
    stuck.looked_ms = facts.now_ms
    assert stuck.watchdog.judge(facts).forgotten == ()
    assert stuck.watchdog.judge(replace(facts, now_ms=facts.now_ms + 60)).forgotten == ("a",)
    running = asyncio.create_task(stuck.watchdog.run(0.01, 10_000))
    try:
        found = await leadership_once(redis, keys, "0")
        assert found["trouble"] == "requests for 'a' wait without a reason"
        assert [r.levelname for r in caplog.records if "without a reason" in r.getMessage()] == ["ERROR"]
    finally:
        running.cancel()
