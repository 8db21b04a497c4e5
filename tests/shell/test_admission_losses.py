"""Admission where messages, the gateway's own record or Redis itself are lost for a while."""

from pathlib import Path
from typing import Any

import pytest
from gateway_kit import Desk, ScriptedLeader, gone, open_desk, settings_for, tickets, until
from redis.asyncio import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError
from valkey_server import start_valkey

from llamastead.gateway.catalog import Catalog
from llamastead.shared.errors import ApiError
from llamastead.shared.store.connect import connect
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.records import Messages


async def test_r12_a_dropped_grant_is_found_by_the_heartbeat(desk: Desk, leader: ScriptedLeader) -> None:
    """Drop the message that grants: after the next heartbeat the request is served all the same."""
    dropped: list[object] = []
    real, desk.admission.on_granted = desk.admission.on_granted, dropped.append  # type: ignore[method-assign]
    request = desk.ask("a")
    await tickets(leader, "a", 1)
    await leader.load("i1", "a")
    await until(lambda: dropped, "the message to be dropped")
    desk.admission.on_granted = real  # type: ignore[method-assign]
    assert not request.done()
    await desk.beat()
    claim = await request
    assert (claim.instance, claim.path) == ("i1", "cold")
    claim.close()
    await gone(leader, "i1")


async def test_r12_a_ticket_that_redis_lost_is_enrolled_again_with_its_first_arrival(
    desk: Desk, leader: ScriptedLeader
) -> None:
    """Delete the queue behind the gateway's back: the next heartbeat enrols the ticket in its old place."""
    request = desk.ask("a")
    ticket = (await tickets(leader, "a", 1))[0]
    first = await leader.redis.zscore(leader.keys.queue, "a")
    await leader.redis.delete(leader.keys.queue, leader.keys.tickets("a"))
    await desk.beat()
    assert await tickets(leader, "a", 1) == [ticket]
    assert await leader.redis.zscore(leader.keys.queue, "a") == first
    await leader.load("i1", "a")
    (await request).close()


async def test_a_swept_gateway_registers_again_and_serves(desk: Desk, leader: ScriptedLeader) -> None:
    """Sweep the gateway: the next cold request finds it unregistered, registers it and is enrolled."""
    await leader.store.sweep("g1")
    request = desk.ask("a")
    await tickets(leader, "a", 1)
    await leader.load("i1", "a")
    (await request).close()


async def test_a_lease_that_redis_lost_is_booked_again_or_ends(desk: Desk, leader: ScriptedLeader) -> None:
    """Delete the lease of a live instance, then the instance: booked again first, sent nobody new then."""
    await leader.load("i1", "a")
    claim = await desk.ask("a")
    await leader.redis.delete(leader.keys.leases("i1"))
    await desk.beat()
    assert await leader.leases("i1") != {}
    await leader.redis.delete(leader.keys.instance("i1"))
    await desk.beat()
    assert desk.admission.leases.warm("a") is None
    assert claim.instance == "i1"
    claim.close()


async def test_a_claim_whose_answer_is_under_way_outlives_heartbeats(
    desk: Desk, leader: ScriptedLeader
) -> None:
    """Hold the answer to a booked claim, and that to a ticket, over three heartbeats: both stand in Redis."""
    await leader.load("i1", "a")
    desk.store.after_acquire.clear()
    warm, cold = desk.ask("a"), desk.ask("b")
    await until(lambda: leader.leases("i1"), "the claim")
    booked, queued = await leader.leases("i1"), await tickets(leader, "b", 1)
    for _ in range(3):
        await desk.beat()
    left = await leader.leases("i1"), await leader.waiting("b")
    desk.store.after_acquire.set()
    assert left == (booked, queued)
    (await warm).close()
    await leader.load("i2", "b")
    (await cold).close()


async def test_a_copy_read_while_redis_lost_its_data_is_not_taken(
    leader: ScriptedLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty Redis and open another herd in the middle of a reading: what was known stays known."""
    store = GatewayStore(leader.redis, leader.keys)
    catalog = Catalog(store, 3600)
    await catalog.read_now()
    before = dict(catalog.models)
    assert set(before) == {"a", "b"}
    read = store.read_aliases

    async def emptied() -> dict[str, str]:
        monkeypatch.undo()
        await leader.redis.flushdb()
        await leader.open()
        return await read()

    monkeypatch.setattr(store, "read_aliases", emptied)
    await catalog.read_now()
    assert catalog.models == before
    await catalog.read_now()
    assert catalog.models == {}


async def test_without_a_herd_new_requests_wait_a_little_then_503(
    redis: Redis, keys: Keys, tmp_path: Path
) -> None:
    """Ask before any supervisor is there: one is refused in time, one is served that still waits."""
    # Enough for one answer of Redis, also on a busy machine: it is what the refusal tells of.
    async with open_desk(redis, keys, settings_for(tmp_path, admission_timeout=3.0)) as desk:
        with pytest.raises(ApiError) as refused:
            await desk.ask("a")
        assert (refused.value.status, refused.value.retry_after) == (503, 5)
        assert refused.value.message == "no supervisor has opened the herd yet"
    async with open_desk(redis, keys, settings_for(tmp_path), "g2") as desk:
        request = desk.ask("a")
        await until(lambda: desk.store.calls, "the first try")
        leader = ScriptedLeader(redis, keys)
        await leader.open("a")
        await tickets(leader, "a", 1)
        await leader.load("i1", "a")
        (await request).close()


async def test_c180_without_redis_leases_go_on_new_requests_get_503_and_waiting_ones_survive(
    short_tmp: Path, keys: Keys, tmp_path: Path
) -> None:
    """Kill Redis under a claim and a waiting request, lose all its data, bring it back: as the title says."""
    server = start_valkey(short_tmp, "--save", "")
    redis = connect(f"unix://{short_tmp}/valkey.sock")
    try:
        leader = ScriptedLeader(redis, keys)
        await leader.open("a", "b", "c")
        # Enough for one try to connect, also on a busy machine: it is what the refusal tells of.
        async with open_desk(redis, keys, settings_for(tmp_path, admission_timeout=3.0)) as desk:
            await leader.load("i1", "a")
            claim = await desk.ask("a")
            waits = desk.ask("b")
            ticket = (await tickets(leader, "b", 1))[0]
            server.kill()
            server.wait()
            warm = await desk.ask("a")
            assert warm.path == "hot"
            with pytest.raises(ApiError) as refused:
                await desk.ask("c")
            assert (refused.value.status, refused.value.message) == (503, "Redis is not reachable")
            assert refused.value.retry_after == 5
            assert not waits.done()
            server = start_valkey(short_tmp, "--save", "")
            await leader.open("a", "b", "c")
            await desk.beat()
            assert await tickets(leader, "b", 1) == [ticket]
            await leader.load("i2", "b")
            (await waits).close()
            claim.close()
            warm.close()
        assert desk.admission.leases.in_flight() == 0
    finally:
        await redis.aclose()
        server.kill()
        server.wait()


async def test_c169_a_reader_whose_reads_time_out_goes_on_and_tells_each_event_once(
    redis: Redis, redis_url: str, keys: Keys, leader: ScriptedLeader, tmp_path: Path
) -> None:
    """Read an idle stream for 2 s at a time over a socket that waits 0.7 s: every read fails, the loop lives,
    and of what is written in between each event comes once and in order.
    """
    client = connect(redis_url, socket_timeout=0.7)
    try:
        # Only the reads go over it: on a busy machine other calls may take as long.
        async with open_desk(redis, keys, settings_for(tmp_path)) as desk:
            real, failed = GatewayStore(client, keys).read_wait, 0

            async def counted(*args: Any) -> Messages:
                nonlocal failed
                try:
                    return await real(*args)
                except RedisTimeoutError:
                    failed += 1
                    raise

            desk.store.read_wait = counted  # type: ignore[method-assign]
            for number in range(3):
                until_then = failed + 2
                await until(lambda enough=until_then: failed >= enough, "reads that time out")
                await leader.store.emit("test", {"number": number})
            request = desk.ask("a")
            await leader.load("i1", "a")
            (await request).close()

            def told() -> list[str]:
                return [event["number"] for event in desk.events if event["kind"] == "test"]

            await until(lambda: len(told()) >= 3, "the events")
            assert told() == ["0", "1", "2"]
    finally:
        await client.aclose()
