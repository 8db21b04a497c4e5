"""Tickets and leases: how requests wait, are granted, and give back."""

import json

import pytest
from redis.asyncio import Redis
from small_herd import Herd

from llamastead.shared.store.errors import (
    NoHerd,
    NotLoaded,
    QueueFull,
    UnknownModel,
    Unregistered,
    WrongState,
)
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.records import Claimed, Claims, Granted, Stopping, Waiting
from llamastead.shared.words import EndClass, InstanceState, UseKind


@pytest.fixture
async def herd(redis: Redis, keys: Keys) -> Herd:
    return await Herd(redis, keys).open("a", "b")


async def test_emptied_redis_says_no_herd_and_never_unknown_model(redis: Redis, keys: Keys) -> None:
    """Ask an empty Redis for everything a gateway asks: NoHerd or nothing, never "unknown"."""
    gateway = GatewayStore(redis, keys)
    with pytest.raises(NoHerd):
        await gateway.acquire("a", "t1", "g1", UseKind.INFERENCE, 1000)
    with pytest.raises(NoHerd):
        await gateway.submit("load", "g1", 1000, {"model": "a"})
    with pytest.raises(NoHerd):
        await gateway.read_herd()
    beat = await gateway.heartbeat("g1", 1, {}, {"i1": "l1"}, {"a": ["t1"]}, [])
    assert (beat.herd_open, beat.lost_leases, beat.missing_tickets) == (False, (), ())


async def test_acquire_refuses_who_and_what_is_not_known(herd: Herd) -> None:
    """A gateway that never beat is refused, a model without an entry too; nothing is counted."""
    with pytest.raises(Unregistered):
        await herd.acquire("a", "t1", "g9")
    with pytest.raises(UnknownModel):
        await herd.acquire("zebra", "t1")
    assert await herd.gateway.read_queue() == {}
    assert await herd.asked() == []


async def test_cold_request_waits_with_a_readable_ticket(herd: Herd) -> None:
    """Ask for a model that is not loaded: the ticket stands in Redis as JSON and the supervisor is told."""
    reply = await herd.acquire("a", "t1", request_id="r1")
    assert isinstance(reply, Waiting)
    raw = json.loads(await herd.redis.hget(herd.keys.tickets("a"), "t1") or "")
    assert raw == {
        "gateway": "g1",
        "kind": "inference",
        "request_id": "r1",
        "enqueued_ms": reply.first_arrival_ms,
        "deadline_ms": reply.first_arrival_ms + 60_000,
        "beat": 1,
    }
    assert await herd.asked() == [("demand", "a")]
    assert await herd.events("queued") == [{"kind": "queued", "model": "a", "request_id": "r1"}]
    queue = await herd.gateway.read_queue()
    assert [(t.id, t.kind, t.request_id) for t in queue["a"].tickets] == [("t1", UseKind.INFERENCE, "r1")]


async def test_a_ticket_enrolled_again_keeps_its_place(herd: Herd) -> None:
    """Lose a ticket, enrol it again with its first arrival after another model's: it stands first."""
    first = await herd.acquire("a", "t1")
    assert isinstance(first, Waiting)
    await herd.redis.delete(herd.keys.tickets("a"), herd.keys.queue)
    await herd.acquire("b", "t2")
    await herd.redis.zadd(herd.keys.queue, {"b": first.first_arrival_ms + 5})
    assert await herd.acquire("a", "t1", first_arrival_ms=first.first_arrival_ms) == first
    assert list(await herd.gateway.read_queue()) == ["a", "b"]
    assert await herd.acquire("a", "t1", first_arrival_ms=first.first_arrival_ms + 999_999) == first


async def test_an_arrival_in_the_future_is_now(herd: Herd) -> None:
    """A gateway from a Redis with another clock can't put itself behind everybody for ever."""
    now = (await herd.leader.observe()).now_ms
    reply = await herd.acquire("a", "t1", first_arrival_ms=now + 3_600_000)
    assert isinstance(reply, Waiting)
    assert reply.first_arrival_ms < now + 60_000


async def test_queue_limits_refuse_without_a_trace(redis: Redis, keys: Keys) -> None:
    """Fill a model's bound and the bound of all: the next is refused by name, an enrolled one is not."""
    herd = await Herd(redis, keys).open("a", "b", queue_limit=2, queue_limit_total=3)
    for ticket in ("t1", "t2"):
        await herd.acquire("a", ticket)
    with pytest.raises(QueueFull) as full:
        await herd.acquire("a", "t3")
    assert (full.value.limit_name, full.value.limit) == ("queue_limit", 2)
    await herd.acquire("b", "t4")
    with pytest.raises(QueueFull) as full:
        await herd.acquire("b", "t5")
    assert (full.value.limit_name, full.value.limit) == ("queue_limit_total", 3)
    assert isinstance(await herd.acquire("a", "t1"), Waiting)
    assert {model: len(entry.tickets) for model, entry in (await herd.gateway.read_queue()).items()} == {
        "a": 2,
        "b": 1,
    }


async def test_c162_reads_take_no_place_from_inference(redis: Redis, keys: Keys) -> None:
    """Let reads wait beyond both bounds: they are enrolled, and inference has all the places there are."""
    herd = await Herd(redis, keys).open("a", "b", queue_limit=1, queue_limit_total=2)
    for k in range(3):
        read = await herd.gateway.acquire("a", f"r{k}", "g1", UseKind.READ, 60_000)
        assert isinstance(read, Waiting)
    assert isinstance(await herd.acquire("a", "t1"), Waiting)
    with pytest.raises(QueueFull) as full:
        await herd.acquire("a", "t2")
    assert full.value.limit_name == "queue_limit"
    assert isinstance(await herd.acquire("b", "t3"), Waiting)
    with pytest.raises(QueueFull) as full:
        await herd.acquire("b", "t4")
    assert isinstance(await herd.gateway.acquire("b", "r4", "g1", UseKind.READ, 60_000), Waiting)


async def test_r4_waiters_hold_leases_before_ready_can_be_seen(herd: Herd) -> None:
    """Three requests of two gateways wait, the model gets ready: a lease each, and a stop is refused."""
    await herd.acquire("a", "t1", "g1")
    await herd.acquire("a", "t2", "g2")
    await herd.acquire("a", "t3", "g1")
    await herd.start("i1", "a")
    assert await herd.leader.ready("i1", "a", {}) == 3
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Claimed(2)
    assert await herd.gateway.read_leases("i1") == {"g1": "t1+", "g2": "t2+"}
    messages = [message.fields for message in await herd.inbox("g1")]
    assert messages == [
        {
            "type": "granted",
            "model": "a",
            "instance": "i1",
            "address": "unix:/i1",
            "nonce": "n-i1",
            "state_revision": "2",
            "load_ms": "5",
            "lease": "t1+",
            "tickets": "t1,t3",
        }
    ]
    assert await herd.gateway.read_queue() == {}


async def test_tickets_of_unknown_gateways_are_not_granted(herd: Herd) -> None:
    """A gateway vanishes from the register while its ticket waits: it goes, and no lease is made."""
    await herd.acquire("a", "t1", "g1")
    await herd.acquire("a", "t2", "g2")
    await herd.redis.zrem(herd.keys.gateways, "g2")
    assert await herd.ready("i1", "a") == 1
    assert await herd.gateway.read_leases("i1") == {"g1": "t1+"}
    assert await herd.inbox("g2") == []


async def test_ready_instance_is_claimed_at_once(herd: Herd) -> None:
    """Acquire a ready model: the lease is booked under the ticket's id and nobody is bothered."""
    await herd.ready("i1", "a")
    await herd.asked()
    assert await herd.acquire("a", "t1") == Granted("i1", "unix:/i1", "n-i1", 2)
    assert (await herd.leader.observe()).claims["i1"].leases == {"g1": "t1"}
    assert await herd.asked() == []


async def test_not_instance_waits_instead_of_the_address_that_refused(herd: Herd) -> None:
    """A gateway whose connection was refused excludes that instance and waits; the supervisor hears of it."""
    await herd.ready("i1", "a")
    await herd.asked()
    assert isinstance(await herd.acquire("a", "t1", not_instance="i1"), Waiting)
    assert await herd.asked() == [("refused", "i1"), ("demand", "a")]


@pytest.mark.parametrize("state", [s for s in InstanceState if s is not InstanceState.READY])
async def test_no_lease_in_any_other_state(herd: Herd, state: InstanceState) -> None:
    """In each state but READY an acquire becomes a ticket."""
    await herd.ready("i1", "a")
    await herd.leader.put_instance("i1", {"state": state.value}, "a", {})
    assert isinstance(await herd.acquire("a", "t1"), Waiting)
    assert await herd.gateway.read_leases("i1") == {}


async def test_r1_an_instance_in_use_is_never_stopped(herd: Herd) -> None:
    """Hold a lease: stop and sleep refuse and change nothing; give it back: stop is granted, none follows."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Claimed(1)
    assert not await herd.leader.sleep("i1")
    assert (await herd.gateway.read_instances())["i1"]["state"] == "ready"
    assert await herd.gateway.release("i1", "g1", "t1", used=True)
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Stopping()
    assert isinstance(await herd.acquire("a", "t2"), Waiting)
    with pytest.raises(WrongState) as wrong:
        await herd.leader.ready("i1", "a", {})
    assert wrong.value.state == "stopping"


@pytest.mark.parametrize(
    "state", [InstanceState.STARTING, InstanceState.LOADING, InstanceState.WAKING, InstanceState.STOPPING]
)
async def test_r2_a_loading_instance_is_never_a_victim(herd: Herd, state: InstanceState) -> None:
    """A stop of an instance that is not ready, draining or asleep is refused with the state it is in."""
    await herd.start("i1", "a", state)
    with pytest.raises(WrongState) as wrong:
        await herd.leader.stop("i1", EndClass.EVICTED)
    assert wrong.value.state == state.value


async def test_r11_release_with_another_id_changes_nothing(herd: Herd) -> None:
    """Release an older, a foreign and an unknown lease: all say False and the booked one stays."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "old")
    await herd.acquire("a", "new")
    assert not await herd.gateway.release("i1", "g1", "old", used=True)
    assert not await herd.gateway.release("i1", "g2", "new", used=True)
    assert not await herd.gateway.release("i9", "g1", "new", used=True)
    assert await herd.gateway.read_leases("i1") == {"g1": "new"}
    assert await herd.gateway.release("i1", "g1", "new", used=True)
    assert not await herd.gateway.release("i1", "g1", "new", used=True)


async def test_last_lease_tells_the_supervisor_and_only_use_moves_last_used(herd: Herd) -> None:
    """Two gateways hold a lease; only the second release tells, and a read is no use."""
    await herd.ready("i1", "a")
    await herd.redis.hset(herd.keys.instance("i1"), "last_used_ms", 7)
    await herd.acquire("a", "t1", "g1")
    await herd.acquire("a", "t2", "g2")
    await herd.asked()
    await herd.gateway.release("i1", "g1", "t1", used=False)
    assert await herd.asked() == []
    assert (await herd.leader.observe()).claims["i1"] == Claims({"g2": "t2"}, 7)
    await herd.gateway.release("i1", "g2", "t2", used=True)
    (idle,) = await herd.leader.read_commands(0)
    last_used = (await herd.leader.observe()).claims["i1"].last_used_ms
    assert last_used > 7
    assert (idle.verb, idle.gateway, idle.fields) == (
        "idle",
        "",
        {"instance": "i1", "last_used_ms": str(last_used)},
    )
    assert (await herd.gateway.read_model("a"))["last_used_ms"] == str(last_used)


async def test_last_ticket_given_back_leaves_the_queue(herd: Herd) -> None:
    """Two tickets of a model are given back: the second takes the entry along and tells."""
    await herd.acquire("a", "t1")
    await herd.acquire("a", "t2")
    await herd.asked()
    assert await herd.gateway.give_back("a", "t1", "g1")
    assert list(await herd.gateway.read_queue()) == ["a"]
    assert await herd.gateway.give_back("a", "t2", "g1")
    assert await herd.asked() == [("left", "a")]
    assert await herd.gateway.read_queue() == {}
    assert not await herd.gateway.give_back("a", "t2", "g1")


async def test_acquire_of_unknown_outcome_is_undone_by_its_id(herd: Herd) -> None:
    """Give back an acquire that had booked a lease: the lease goes; a newer one stays."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    assert await herd.gateway.give_back("a", "t1", "g1")
    assert await herd.gateway.read_leases("i1") == {}
    await herd.acquire("a", "t2")
    await herd.acquire("a", "t3")
    assert not await herd.gateway.give_back("a", "t2", "g1")
    assert await herd.gateway.read_leases("i1") == {"g1": "t3"}


async def test_giving_one_ticket_back_leaves_the_grant_of_the_others(herd: Herd) -> None:
    """Two tickets share a granted lease; the first client leaves: the claim stays."""
    await herd.acquire("a", "t1")
    await herd.acquire("a", "t2")
    await herd.ready("i1", "a")
    assert not await herd.gateway.give_back("a", "t1", "g1")
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Claimed(1)


async def test_acquire_of_a_ticket_that_waits_after_ready_is_granted_once(herd: Herd) -> None:
    """A ticket enrolled by a call whose answer was lost is acquired again: one claim, no ticket."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1", not_instance="i1")
    assert isinstance(await herd.acquire("a", "t1"), Granted)
    assert await herd.gateway.read_queue() == {}


async def test_failure_settles_every_ticket_once(herd: Herd) -> None:
    """Fail a model with three tickets: one message per gateway; again settles none."""
    for ticket, gateway in [("t1", "g1"), ("t2", "g2"), ("t3", "g1")]:
        await herd.acquire("a", ticket, gateway)
    error = {"status": 503, "message": "no", "fields": {"log": "x"}}
    assert await herd.leader.fail("a", error) == 3
    assert await herd.leader.fail("a", error) == 0
    (message,) = await herd.inbox("g1")
    assert message.fields["type"] == "failed"
    assert (message.fields["model"], message.fields["tickets"]) == ("a", "t1,t3")
    assert json.loads(message.fields["error"]) == error
    assert await herd.gateway.read_queue() == {}


async def test_failing_some_tickets_leaves_the_others_waiting(herd: Herd) -> None:
    """Fail one ticket, whose deadline passed, of two: the other waits on in its place."""
    await herd.gateway.acquire("a", "t1", "g1", UseKind.READ, 0)
    await herd.acquire("a", "t2")
    facts = await herd.leader.observe()
    late = [t.id for t in facts.queue["a"].tickets if t.deadline_ms <= facts.now_ms]
    assert late == ["t1"]
    assert await herd.leader.fail("a", {"status": 503}, late) == 1
    assert await herd.leader.fail("a", {"status": 503}, []) == 0
    after = (await herd.leader.observe()).queue["a"]
    assert [ticket.id for ticket in after.tickets] == ["t2"]
    assert after.first_ms == facts.queue["a"].first_ms


async def test_want_tells_those_who_hold_the_instance(herd: Herd) -> None:
    """Want an instance without and with a lease: only its holder hears of it, and nothing else changes."""
    await herd.ready("i1", "a")
    await herd.leader.want("i1")
    await herd.acquire("a", "t1")
    await herd.leader.want("i1")
    assert [m.fields for m in await herd.inbox("g1")] == [{"type": "wanted", "instance": "i1"}]
    assert await herd.redis.hget(herd.keys.instance("i1"), "state") == "ready"


async def test_drain_closes_and_undrain_opens_again(herd: Herd) -> None:
    """Drain under a lease, wait with a ticket, undrain: holders hear of it, the grant takes a new id."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    assert await herd.leader.drain("i1")
    assert not await herd.leader.drain("i1")
    assert [m.fields for m in await herd.inbox("g1")] == [{"type": "draining", "instance": "i1"}]
    assert isinstance(await herd.acquire("a", "t2"), Waiting)
    assert await herd.leader.undrain("i1") == 1
    assert await herd.leader.undrain("i1") is None
    assert not await herd.gateway.release("i1", "g1", "t1", used=True)
    assert await herd.gateway.read_leases("i1") == {"g1": "t2+"}


async def test_sleeper_wakes_for_its_tickets(herd: Herd) -> None:
    """A sleeper enrols, wake grants in state WAKING, and READY comes back from there."""
    await herd.ready("i1", "a")
    assert await herd.leader.sleep("i1")
    assert isinstance(await herd.acquire("a", "t1"), Waiting)
    assert await herd.leader.wake("i1", "a") == 1
    assert (await herd.gateway.read_model("a"))["status"] == "loading"
    assert isinstance(await herd.acquire("a", "t2"), Waiting)
    assert await herd.leader.ready("i1", "a", {}) == 1
    with pytest.raises(WrongState):
        await herd.leader.wake("i1", "a")


async def test_end_of_an_instance_takes_its_leases_and_tells_their_gateways(herd: Herd) -> None:
    """An instance dies under a lease: the lease goes, the gateway hears it, the model says why."""
    await herd.ready("i1", "a")
    await herd.acquire("a", "t1")
    assert await herd.leader.ended(
        "i1", EndClass.CRASHED, 139, "segmentation fault", {"failed": 1}, InstanceState.FAILED
    )
    assert not await herd.leader.ended("i1", EndClass.LOST, None, "", {})
    assert [m.fields for m in await herd.inbox("g1")] == [{"type": "ended", "instance": "i1", "model": "a"}]
    assert await herd.gateway.read_instances() == {}
    assert await herd.redis.exists(herd.keys.leases("i1")) == 0
    model = await herd.gateway.read_model("a")
    assert {
        name: model[name] for name in ("instance", "state", "status", "exit_code", "reason", "failed")
    } == {
        "instance": "",
        "state": "failed",
        "status": "unloaded",
        "exit_code": "139",
        "reason": "segmentation fault",
        "failed": "1",
    }


async def test_end_of_an_older_instance_leaves_the_models_new_one(herd: Herd) -> None:
    """The model has a second instance when the first one's end is noted: it stays the model's."""
    await herd.ready("i1", "a")
    await herd.leader.stop("i1", EndClass.STOPPED)
    await herd.start("i2", "a")
    await herd.leader.put_instance("i1", {"progress": "x"}, "a", {"progress": "old"})
    assert await herd.leader.ended("i1", EndClass.STOPPED, 0, "")
    model = await herd.gateway.read_model("a")
    assert (model["instance"], model["state"], "progress" in model) == ("i2", "loading", False)


async def test_c40_only_errors_since_the_load_make_an_instance_broken(herd: Herd) -> None:
    """Report errors of two instances: told once at the third, and never of one that was right once."""
    await herd.ready("bad", "a")
    await herd.ready("good", "b")
    assert [await herd.gateway.report("bad", False, 3) for _ in range(4)] == [1, 2, 3, 4]
    await herd.gateway.report("good", False, 3)
    assert await herd.gateway.report("good", True, 3) == 0
    assert [await herd.gateway.report("good", False, 3) for _ in range(3)] == [0, 0, 0]
    assert await herd.gateway.report("gone", False, 3) == 0
    assert await herd.asked() == [("broken", "bad")]


@pytest.mark.parametrize(
    ("state", "waits"),
    [
        (None, {"load"}),
        (InstanceState.LOADING, {"load", "wake", "wait"}),
        (InstanceState.SLEEPING, {"load", "wake"}),
        (InstanceState.WAKING, {"load", "wake", "wait"}),
        (InstanceState.DRAINING, {"load"}),
        (InstanceState.STOPPING, {"load"}),
    ],
)
async def test_c84_who_may_not_load_is_not_queued_for_what_is_gone(
    herd: Herd, state: InstanceState | None, waits: set[str]
) -> None:
    """Ask for a model in each state as one who may load it, may only wake it, or neither: who may not is
    refused and leaves no ticket, whatever its gateway believed.
    """
    if state is not None:
        await herd.start("i1", "a", state)
    for may in ("wait", "wake", "load"):
        if may in waits:
            assert isinstance(await herd.acquire("a", may, may=may), Waiting)
        else:
            with pytest.raises(NotLoaded):
                await herd.acquire("a", may, may=may)
    assert set(await herd.redis.hkeys(herd.keys.tickets("a"))) == waits


async def test_c84_who_may_not_load_is_let_in_while_it_is_ready(herd: Herd) -> None:
    """Ask for a ready model as one who may load nothing: a lease; where it turned away: refused."""
    await herd.ready("i1", "a")
    assert isinstance(await herd.acquire("a", "t1", may="wait"), Granted)
    with pytest.raises(NotLoaded):
        await herd.acquire("a", "t2", may="wait", not_instance="i1")


async def test_c79_a_peek_holds_a_sleeper_and_does_not_wake_it(herd: Herd) -> None:
    """Ask a sleeping model for a peek, a read and inference: the peek gets a lease, the others a ticket."""
    await herd.ready("i1", "a")
    assert await herd.leader.sleep("i1")
    peeked = await herd.gateway.acquire("a", "t1", "g1", UseKind.PEEK, 60_000)
    assert isinstance(peeked, Granted)
    for ticket, kind in (("t2", UseKind.READ), ("t3", UseKind.INFERENCE)):
        assert isinstance(await herd.gateway.acquire("a", ticket, "g1", kind, 60_000), Waiting)
    assert (await herd.gateway.read_instances())["i1"]["state"] == "sleeping"
    assert await herd.leader.stop("i1", EndClass.EVICTED) == Claimed(1)
