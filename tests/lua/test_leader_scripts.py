"""One leader at a time: its lock, its fence, its commands, its registry."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis
from small_herd import TTL_MS, Herd

from llamastead.shared.store.errors import StaleLeader, UnknownModel
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.words import EndClass


@pytest.fixture
async def herd(redis: Redis, keys: Keys) -> Herd:
    return await Herd(redis, keys).open("a", "b")


def other(herd: Herd, token: str = "token-2") -> LeaderStore:
    return LeaderStore(herd.redis, herd.keys, token)


CHANGES: dict[str, Callable[[LeaderStore], Awaitable[object]]] = {
    "renew": lambda store: store.renew(10_000),
    "open_herd": lambda store: store.open_herd({"x": 1}),
    "publish": lambda store: store.publish("r9", {}, {}),
    "put_herd": lambda store: store.put_herd({}),
    "put_model": lambda store: store.put_model("a", {"x": 1}),
    "count": lambda store: store.count("a", "i1", {"predicted_tokens": 1}, {}),
    "put_download": lambda store: store.put_download("org/m", {"state": "planning"}, {"kind": "download"}),
    "drop_download": lambda store: store.drop_download("org/m", {"kind": "download"}),
    "put_devices": lambda store: store.put_devices("h", {"gpu0": {"total": 1}}, {"gpu0": {"a": 1}}),
    "observe": lambda store: store.observe(),
    "missing": lambda store: store.missing(has_models=True, has_aliases=True),
    "put_instance": lambda store: store.put_instance("i9", {"state": "starting"}, "a", {}),
    "ready": lambda store: store.ready("i1", "a", {}),
    "wake": lambda store: store.wake("i1", "a"),
    "drain": lambda store: store.drain("i1"),
    "want": lambda store: store.want("i1"),
    "undrain": lambda store: store.undrain("i1"),
    "stop": lambda store: store.stop("i1", EndClass.STOPPED),
    "sleep": lambda store: store.sleep("i1"),
    "ended": lambda store: store.ended("i1", EndClass.LOST, None, ""),
    "fail": lambda store: store.fail("b", {}),
    "answer": lambda store: store.answer("1-1", "g1", {}),
    "at_work": lambda store: store.at_work({"1-1": "g1"}),
    "done": lambda store: store.done(["1-1"]),
    "sweep": lambda store: store.sweep("g1"),
    "emit": lambda store: store.emit("x", {}),
    "read_commands": lambda store: store.read_commands(0),
}


@pytest.mark.parametrize("verb", CHANGES)
async def test_r11_a_stale_leader_changes_nothing(herd: Herd, verb: str) -> None:
    """Run every verb of the leader with an old token: it is refused and the whole of Redis is as before."""
    await herd.ready("i1", "a")
    await herd.acquire("b", "t1")
    names = sorted(await herd.redis.keys("*"))
    before = [await herd.redis.dump(name) for name in names if name != herd.keys.leader]
    with pytest.raises(StaleLeader):
        await CHANGES[verb](other(herd))
    assert sorted(await herd.redis.keys("*")) == names
    assert [await herd.redis.dump(name) for name in names if name != herd.keys.leader] == before


@pytest.mark.parametrize("verb", CHANGES)
async def test_r11_a_leader_whose_time_is_over_changes_nothing(herd: Herd, verb: str) -> None:
    """Run every verb with the last leader's own token while nobody leads: refused, all is as before."""
    await herd.ready("i1", "a")
    await herd.acquire("b", "t1")
    await herd.redis.delete(herd.keys.leader)
    names = sorted(await herd.redis.keys("*"))
    before = [await herd.redis.dump(name) for name in names]
    with pytest.raises(StaleLeader):
        await CHANGES[verb](herd.leader)
    assert sorted(await herd.redis.keys("*")) == names
    assert [await herd.redis.dump(name) for name in names] == before


def test_every_verb_of_the_leader_is_tried() -> None:
    """Compare the table above with the methods of the store."""
    verbs = {name for name in vars(LeaderStore) if not name.startswith("_")}
    assert verbs == {*CHANGES, "lead", "resign", "read_number"}


async def test_c174_the_lock_never_exists_without_an_end(herd: Herd) -> None:
    """Look at the lock's life after taking and renewing it: it always ends by itself."""
    assert 0 < await herd.redis.pttl(herd.keys.leader) <= TTL_MS
    await herd.leader.renew(2 * TTL_MS)
    assert TTL_MS < await herd.redis.pttl(herd.keys.leader) <= 2 * TTL_MS


async def test_c175_a_new_leader_needs_no_manual_step(herd: Herd) -> None:
    """A leader dies without a word: a second one gets in when the lock's life is over, and not before."""
    second = other(herd)
    assert not await second.lead(2, 10_000, {})
    await herd.leader.renew(1)
    while not await second.lead(await second.read_number() + 1, 10_000, {"host": "there"}):  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert await second.read_number() == 2
    with pytest.raises(StaleLeader):
        await herd.leader.renew(10_000)
    assert not await herd.leader.resign()
    assert (await herd.redis.hgetall(herd.keys.leadership))["host"] == "there"


async def test_c175_of_two_at_the_same_time_one_leads(herd: Herd) -> None:
    """Ten candidates try at once, over and over: never two get in, and each number is given once."""
    await herd.leader.resign()
    numbers = []
    for attempt in range(5):
        stores = [other(herd, f"{attempt}-{n}") for n in range(10)]
        number = await herd.leader.read_number() + 1
        won = await asyncio.gather(*(store.lead(number, 10_000, {}) for store in stores))
        assert won.count(True) == 1
        numbers.append(number)
        await stores[won.index(True)].resign()
    assert numbers == sorted(set(numbers))


async def test_a_number_that_was_used_is_refused(herd: Herd) -> None:
    """The lock is free but the number is not above the last one: read it again first."""
    await herd.leader.resign()
    assert not await other(herd).lead(1, 10_000, {})
    assert await herd.redis.exists(herd.keys.leader) == 0


async def test_incarnation_is_kept_while_redis_keeps_its_data(herd: Herd) -> None:
    """Open the herd twice, then in an emptied Redis: the same, then another."""
    first = await herd.leader.open_herd({})
    assert await herd.leader.open_herd({"models_max": 4}) == first
    assert (await herd.gateway.read_herd())["models_max"] == "4"
    await herd.redis.flushall()
    await herd.leader.lead(1, 10_000, {})
    assert await herd.leader.open_herd({}) != first


async def test_publish_changes_the_registry_in_one_step(herd: Herd) -> None:
    """Publish with one model gone, one new, and aliases: order, states and events are as told."""
    await herd.leader.put_model("b", {"architecture": "llama"}, {"kind": "metadata", "model": "b"})
    await herd.leader.publish("r2", {"c": {"source": "cache"}, "b": {"hidden": "1"}}, {"see": "c"})
    models = await herd.gateway.read_models()
    assert list(models) == ["c", "b"]
    assert {**models["b"], "source": ""} == {
        "name": "b",
        "order": "2",
        "source": "",
        "hidden": "1",
        "architecture": "llama",
        "instance": "",
        "state": "stopped",
        "status": "unloaded",
    }
    assert await herd.gateway.read_aliases() == {"see": "c"}
    with pytest.raises(UnknownModel):
        await herd.acquire("a", "t1")
    with pytest.raises(UnknownModel):
        await herd.gateway.read_model("a")
    with pytest.raises(UnknownModel):
        await herd.leader.put_model("a", {"x": 1})
    assert [event["revision"] for event in await herd.events("registry")] == ["r1", "r2"]
    assert (await herd.gateway.read_herd())["registry_revision"] == "r2"


async def test_publish_leaves_models_without_fields_as_they_are_and_tells_what_changed(herd: Herd) -> None:
    """Publish one model anew beside one that stays: the event has both revisions and the changes."""
    await herd.leader.publish("r2", {"a": {"source": "cache"}, "b": {"source": "preset"}}, {})
    await herd.leader.publish("r3", {"a": None, "b": {"source": "cache"}}, {}, {"changed": {"b": ["files"]}})
    models = await herd.gateway.read_models()
    assert [model["source"] for model in models.values()] == ["cache", "cache"]
    event = (await herd.events("registry"))[-1]
    assert (event["previous"], event["revision"]) == ("r2", "r3")
    assert event["changes"] == '{"changed": {"b": ["files"]}}'


async def test_facts_of_the_herd_are_written_only_while_it_is_open(redis: Redis, keys: Keys) -> None:
    """Write one before and after the herd is opened: before, it stays unknown."""
    herd = Herd(redis, keys)
    await herd.leader.lead(1, 10_000, {})
    await herd.leader.put_herd({"registry_error": "x"})
    assert await redis.exists(keys.herd) == 0
    await herd.leader.open_herd({})
    await herd.leader.put_herd({"registry_error": "x"})
    assert (await herd.gateway.read_herd())["registry_error"] == "x"


async def test_publish_before_the_herd_is_open_does_not_open_it(redis: Redis, keys: Keys) -> None:
    """The registry is there before recovery has ended: gateways still hear NO_HERD."""
    herd = Herd(redis, keys)
    await herd.leader.lead(1, 10_000, {})
    await herd.leader.publish("r1", {"a": {}}, {})
    assert not (await herd.beat("g1")).herd_open


async def test_removed_model_with_an_instance_goes_when_that_ends(herd: Herd) -> None:
    """Take a loaded model out of the registry: no more admissions, and its end removes it."""
    await herd.ready("i1", "a")
    await herd.leader.publish("r2", {"b": {}}, {})
    with pytest.raises(UnknownModel):
        await herd.acquire("a", "t1")
    await herd.leader.publish("r3", {"a": {}, "b": {}}, {})
    await herd.acquire("a", "t1")
    await herd.gateway.release("i1", "g1", "t1", used=True)
    await herd.leader.publish("r4", {"b": {}}, {})
    await herd.leader.ended("i1", EndClass.STOPPED, 0, "")
    assert await herd.redis.exists(herd.keys.model("a")) == 0


async def test_adopted_instance_of_a_model_that_is_gone_admits_nobody(herd: Herd) -> None:
    """Recovery puts an instance whose model is not in the registry: it can't be claimed."""
    await herd.ready("i1", "gone")
    with pytest.raises(UnknownModel):
        await herd.acquire("gone", "t1")


async def test_state_changes_show_in_model_and_events(herd: Herd) -> None:
    """Walk an instance through its states: the model and the event name each, with the words of the wire."""
    await herd.ready("i1", "a")
    await herd.leader.sleep("i1")
    await herd.leader.wake("i1", "a")
    await herd.leader.ready("i1", "a", {"load_ms": 7}, {"meta": "{}"})
    await herd.leader.drain("i1")
    await herd.leader.stop("i1", EndClass.IDLE)
    await herd.leader.ended("i1", EndClass.IDLE, 0, "idle")
    seen = [(event["state"], event["status"]) for event in await herd.events("status")]
    assert seen == [
        ("loading", "loading"),
        ("ready", "loaded"),
        ("sleeping", "sleeping"),
        ("waking", "loading"),
        ("ready", "loaded"),
        ("draining", "loaded"),
        ("stopping", "loaded"),
        ("stopped", "unloaded"),
    ]
    model = await herd.gateway.read_model("a")
    assert (model["loads"], model["meta"], model["end_class"]) == ("1", "{}", "idle")


async def test_command_is_answered_once_into_the_inbox(herd: Herd) -> None:
    """Submit, read, answer twice: one message, and the stream of commands is empty."""
    sent = await herd.gateway.submit("load", "g1", 5000, {"model": "a"})
    (command,) = await herd.leader.read_commands(0)
    assert (command.id, command.verb, command.gateway, command.expired) == (sent, "load", "g1", False)
    assert command.fields == {"model": "a"}
    assert await herd.leader.read_commands(0) == []
    assert await herd.leader.answer(sent, "g1", {"ok": True})
    assert not await herd.leader.answer(sent, "g1", {"ok": False})
    (message,) = await herd.inbox("g1")
    assert json.loads(message.fields["payload"]) == {"ok": True}
    assert (message.fields["type"], message.fields["command"]) == ("answer", sent)
    assert await herd.redis.xlen(herd.keys.commands) == 0


async def test_c178_unfinished_commands_go_to_the_next_leader_exactly_once(herd: Herd) -> None:
    """Take three commands, finish one, die: the next leader gets the rest, late ones marked."""
    ids = [await herd.gateway.submit("load", "g1", 0 if n == 1 else 60_000, {"n": str(n)}) for n in range(3)]
    assert [command.id for command in await herd.leader.read_commands(0)] == ids
    await herd.leader.answer(ids[0], "g1", {})
    await herd.leader.resign()
    ids.append(await herd.gateway.submit("load", "g1", 60_000, {}))
    second = other(herd)
    assert await second.lead(2, 10_000, {})
    taken = await second.read_commands(0)
    assert [(command.id, command.expired) for command in taken] == [
        (ids[1], True),
        (ids[2], False),
        (ids[3], False),
    ]
    assert await second.read_commands(0) == []
    with pytest.raises(StaleLeader):
        await herd.leader.read_commands(0)


async def test_reading_commands_waits_and_wakes(herd: Herd) -> None:
    """Block on an empty stream: nothing after the time, and a command that comes meanwhile at once."""
    assert await herd.leader.read_commands(10) == []
    reading = asyncio.create_task(herd.leader.read_commands(4000))
    while (await herd.redis.info("clients"))["blocked_clients"] == 0:  # noqa: ASYNC110 - Redis tells no event
        await asyncio.sleep(0)
    await herd.acquire("a", "t1")
    assert [(c.verb, c.fields) for c in await reading] == [("demand", {"model": "a"})]


async def test_cancelled_read_delivers_again(herd: Herd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply of a read is lost after Redis gave the commands out: the next read has them."""
    await herd.leader.read_commands(0)
    await herd.acquire("a", "t1")
    call = herd.leader._scripts.call

    async def lost(*args: object) -> object:
        await call(*args)  # type: ignore[arg-type]
        raise asyncio.CancelledError

    monkeypatch.setattr(herd.leader._scripts, "call", lost)
    with pytest.raises(asyncio.CancelledError):
        await herd.leader.read_commands(0)
    monkeypatch.undo()
    assert [c.verb for c in await herd.leader.read_commands(0)] == ["demand"]


async def test_read_wait_brings_inbox_and_events_from_its_own_ids(herd: Herd) -> None:
    """Take cursors, let things happen, read: exactly what came after, then nothing after the block time."""
    await herd.leader.emit("before", {})
    cursors = await herd.gateway.read_cursors("g1")
    await herd.acquire("a", "t1")
    await herd.leader.fail("a", {})
    got = await herd.gateway.read_wait("g1", cursors.inbox_id, cursors.events_id, 4000)
    assert [message.fields["type"] for message in got.inbox] == ["failed"]
    assert [event.fields["kind"] for event in got.events] == ["queued"]
    again = await herd.gateway.read_wait("g1", got.inbox[-1].id, got.events[-1].id, 5)
    assert (again.inbox, again.events) == ((), ())


async def test_c174_only_facts_live_without_an_end(herd: Herd) -> None:
    """Of all keys of a herd only those that describe it have no TTL; locks and inboxes end."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    await herd.acquire("b", "t2")
    await herd.leader.fail("b", {})
    endless = {name for name in await herd.redis.keys("*") if await herd.redis.ttl(name) == -1}
    kinds = {name.removeprefix(herd.keys.prefix).partition(":")[0] for name in endless}
    lists = {"models", "instances", "gateways", "commands", "events"}
    assert kinds <= {"herd", "leadership", "model", "instance", "leases", *lists}
    assert await herd.redis.ttl(herd.keys.inbox("g1")) > 0


async def test_c82_a_models_totals_only_grow(herd: Herd) -> None:
    """Count an instance, again, anew from its start, then another whose end is told twice: nothing twice."""
    totals = []
    for instance, tokens in (("i1", 5), ("i1", 8), ("i1", 8), ("i1", 2), ("i2", 4), ("i2", 4)):
        await herd.leader.count(
            "a", instance, {"predicted_tokens": tokens, "prompt_seconds": 0.25}, {"slots_busy": 1}
        )
        totals.append(int((await herd.gateway.read_model("a"))["predicted_tokens"]))
    assert totals == [5, 8, 8, 10, 14, 14]
    model = await herd.gateway.read_model("a")
    assert (model["prompt_seconds"], model["slots_busy"], model["counted_of"]) == ("0.5", "1", "i2")
    with pytest.raises(UnknownModel):
        await herd.leader.count("gone", "i1", {}, {})
