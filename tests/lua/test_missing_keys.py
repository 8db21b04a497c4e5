"""Single keys that Redis lost, as a policy that evicts has it: what the scripts make of the rest."""

import pytest
from redis.asyncio import Redis
from small_herd import Herd

from llamastead.shared.store.errors import UnknownModel
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.records import Granted
from llamastead.shared.words import EndClass, InstanceState

MODELS = {"a": {"revision": "1", "path": "/a"}, "b": {"revision": "2"}}


@pytest.fixture
async def herd(redis: Redis, keys: Keys) -> Herd:
    made = await Herd(redis, keys).open("a", "b")
    await made.leader.publish("r1", MODELS, {"c": "a"})
    await made.ready("i1", "a")
    return made


async def missing(herd: Herd) -> list[str]:
    """Return what is missed of all that the herd has."""
    return await herd.leader.missing(has_models=True, has_aliases=True)


async def test_c177_each_key_that_a_leader_wrote_is_missed(herd: Herd) -> None:
    """Delete one after the other and put it back: each is named while it is gone, and nothing else is."""
    keys = herd.keys
    assert await missing(herd) == []
    for key in (
        *(keys.herd, keys.leadership, keys.models, keys.aliases),
        *(keys.model("a"), keys.model("b"), keys.instances, keys.instance("i1")),
    ):
        kept = await herd.redis.dump(key)
        await herd.redis.delete(key)
        assert await missing(herd) == [key.removeprefix(keys.prefix)]
        await herd.redis.restore(key, 0, kept)
    assert await missing(herd) == []


async def test_what_a_registry_has_none_of_is_not_missed(herd: Herd) -> None:
    """Publish a registry without models and aliases, its last instance still there."""
    await herd.leader.publish("r2", {}, {})
    assert await missing(herd) == ["models", "aliases"]
    assert await herd.leader.missing(has_models=False, has_aliases=False) == []


async def test_c177_what_lives_is_linked_again_with_a_model_that_was_lost(herd: Herd) -> None:
    """Lose a model's record while it is used: no half of it comes to be; written anew it has its instance."""
    assert isinstance(await herd.acquire("a", "t1"), Granted)
    await herd.redis.delete(herd.keys.model("a"))
    assert await herd.gateway.release("i1", "g1", "t1", used=True)
    assert not await herd.redis.exists(herd.keys.model("a"))
    assert "a" not in await herd.gateway.read_models()
    await herd.leader.put_instance("i1", {"state": InstanceState.RECOVERING}, "a", {})
    with pytest.raises(UnknownModel):
        await herd.acquire("a", "t2")
    assert await herd.gateway.read_unlisted(MODELS) == ["a"]
    await herd.leader.publish("r1", MODELS, {"c": "a"})
    await herd.leader.ready("i1", "a", {})
    assert isinstance(await herd.acquire("a", "t2"), Granted)
    assert (await herd.gateway.read_model("a"))["path"] == "/a"
    assert await missing(herd) == []


async def test_c177_an_instance_whose_record_was_lost_may_end(herd: Herd) -> None:
    """Lose an instance's record: giving a lease back makes no half of it; its end leaves nothing behind."""
    await herd.acquire("a", "t1")
    await herd.redis.delete(herd.keys.instance("i1"))
    assert await herd.gateway.release("i1", "g1", "t1", used=True)
    assert not await herd.redis.exists(herd.keys.instance("i1"))
    assert not await herd.leader.ended("i1", EndClass.LOST, None, "")
    assert await missing(herd) == ["instances", "instance:i1"]
    await herd.leader.publish("r1", MODELS, {"c": "a"})
    assert await missing(herd) == []
    assert (await herd.gateway.read_model("a"))["status"] == "unloaded"


async def test_c177_a_queue_that_was_lost_is_made_of_its_tickets(herd: Herd) -> None:
    """Lose the queue, not the tickets: the next heartbeat of who waits puts the model back in its place."""
    await herd.acquire("b", "t1")
    first = await herd.redis.zscore(herd.keys.queue, "b")
    await herd.redis.delete(herd.keys.queue)
    assert (await herd.beat("g1", tickets={"b": ["t1"]})).missing_tickets == ()
    assert await herd.redis.zscore(herd.keys.queue, "b") == first
