"""All verbs in random order against a small model in Python: what Redis counts is what the model counts."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from small_herd import Herd

from llamastead.shared.store.connect import connect
from llamastead.shared.store.errors import Unregistered, WrongState
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.records import Claimed, Granted, Waiting
from llamastead.shared.words import EndClass, InstanceState

MODELS = ("a", "b")
GATEWAYS = ("g1", "g2", "g3")
model_names = st.sampled_from(MODELS)
gateway_names = st.sampled_from(GATEWAYS)
places = st.integers(0, 50)


@dataclass
class Expected:
    """What Redis should hold, in plain Python. Leases and tickets carry the beat they were booked at."""

    beats: dict[str, int] = field(default_factory=dict)
    tickets: dict[str, dict[str, tuple[str, int]]] = field(default_factory=lambda: {m: {} for m in MODELS})
    states: dict[str, str] = field(default_factory=dict)
    leases: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)

    def instance_of(self, model: str) -> str:
        return f"i-{model}"

    def grant(self, model: str) -> int:
        instance, granted = self.instance_of(model), 0
        first: dict[str, str] = {}
        for ticket, (gateway, _) in self.tickets[model].items():
            if gateway in self.beats:
                first.setdefault(gateway, ticket)
                granted += 1
        for gateway, ticket in first.items():
            self.leases[instance][gateway] = (f"{ticket}+", self.beats[gateway])
        self.tickets[model] = {}
        return granted

    def forget(self, gateway: str) -> None:
        self.beats.pop(gateway, None)
        for model in MODELS:
            self.tickets[model] = {t: v for t, v in self.tickets[model].items() if v[0] != gateway}
        for leases in self.leases.values():
            leases.pop(gateway, None)


class StoreMachine(RuleBasedStateMachine):
    """Gateways and a leader do what they like; after each step Redis and the model agree on every count."""

    url = ""
    loop: asyncio.AbstractEventLoop

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.redis = connect(self.url)
        self.do(self.redis.flushall())
        self.herd = self.do(Herd(self.redis, Keys("p:")).open(*MODELS, gateways=()))
        self.expected = Expected()
        self.minted = 0
        self.given: list[tuple[str, str, str]] = []  # instance, gateway, lease: all ever handed out

    def teardown(self) -> None:
        if hasattr(self, "redis"):
            self.do(self.redis.aclose())
            self.loop.close()

    @rule(gateway=gateway_names, keep=st.booleans())
    def beat(self, gateway: str, keep: bool) -> None:
        """A gateway beats; it names all that it has, or nothing (a restart of its memory)."""
        e = self.expected
        leases = {i: held[gateway][0] for i, held in e.leases.items() if gateway in held} if keep else {}
        named = {m: [t for t, v in e.tickets[m].items() if v[0] == gateway] if keep else [] for m in MODELS}
        previous = e.beats.get(gateway)
        alive = {*leases.values(), *(t for ids in named.values() for t in ids)}
        result = self.do(self.herd.beat(gateway, leases=leases, tickets=named))
        assert result.known_before == (previous is not None)
        e.beats[gateway] = self.herd.beats[gateway]
        horizon = e.beats[gateway] if previous is None else previous
        lost = {i for i in leases if e.states[i] == "stopping"}
        assert (set(result.lost_leases), result.missing_tickets) == (lost, ())
        for held in e.leases.values():
            if gateway in held and held[gateway][0] not in alive and held[gateway][1] < horizon:
                del held[gateway]
        for model in MODELS:
            for ticket, (owner, beat) in list(e.tickets[model].items()):
                if owner == gateway and ticket not in alive and beat < horizon:
                    del e.tickets[model][ticket]

    @rule(model=model_names, gateway=gateway_names)
    def acquire(self, model: str, gateway: str) -> None:
        e, instance = self.expected, self.expected.instance_of(model)
        self.minted += 1
        ticket = f"t{self.minted:04}"
        if gateway not in e.beats:
            with pytest.raises(Unregistered):
                self.do(self.herd.acquire(model, ticket, gateway))
            return
        reply = self.do(self.herd.acquire(model, ticket, gateway))
        if e.states.get(instance) == "ready":
            assert isinstance(reply, Granted)
            e.leases[instance][gateway] = (ticket, e.beats[gateway])
            self.given.append((instance, gateway, ticket))
        else:
            assert isinstance(reply, Waiting)
            e.tickets[model][ticket] = (gateway, e.beats[gateway])

    @rule(place=places, used=st.booleans())
    def release(self, place: int, used: bool) -> None:
        """Release any lease ever handed out: it works for the booked one and is a no-op for all others."""
        if not self.given:
            return
        instance, gateway, lease = self.given[place % len(self.given)]
        held = self.expected.leases.get(instance, {})
        booked = gateway in held and held[gateway][0] == lease
        assert self.do(self.herd.gateway.release(instance, gateway, lease, used)) == booked
        if booked:
            del held[gateway]

    @rule(model=model_names, place=places)
    def give_back(self, model: str, place: int) -> None:
        e, instance = self.expected, self.expected.instance_of(model)
        ticket = f"t{place % (self.minted + 1):04}"
        held = e.leases.get(instance, {})
        for gateway in GATEWAYS:
            waits = e.tickets[model].get(ticket)
            booked = gateway in held and held[gateway][0] == ticket
            # Tickets are unique: one that waits is nobody's lease.
            assert self.do(self.herd.gateway.give_back(model, ticket, gateway)) == (bool(waits) or booked)
            e.tickets[model].pop(ticket, None)
            if not waits and booked:
                del held[gateway]

    @rule(model=model_names)
    def start(self, model: str) -> None:
        instance = self.expected.instance_of(model)
        if instance not in self.expected.states:
            self.do(self.herd.start(instance, model))
            self.expected.states[instance] = "loading"
            self.expected.leases[instance] = {}

    @rule(model=model_names, verb=st.sampled_from(["ready", "wake", "undrain"]))
    def grant(self, model: str, verb: str) -> None:
        e, instance = self.expected, self.expected.instance_of(model)
        if instance not in e.states:
            return
        leader, state = self.herd.leader, e.states[instance]
        allowed = {
            "ready": {"loading", "ready", "sleeping", "waking"},
            "wake": {"sleeping"},
            "undrain": {"draining"},
        }[verb]
        call = {
            "ready": lambda: leader.ready(instance, model, {}),
            "wake": lambda: leader.wake(instance, model),
            "undrain": lambda: leader.undrain(instance),
        }[verb]
        if state not in allowed:
            if verb == "undrain":
                assert self.do(call()) is None
            else:
                with pytest.raises(WrongState):
                    self.do(call())
            return
        count = self.do(call())
        assert count == e.grant(model)
        e.states[instance] = "waking" if verb == "wake" else "ready"
        self.given += [(instance, gateway, lease) for gateway, (lease, _) in e.leases[instance].items()]

    @rule(model=model_names, verb=st.sampled_from(["drain", "stop", "sleep", "ended"]))
    def close(self, model: str, verb: str) -> None:
        e, instance = self.expected, self.expected.instance_of(model)
        if instance not in e.states:
            return
        leader, state, held = self.herd.leader, e.states[instance], len(e.leases[instance])
        if verb == "drain":
            assert self.do(leader.drain(instance)) == (state == "ready")
            e.states[instance] = "draining" if state == "ready" else state
        elif verb == "ended":
            assert self.do(leader.ended(instance, EndClass.CRASHED, 1, "x"))
            del e.states[instance], e.leases[instance]
        elif state not in {"ready", "sleeping", "waking" if verb == "sleep" else "draining"}:
            with pytest.raises(WrongState):
                self.do(leader.sleep(instance) if verb == "sleep" else leader.stop(instance, EndClass.IDLE))
        elif verb == "sleep":
            assert self.do(leader.sleep(instance)) == (not held)
            e.states[instance] = state if held else "sleeping"
        else:
            outcome = self.do(leader.stop(instance, EndClass.IDLE))
            assert (outcome == Claimed(held)) if held else (outcome != Claimed(0))
            e.states[instance] = state if held else "stopping"

    @rule(model=model_names, some=st.booleans(), place=places)
    def fail(self, model: str, some: bool, place: int) -> None:
        waiting = self.expected.tickets[model]
        chosen = [ticket for ticket in waiting if int(ticket[1:]) % 2 == place % 2] if some else list(waiting)
        assert self.do(self.herd.leader.fail(model, {}, chosen if some else None)) == len(chosen)
        for ticket in chosen:
            del waiting[ticket]

    @rule(gateway=gateway_names, leaves=st.booleans())
    def forget(self, gateway: str, leaves: bool) -> None:
        self.do(self.herd.gateway.leave(gateway) if leaves else self.herd.leader.sweep(gateway))
        self.expected.forget(gateway)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "expected"):
            return
        e = self.expected
        facts = self.do(self.herd.leader.observe())
        assert facts.gateways == e.beats
        assert {m: {t.id: t.gateway for t in demand.tickets} for m, demand in facts.queue.items()} == {
            m: {t: v[0] for t, v in e.tickets[m].items()} for m in MODELS if e.tickets[m]
        }
        assert {i: dict(claims.leases) for i, claims in facts.claims.items()} == {
            i: {gateway: lease for gateway, (lease, _) in held.items()} for i, held in e.leases.items()
        }
        states = {i: r["state"] for i, r in self.do(self.herd.gateway.read_instances()).items()}
        assert states == e.states
        for instance, state in states.items():
            assert state not in ("stopping", "sleeping") or not facts.claims[instance].leases
            assert InstanceState(state)


def test_any_sequence_of_verbs_keeps_the_counts(redis_url: str) -> None:
    """Run random sequences of all verbs of gateways and leader and compare every count after every step."""
    StoreMachine.url = redis_url
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        StoreMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
