"""Conversations in Redis: one per name, a claim of their own when detached, an end that leaves nothing."""

import pytest
from redis.asyncio import Redis
from small_herd import Herd

from llamastead.shared.store.conversations import Before, ConversationStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.records import Claimed, Stopping
from llamastead.shared.words import ConversationState, EndClass

S = ConversationState


@pytest.fixture
async def herd(redis: Redis, keys: Keys) -> Herd:
    return await Herd(redis, keys).open("a", "b")


@pytest.fixture
def talks(herd: Herd) -> ConversationStore:
    return ConversationStore(herd.redis, herd.keys)


async def over(herd: Herd, gateway: str = "g1") -> list[str]:
    """Return the tickets of conversations that a gateway was told are over."""
    entries = await herd.redis.xrange(herd.keys.inbox(gateway))
    return [fields["ticket"] for _, fields in entries if fields["type"] == "conversation_over"]


async def test_a_detached_conversation_is_a_claim(herd: Herd, talks: ConversationStore) -> None:
    """Attach and detach, try to stop and to sleep: refused until it is concluded, which is told."""
    await herd.ready("i1", "a")
    assert await talks.converse("c", "t1", "g1", "a", "r1") == Before("", "")
    assert await talks.attach("c", "t1", "i1")
    assert await talks.attach("c", "t1", "i1")  # its answer was lost
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Claimed(1)
    assert await talks.detach("c", "t1", "i1", 60_000)
    found = await talks.read("c")
    assert found is not None
    assert (found.state, found.instance, found.gateway_alive) == (S.DETACHED, "i1", True)
    assert (await herd.leader.observe()).claims["i1"].leases == {"conversation:c": "t1"}
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Claimed(1)
    assert not await herd.leader.sleep("i1")
    assert await herd.leader.drain("i1")
    assert await herd.redis.exists(herd.keys.inbox("conversation:c")) == 0
    await herd.asked()
    assert await talks.conclude("c", S.DONE) == Before("detached", "i1")
    assert await herd.asked() == [("idle", "i1")]
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Stopping()
    assert 0 < await herd.redis.pttl(herd.keys.conversation("c")) <= 300_000


async def test_a_conversation_detached_before_it_was_attached_is_a_claim(
    herd: Herd, talks: ConversationStore
) -> None:
    """Detach one that stands as queued, since Redis was away when it got its instance: it holds that."""
    await herd.ready("i1", "a")
    await talks.converse("c", "t1", "g1", "a", "r1")
    assert await talks.detach("c", "t1", "i1", 60_000)
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Claimed(1)
    assert await talks.conclude("c", S.DONE) == Before("detached", "i1")
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Stopping()


async def test_a_heartbeat_and_a_sweep_leave_the_claim_alone(herd: Herd, talks: ConversationStore) -> None:
    """Detach, then have the gateway beat without naming it, and leave: the claim stays."""
    await herd.ready("i1", "a")
    await talks.converse("c", "t1", "g1", "a", "r1")
    await talks.attach("c", "t1", "i1")
    await talks.detach("c", "t1", "i1", 60_000)
    for beat in (2, 3, 4):
        await herd.gateway.heartbeat("g1", beat, {}, {}, {}, [])
    await herd.leader.sweep("g1")
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Claimed(1)
    found = await talks.read("c")
    assert found is not None
    assert not found.gateway_alive


async def test_c135_the_same_name_ends_the_older_one(herd: Herd, talks: ConversationStore) -> None:
    """Begin it anew while it waits, while it streams and while it is detached: told, named, given back."""
    await herd.ready("i1", "a")
    await talks.converse("c", "t1", "g1", "a", "r1")
    assert await talks.converse("c", "t2", "g2", "b", "r2") == Before("queued", "")
    assert await over(herd) == ["t1"]
    assert not await talks.attach("c", "t1", "i1")
    assert await talks.attach("c", "t2", "i1")
    assert await talks.converse("c", "t3", "g1", "a", "r3") == Before("streaming", "i1")
    assert not await talks.detach("c", "t2", "i1", 60_000)
    assert await talks.conclude("c", S.DONE, "t2") == Before("", "")
    await talks.attach("c", "t3", "i1")
    await talks.detach("c", "t3", "i1", 60_000)
    assert await talks.converse("c", "t4", "g1", "a", "r4") == Before("detached", "i1")
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Stopping()
    assert await over(herd, "g2") == []


async def test_c135_a_stop_is_told_once_and_final(herd: Herd, talks: ConversationStore) -> None:
    """Stop it while it waits, twice: told once; a grant that comes after that is refused."""
    await herd.ready("i1", "a")
    await talks.converse("c", "t1", "g1", "a", "r1")
    assert await talks.conclude("c", S.STOPPED, reason="stopped") == Before("queued", "")
    assert await talks.conclude("c", S.STOPPED, reason="stopped") == Before("stopped", "")
    assert await over(herd) == ["t1"]
    assert not await talks.attach("c", "t1", "i1")
    assert not await talks.detach("c", "t1", "i1", 60_000)
    assert await talks.conclude("c", S.DONE, "t1") == Before("stopped", "")
    found = await talks.read("c")
    assert found is not None
    assert (found.state, found.reason) == (S.STOPPED, "stopped")
    assert await talks.conclude("unknown", S.STOPPED) == Before("", "")
    assert await herd.redis.exists(herd.keys.conversation("unknown")) == 0


async def test_an_instance_that_ended_keeps_no_conversation(herd: Herd, talks: ConversationStore) -> None:
    """End the instance of a detached one: the record has no address any more, and detaching again fails."""
    await herd.ready("i1", "a")
    await talks.converse("c", "t1", "g1", "a", "r1")
    await talks.attach("c", "t1", "i1")
    await talks.detach("c", "t1", "i1", 60_000)
    await herd.leader.ended("i1", EndClass.CRASHED, 1, "")
    found = await talks.read("c")
    assert found is not None
    assert (found.state, found.address) == (S.DETACHED, "")
    assert not await talks.detach("c", "t1", "i1", 60_000)
    assert await talks.conclude("c", S.DONE) == Before("detached", "i1")


async def test_one_that_redis_forgot_is_answered_and_keeps_nothing(
    herd: Herd, talks: ConversationStore
) -> None:
    """Lose the record of one that waits: its grant is good, and neither a record nor a claim comes of it."""
    await herd.ready("i1", "a")
    await talks.converse("c", "t1", "g1", "a", "r1")
    await herd.redis.delete(herd.keys.conversation("c"))
    assert await talks.attach("c", "t1", "i1")
    assert await herd.redis.exists(herd.keys.conversation("c")) == 0
    assert not await talks.detach("c", "t1", "i1", 60_000)
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Stopping()


async def test_no_claim_is_left_on_an_instance_that_ended_before_its_answer(
    herd: Herd, talks: ConversationStore
) -> None:
    """Attach just after the instance's end: the answer may pass, no claim stands that nobody would end."""
    await herd.ready("i1", "a")
    await talks.converse("c", "t1", "g1", "a", "r1")
    await herd.leader.ended("i1", EndClass.LOST, None, "")
    assert await talks.attach("c", "t1", "i1", 11)
    assert not await herd.redis.exists(herd.keys.leases("i1"))
    found = await talks.read("c")
    assert found is not None
    assert (found.state, found.address, found.lead) == (S.STREAMING, "", 11)
    assert await talks.conclude("c", S.LOST, "t1") == Before("streaming", "i1")
