"""Admission: tickets, grants, leases and what becomes of them when something goes wrong in between."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
from gateway_kit import SECRET, Desk, ScriptedLeader, gone, open_desk, settings_for, tickets, until
from redis.asyncio import Redis
from waiting import PATIENCE_S

from llamastead.gateway.seams import NoLoad
from llamastead.shared.errors import ApiError
from llamastead.shared.secret import instance_key
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.records import Claimed
from llamastead.shared.words import EndClass, UseKind


async def test_c84_who_may_not_load_is_refused_by_redis_not_by_a_copy(
    desk: Desk, leader: ScriptedLeader
) -> None:
    """Ask for a model that has just gone, as a gateway does that has not heard of it: the request's own
    refusal, no ticket, and nothing is asked of the supervisor; who may load waits all the same.
    """
    refusal = ApiError(503, "model is not loaded")
    with pytest.raises(ApiError) as refused:
        await desk.admission.acquire("a", UseKind.INFERENCE, "r", lambda: NoLoad(refusal, may_wake=True))
    assert refused.value is refusal
    assert await leader.waiting("a") == []
    assert await leader.asked() == []
    desk.ask("a")
    await tickets(leader, "a", 1)
    await leader.load("i1", "a")
    claim = await desk.requests[0]
    assert claim.instance == "i1"
    claim.close()


async def test_concurrent_requests_for_a_cold_model_share_one_load_and_one_lease(
    desk: Desk, leader: ScriptedLeader
) -> None:
    """Ask five times for a cold model, load it once: all five are let in on one lease, none asked at once."""
    requests = [desk.ask("a") for _ in range(5)]
    waiting = await tickets(leader, "a", 5)
    assert await leader.load("i1", "a") == 5
    claims = await asyncio.gather(*requests)
    assert {claim.instance for claim in claims} == {"i1"}
    assert {claim.path for claim in claims} == {"cold"}
    assert {claim.load_ms for claim in claims} == {7}
    assert all(claim.key == instance_key(SECRET, "i1", "n-i1") for claim in claims)
    assert await leader.leases("i1") == {"g1": waiting[0] + "+"}
    assert desk.store.most_at_once == 1
    assert desk.admission.leases.in_flight() == 5
    for claim in claims:
        claim.close()
        claim.close()
    assert desk.admission.leases.in_flight() == 0
    await gone(leader, "i1")


async def test_r4_the_load_is_claimed_before_anybody_can_see_it_ready(
    desk: Desk, leader: ScriptedLeader
) -> None:
    """Make a model ready for a waiting request and try to stop it at once: the stop is refused."""
    request = desk.ask("a")
    await tickets(leader, "a", 1)
    await leader.load("i1", "a")
    assert await leader.store.stop("i1", EndClass.EVICTED) == Claimed(1)
    (await request).close()


async def test_warm_requests_ask_redis_nothing_and_do_not_suspend(desk: Desk, leader: ScriptedLeader) -> None:
    """Hold a claim and ask a hundred times more: the coroutine ends in its first step, without any call."""
    await leader.load("i1", "a")
    first = await desk.ask("a")
    calls = list(desk.store.calls)
    for _ in range(100):
        coroutine = desk.admission.acquire("a", UseKind.INFERENCE, "r")
        with pytest.raises(StopIteration) as done:
            coroutine.send(None)
        done.value.value.close()
    assert desk.store.calls == calls
    first.close()


async def test_a_client_that_returns_within_the_linger_time_finds_the_lease(
    desk: Desk, leader: ScriptedLeader
) -> None:
    """Close the only claim and ask again: no call to Redis; then let the linger time pass: released, used."""
    await leader.load("i1", "a")
    loaded = await leader.redis.hget(leader.keys.instance("i1"), "last_used_ms")
    (await desk.ask("a")).close()
    claim = await desk.ask("a")
    assert (desk.store.calls, claim.path) == (["acquire"], "hot")
    closed = asyncio.get_running_loop().time()
    claim.close()
    await gone(leader, "i1")
    assert asyncio.get_running_loop().time() - closed >= 0.05
    assert desk.store.calls == ["acquire", "release"]
    assert await leader.redis.hget(leader.keys.instance("i1"), "last_used_ms") >= loaded
    assert ("idle", "i1") in await leader.asked()


async def test_a_read_keeps_the_instance_but_does_not_linger_nor_count_as_use(
    desk: Desk, leader: ScriptedLeader
) -> None:
    """Claim for a GET and close: released in the same step, the time of last use stands."""
    await leader.load("i1", "a")
    before = await leader.redis.hget(leader.keys.instance("i1"), "last_used_ms")
    claim = await desk.ask("a", UseKind.READ)
    assert await leader.leases("i1") != {}
    claim.close()
    assert desk.admission.leases.ids() == {}
    await gone(leader, "i1")
    assert await leader.redis.hget(leader.keys.instance("i1"), "last_used_ms") == before


async def test_a_cancelled_request_gives_its_ticket_back(desk: Desk, leader: ScriptedLeader) -> None:
    """Cancel one of two waiting requests, then the other: the queue shrinks, the supervisor is told once."""
    first, second = desk.ask("a"), desk.ask("a")
    await tickets(leader, "a", 2)
    await leader.asked()
    first.cancel()
    await tickets(leader, "a", 1)
    assert await leader.asked() == []
    second.cancel()
    await tickets(leader, "a", 0)
    assert await until(leader.asked, "the supervisor to be told") == [("left", "a")]
    assert desk.admission.waiting() == 0


async def test_a_request_cancelled_while_redis_answers_leaves_nothing(
    desk: Desk, leader: ScriptedLeader
) -> None:
    """Cancel between the call and its answer, once for a ticket and once for a lease: both are given back."""
    for loaded in (False, True):
        if loaded:
            await leader.load("i1", "a")
        desk.store.after_acquire.clear()
        request = desk.ask("a")
        reached = partial(leader.leases, "i1") if loaded else partial(leader.waiting, "a")
        await until(reached, "the call to reach Redis")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        desk.store.after_acquire.set()
        await tickets(leader, "a", 0)
        await gone(leader, "i1")
    assert desk.admission.leases.in_flight() == 0


async def test_a_request_cancelled_in_the_instant_of_its_grant_leaves_nothing(
    desk: Desk, leader: ScriptedLeader
) -> None:
    """Grant and cancel in one step of the loop: the claim is closed, the lease released."""
    request = desk.ask("a")
    await tickets(leader, "a", 1)
    real = desk.admission.on_granted

    def grant_and_cancel(message: dict[str, str]) -> None:
        real(message)
        request.cancel()

    desk.admission.on_granted = grant_and_cancel  # type: ignore[method-assign, assignment]
    await leader.load("i1", "a")
    with pytest.raises(asyncio.CancelledError):
        await request
    await gone(leader, "i1")


async def test_a_grant_read_twice_counts_once(desk: Desk, leader: ScriptedLeader) -> None:
    """Deliver the granting message twice: one claim, one lease, and it is released."""
    request = desk.ask("a")
    await tickets(leader, "a", 1)
    await leader.load("i1", "a")
    claim = await request
    message = (await desk.store.read_wait("g1", "0-0", "999999999999999-0", 0)).inbox[-1]
    desk.admission.on_granted(message.fields)
    assert desk.admission.leases.in_flight() == 1
    claim.close()
    await gone(leader, "i1")


async def test_two_grants_that_cross_are_both_given_back(desk: Desk, leader: ScriptedLeader) -> None:
    """Hold a second ticket's call while a grant for the first is read: no lease stays behind."""
    first = desk.ask("a")
    await tickets(leader, "a", 1)
    desk.store.before_acquire.clear()
    second = desk.ask("a")
    await until(lambda: desk.store.asking["a"], "the second call")
    await leader.load("i1", "a")
    one = await first
    desk.store.before_acquire.set()
    two = await second
    assert {one.instance, two.instance} == {"i1"}
    one.close()
    two.close()
    await gone(leader, "i1")
    assert desk.admission.leases.ids() == {}


async def test_a_failed_load_refuses_all_that_wait_once(desk: Desk, leader: ScriptedLeader) -> None:
    """Fail a model with two waiting requests: each gets the whole error, nothing stays in the queue."""
    requests = [desk.ask("a"), desk.ask("a")]
    await tickets(leader, "a", 2)
    error = {"status": 500, "message": "no such file", "fields": {"reason": "x"}, "retry_after": None}
    assert await leader.store.fail("a", error) == 2
    for request in requests:
        with pytest.raises(ApiError) as refused:
            await request
        assert refused.value == ApiError(500, "no such file", {"reason": "x"})
    assert await leader.waiting("a") == []
    assert desk.admission.waiting() == 0


async def test_draining_lets_no_newcomer_in_and_cuts_nobody(desk: Desk, leader: ScriptedLeader) -> None:
    """Drain an instance in use: a newcomer waits, the old claim stands; undrained, the newcomer joins it."""
    await leader.load("i1", "a")
    old = await desk.ask("a")
    await leader.store.drain("i1")
    await until(lambda: desk.admission.leases.warm("a") is None, "the drain to be heard of")
    newcomer = desk.ask("a")
    await tickets(leader, "a", 1)
    assert await leader.store.undrain("i1") == 1
    claim = await newcomer
    assert claim.instance == old.instance == "i1"
    old.close()
    claim.close()
    await gone(leader, "i1")


async def test_an_idle_lease_on_a_draining_instance_does_not_linger(
    redis: Redis, keys: Keys, leader: ScriptedLeader, tmp_path: Path
) -> None:
    """Let a lease linger for an hour and drain: it is given back at once."""
    async with open_desk(redis, keys, settings_for(tmp_path, linger=3600)) as desk:
        await leader.load("i1", "a")
        (await desk.ask("a")).close()
        assert await leader.leases("i1") != {}
        await leader.store.drain("i1")
        await gone(leader, "i1")


async def test_a_lease_does_not_linger_on_an_instance_whose_room_is_wanted(
    redis: Redis, keys: Keys, leader: ScriptedLeader, tmp_path: Path
) -> None:
    """Want the room of an instance in use, that lingers, then of one that nobody holds: the lease is given
    back with its last request, at once, and nothing happens.
    """
    async with open_desk(redis, keys, settings_for(tmp_path, linger=3600)) as desk:
        await leader.load("i1", "a")
        claim = await desk.ask("a")
        await leader.store.want("i1")
        await until(lambda: desk.admission.leases.warm("a")._linger == 0, "the word to arrive")
        assert await leader.leases("i1") != {}
        claim.close()
        await gone(leader, "i1")
        (await desk.ask("a")).close()
        assert await leader.leases("i1") != {}
        await leader.store.want("i1")
        await gone(leader, "i1")
        await leader.store.want("i1")
        assert (await desk.ask("a")).instance == "i1"


async def test_who_was_refused_is_served_by_the_next_instance(desk: Desk, leader: ScriptedLeader) -> None:
    """Refuse at an address: the request waits instead of getting the same instance, and gets the next one."""
    await leader.load("i1", "a")
    claim = await desk.ask("a")
    moved = asyncio.ensure_future(desk.admission.refused(claim))
    await tickets(leader, "a", 1)
    await gone(leader, "i1")
    await leader.end("i1")
    await leader.load("i2", "a")
    other = await moved
    assert other.instance == "i2"
    other.close()
    assert desk.admission.leases.in_flight() == 0


async def test_a_refusal_that_was_a_hiccup_does_not_wait_for_ever(
    redis: Redis, keys: Keys, leader: ScriptedLeader, tmp_path: Path
) -> None:
    """Refuse at an instance that stays ready: once the facts are due to be read again it is tried again."""
    async with open_desk(redis, keys, settings_for(tmp_path, reread=0.01)) as desk:
        await leader.load("i1", "a")
        moved = asyncio.ensure_future(desk.admission.refused(await desk.ask("a")))
        await tickets(leader, "a", 1)

        async def served() -> bool:
            await desk.beat()
            return moved.done()

        await until(served, "another try")
        (await moved).close()
        await gone(leader, "i1")


async def test_a_full_queue_refuses_with_429(desk: Desk, leader: ScriptedLeader) -> None:
    """Let one request wait per model: the second is refused with the limit's name and when to try again."""
    await leader.store.open_herd({"queue_limit": 1})
    first = desk.ask("a")
    await tickets(leader, "a", 1)
    with pytest.raises(ApiError) as refused:
        await desk.ask("a")
    assert (refused.value.status, refused.value.retry_after) == (429, 5)
    assert refused.value.fields == {"reason": "queue_full", "limit_name": "queue_limit", "limit": 1}
    first.cancel()
    await tickets(leader, "a", 0)


async def test_a_model_that_redis_does_not_know_is_refused(desk: Desk, leader: ScriptedLeader) -> None:
    """Ask for a model that the local copy had and Redis has no more: 400 as llama-server words it."""
    with pytest.raises(ApiError) as refused:
        await desk.ask("zebra")
    assert (refused.value.status, refused.value.message) == (400, "model 'zebra' not found")


async def test_a_request_waits_no_longer_than_the_queue_timeout(
    redis: Redis, keys: Keys, leader: ScriptedLeader, tmp_path: Path
) -> None:
    """Let nobody load the model or end the wait: a look later 503 with when to try again, no ticket left."""
    settings = settings_for(tmp_path, queue_timeout=0.05, reread=0.1)
    async with open_desk(redis, keys, settings) as desk:
        with pytest.raises(ApiError) as refused:
            await desk.ask("a")
        assert (refused.value.status, refused.value.retry_after) == (503, 5)
        assert refused.value.fields["reason"] == "queue_timeout"
        await tickets(leader, "a", 0)


async def test_an_order_that_takes_long_is_awaited_while_the_supervisor_is_at_work_on_it(
    redis: Redis, keys: Keys, leader: ScriptedLeader, tmp_path: Path
) -> None:
    """Say again and again that work is under way: the late answer counts; silence is 503."""
    # So long that a busy machine does not stop us for it between two of these words.
    settings = settings_for(tmp_path, admission_timeout=3.0)
    async with open_desk(redis, keys, settings) as desk, asyncio.timeout(PATIENCE_S):
        began = asyncio.get_running_loop().time()
        order = asyncio.create_task(desk.commands.ask("reload", {}))
        (command,) = [taken.id for taken in await leader.store.read_commands(10_000)]
        while asyncio.get_running_loop().time() < began + 2 * settings.admission_timeout:
            await leader.store.at_work({command: "g1", "1-1": "g1"})
            done, _ = await asyncio.wait({order}, timeout=0.1)
            assert not done
        await leader.store.answer(command, "g1", {"revision": "r2"})
        assert await order == {"revision": "r2"}
        with pytest.raises(ApiError) as silence:
            await desk.commands.ask("reload", {}, 0.1)
        assert silence.value.status == 503
        assert desk.commands.open_questions == 0
