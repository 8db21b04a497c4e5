"""Heartbeats bring Redis in line with what gateways hold; silent ones are swept."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis
from small_herd import Herd

from llamastead.shared.store.errors import Unregistered
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.records import Claimed, Claims, Waiting
from llamastead.shared.store.scripts import Scripts
from llamastead.shared.words import EndClass, InstanceState


@pytest.fixture
async def herd(redis: Redis, keys: Keys) -> Herd:
    return await Herd(redis, keys).open("a", "b")


async def leases(herd: Herd, instance: str = "i1") -> dict[str, str]:
    return await herd.gateway.read_leases(instance)


async def test_first_heartbeat_registers(redis: Redis, keys: Keys) -> None:
    """Beat twice: only the second was known before, and what the gateway says of itself is shown."""
    herd = Herd(redis, keys)
    assert not (await herd.beat("g1")).known_before
    assert (await herd.beat("g1")).known_before
    assert await herd.gateway.read_gateways() == {"g1": {"host": "here"}}
    assert await redis.pttl(keys.gateway("g1")) > 0


async def test_a_batch_of_counts_is_added_once_however_often_it_is_sent(herd: Herd) -> None:
    """Send a batch twice, as after a lost reply, another gateway's, and the next one: each is added once, and
    what is of no model here makes none.
    """
    for gateway in ("g1", "g1", "g2"):
        await herd.beat(
            gateway, batch=1, counts={"a": {"answers:200": 2, "waited_ms": 7}, "gone": {"waits": 1}}
        )
    await herd.beat("g1")
    await herd.beat("g1", batch=2, counts={"a": {"answers:200": 1, "answers:503": 1}})
    found = await herd.redis.hgetall(herd.keys.model("a"))
    assert (found["answers:200"], found["answers:503"], found["waited_ms"]) == ("5", "1", "14")
    assert not await herd.redis.exists(herd.keys.model("gone"))


async def test_unknown_lease_is_removed_after_two_beats(herd: Herd) -> None:
    """A lease whose acquire was cancelled unseen: kept while it may be under way, then gone and told."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "lost")
    await herd.asked()
    await herd.beat("g1", minting=("lost",))
    await herd.beat("g1", minting=("lost",))
    assert await leases(herd) == {"g1": "lost"}
    await herd.beat("g1")
    assert await leases(herd) == {}
    assert await herd.asked() == [("idle", "i1")]


async def test_what_was_booked_since_the_previous_beat_is_kept(herd: Herd) -> None:
    """A lease and a ticket booked after the last beat stay, although the next beat does not name them."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    await herd.acquire("b", "t2")
    await herd.beat("g1")
    assert await leases(herd) == {"g1": "t1"}
    assert list(await herd.gateway.read_queue()) == ["b"]
    await herd.asked()
    await herd.beat("g1")
    assert await leases(herd) == {}
    assert await herd.gateway.read_queue() == {}
    assert sorted(await herd.asked()) == [("idle", "i1"), ("left", "b")]


async def test_other_gateways_keep_what_they_have(herd: Herd) -> None:
    """The clean-up of one gateway touches no lease and no ticket of another."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1", "g2")
    await herd.acquire("b", "t2", "g2")
    for _ in range(3):
        await herd.beat("g1")
    assert await leases(herd) == {"g2": "t1"}
    assert list(await herd.gateway.read_queue()) == ["b"]


async def test_live_lease_that_redis_lost_is_booked_again(herd: Herd) -> None:
    """Delete a live lease behind everybody's back: the next beat has it back and a stop is refused."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    await herd.redis.delete(herd.keys.leases("i1"))
    await herd.beat("g1", leases={"i1": "t1"})
    assert await leases(herd) == {"g1": "t1"}


async def test_live_lease_never_replaces_a_newer_one(herd: Herd) -> None:
    """The gateway still names its older id while a newer one is booked: the newer one stays, then heals."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "old")
    await herd.acquire("a", "new")
    await herd.beat("g1", leases={"i1": "old"})
    assert await leases(herd) == {"g1": "new"}
    await herd.beat("g1", leases={"i1": "old"})
    assert await leases(herd) == {"g1": "old"}


async def test_grant_with_an_unread_message_is_kept(herd: Herd) -> None:
    """A ticket is granted, the message unread: the lease lives as long as the gateway names the ticket."""
    await herd.acquire("a", "t1")
    await herd.ready("i1", "a")
    for _ in range(3):
        beat = await herd.beat("g1", tickets={"a": ["t1"]})
    assert await leases(herd) == {"g1": "t1+"}
    assert beat.missing_tickets == ("t1",)
    assert beat.inbox_id == (await herd.inbox("g1"))[-1].id


@pytest.mark.parametrize("state", [InstanceState.STOPPING, InstanceState.STOP_FAILED])
async def test_lease_on_a_stopping_instance_is_lost(herd: Herd, state: InstanceState) -> None:
    """Name leases on a stopping instance and on one that is gone: both are lost, neither is booked."""
    await herd.start("i1", "a", state)
    beat = await herd.beat("g1", leases={"i1": "t1", "i9": "t9"})
    assert sorted(beat.lost_leases) == ["i1", "i9"]
    assert await leases(herd) == {}


async def test_lost_tickets_are_named(herd: Herd) -> None:
    """Redis forgets one of two tickets: the heartbeat names it and it is enrolled again with its arrival."""
    first = await herd.acquire("a", "t1")
    assert isinstance(first, Waiting)
    await herd.acquire("a", "t2")
    await herd.redis.hdel(herd.keys.tickets("a"), "t1")
    beat = await herd.beat("g1", tickets={"a": ["t1", "t2"]})
    assert (beat.missing_tickets, beat.inbox_id) == (("t1",), "0-0")
    await herd.acquire("a", "t1", first_arrival_ms=first.first_arrival_ms)
    assert (await herd.beat("g1", tickets={"a": ["t1", "t2"]})).missing_tickets == ()


async def test_emptied_redis_gets_leases_back_once_recovery_put_the_instances(herd: Herd) -> None:
    """Empty Redis under a lease: nothing is called lost until the herd is open, then the claim is there."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    await herd.redis.flushall()
    beat = await herd.beat("g1", leases={"i1": "t1"}, tickets={"b": ["t2"]})
    assert (beat.known_before, beat.herd_open, beat.lost_leases, beat.missing_tickets) == (
        False,
        False,
        (),
        (),
    )
    await herd.leader.lead(2, 10_000, {})
    await herd.start("i1", "a", InstanceState.RECOVERING)
    await herd.leader.open_herd({})
    await herd.leader.ready("i1", "a", {})
    await herd.beat("g1", leases={"i1": "t1"})
    assert await leases(herd) == {"g1": "t1"}


async def test_release_during_a_heartbeat_is_not_undone_by_it(
    herd: Herd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease is released after the heartbeat was made and before Redis runs it: it does not come back."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    made, go = asyncio.Event(), asyncio.Event()
    call = Scripts.call

    async def held_back(self: Scripts, name: str, keys: Any, argv: Any) -> Any:
        if name == "heartbeat":
            made.set()
            await go.wait()
        return await call(self, name, keys, argv)

    monkeypatch.setattr(Scripts, "call", held_back)
    beat = asyncio.create_task(herd.beat("g1", leases={"i1": "t1"}))
    await made.wait()
    assert await herd.gateway.release("i1", "g1", "t1", used=True)
    go.set()
    await beat
    assert await leases(herd) == {}


async def test_c165_all_of_a_silent_gateway_vanishes_in_one_sweep(herd: Herd) -> None:
    """A gateway dies with 20 waiting and leases on two instances: swept, what it held is free and told."""
    await herd.ready("i1", "a")
    await herd.ready("i2", "b")
    await herd.leader.publish("r2", {name: {} for name in "abcd"}, {})
    for model, ticket in [("a", "l1"), ("b", "l2")]:
        await herd.acquire(model, ticket, "g1")
    await herd.acquire("b", "l3", "g2")
    for n in range(20):
        await herd.acquire("cd"[n % 2], f"t{n}", "g1")
    await herd.acquire("d", "other", "g2")
    await herd.asked()
    await herd.leader.sweep("g1")
    facts = await herd.leader.observe()
    assert {model: [t.id for t in entry.tickets] for model, entry in facts.queue.items()} == {"d": ["other"]}
    assert {name: claims.leases for name, claims in facts.claims.items()} == {"i1": {}, "i2": {"g2": "l3"}}
    assert facts.gateways == {"g2": 1}
    assert sorted(await herd.asked()) == [("idle", "i1"), ("left", "c")]
    assert await herd.redis.exists(herd.keys.inbox("g1"), herd.keys.gateway("g1")) == 0
    assert await herd.events("swept") == [{"kind": "swept", "gateway": "g1"}]
    with pytest.raises(Unregistered):
        await herd.acquire("a", "t99", "g1")


async def test_gateway_that_leaves_takes_everything_along(herd: Herd) -> None:
    """A clean exit is a sweep of oneself."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    await herd.acquire("b", "t2")
    await herd.asked()
    await herd.gateway.leave("g1")
    assert (await herd.leader.observe()).claims == {"i1": Claims({}, (await _last_used(herd)))}
    assert sorted(await herd.asked()) == [("idle", "i1"), ("left", "b")]
    assert list(await herd.gateway.read_gateways()) == ["g2"]


async def _last_used(herd: Herd) -> int:
    return int((await herd.gateway.read_instances())["i1"]["last_used_ms"])


async def test_swept_gateway_that_lives_asserts_its_lease_again(herd: Herd) -> None:
    """A gateway was paused and swept: its next beat says so and books what it really holds."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    await herd.leader.sweep("g1")
    assert not (await herd.beat("g1", leases={"i1": "t1"})).known_before
    assert await leases(herd) == {"g1": "t1"}
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Claimed(1)
