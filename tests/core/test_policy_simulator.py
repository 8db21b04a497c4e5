"""The scheduler against arrival traces in virtual time, beside strict FIFO and llama-server's router."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.policy.__main__ import main
from bench.policy.bound import Stay, bounded
from bench.policy.others import Router, StrictFifo
from bench.policy.ours import Ours
from bench.policy.report import POLICIES, Outcome, Verdict, ours, replay, verdicts
from bench.policy.traces import PING_PONG, traces
from bench.policy.world import BrokenPolicyError, Client, Engine, Herd, Model, Trace
from bench.policy.world import Policy as Scheduler
from llamastead.supervisor.core import actions as act
from llamastead.supervisor.core import events as ev
from llamastead.supervisor.core.state import Policy, State
from llamastead.supervisor.core.step import Step, step

SHARE = 0.2
TRACES = {trace.name: trace for trace in traces(seed=1, share=SHARE)}


def runs_with(mine: Callable[[Herd], Ours], *names: str) -> list[Outcome]:
    """Replay the named traces with strict FIFO and with this form of ours."""
    policies: dict[str, Callable[[Herd], Scheduler]] = {"strict FIFO": StrictFifo, "ours": mine}
    return [replay(TRACES[name], policy, make) for name in names for policy, make in policies.items()]


def broken(verdicts_: list[Verdict]) -> list[str]:
    return [verdict.text for verdict in verdicts_ if not verdict.holds]


def test_ours_swaps_little_and_keeps_its_bound_on_every_trace() -> None:
    """Replay every trace under every policy: two verdicts on swaps and a bound per trace, and all hold."""
    outcomes = [replay(trace, name, make) for trace in TRACES.values() for name, make in POLICIES.items()]
    held = verdicts(outcomes)
    assert len(held) == len(PING_PONG) + len(TRACES)
    assert broken(held) == []


@pytest.mark.parametrize("seed", range(2, 6))
def test_the_verdicts_do_not_hang_on_one_seed(seed: int) -> None:
    """Replay other traces of the same kinds: all verdicts hold again."""
    outcomes = [replay(trace, name, make) for trace in traces(seed, SHARE) for name, make in POLICIES.items()]
    assert broken(verdicts(outcomes)) == []


def test_one_that_never_drains_breaks_its_bound() -> None:
    """Give the core an endless max-wait: where one model is always busy, others pass their bound."""

    def mine(herd: Herd) -> Ours:
        return Ours(herd, Policy(models_max=herd.trace.models_max, max_wait=1e9))

    assert any("hot and cold tail" in text for text in broken(verdicts(runs_with(mine, "hot and cold tail"))))


def test_one_without_minimum_residence_swaps_too_often() -> None:
    """Have the core keep nothing loaded for long: with an instant between requests it swaps for each."""

    def forgetful(state: State, event: ev.Event, now: float) -> Step:
        instances = {name: replace(each, load_time=0.0) for name, each in state.instances.items()}
        return step(replace(state, instances=instances), event, now)

    def mine(herd: Herd) -> Ours:
        return Ours(herd, Policy(models_max=herd.trace.models_max, min_residence=0.0), forgetful)

    assert any("a third" in text for text in broken(verdicts(runs_with(mine, "ping-pong, network"))))


def test_one_that_serves_the_last_first_breaks_its_bound() -> None:
    """Tell the core of arrivals in reverse order: in a crowd somebody waits beyond the bound."""

    def backwards(state: State, event: ev.Event, now: float) -> Step:
        if isinstance(event, ev.Observed):
            turned = {model: replace(d, first=-d.first) for model, d in event.demands.items()}
            event = replace(event, demands=turned)
        return step(state, event, now)

    def mine(herd: Herd) -> Ours:
        return Ours(herd, Policy(models_max=herd.trace.models_max), backwards)

    assert any("crowd" in text for text in broken(verdicts(runs_with(mine, "crowd"))))


def test_a_wrong_grant_of_a_stop_is_caught() -> None:
    """Have a driver stop what is busy, and start where there is no room: the herd refuses both."""
    herd = Herd(Trace("t", {"a": Model(1.0), "b": Model(1.0)}, 1, (Client("a", 0.0, ((0.0, 5.0),)),)))

    class Cuts(StrictFifo):
        def on_ready(self, engine: Engine) -> None:
            super().on_ready(engine)
            with pytest.raises(BrokenPolicyError, match="1 busy"):
                herd.stop(engine)
            with pytest.raises(BrokenPolicyError, match="no room"):
                herd.start("b")

    herd.run(Cuts(herd))
    assert herd.answered_at == 6.0


def test_a_request_that_is_never_let_in_is_caught() -> None:
    """Replay with a core whose grants are lost: the run ends with the requests that still wait."""

    def loses(state: State, event: ev.Event, now: float) -> Step:
        done = step(state, event, now)
        return replace(done, actions=tuple(a for a in done.actions if not isinstance(a, act.Grant)))

    herd = Herd(Trace("t", {"a": Model(1.0)}, 1, (Client("a", 0.0, ((0.0, 1.0),)),)))
    with pytest.raises(BrokenPolicyError, match="never let in"):
        herd.run(Ours(herd, Policy(models_max=1), loses))


def two_models(*clients: Client) -> Herd:
    return Herd(Trace("t", {"a": Model(10.0, stop=1.0), "b": Model(10.0, stop=1.0)}, 1, clients))


def waits(herd: Herd) -> list[tuple[str, float]]:
    return [(r.model, round((r.admitted or 0.0) - r.arrived, 2)) for r in herd.requests]


def test_strict_fifo_swaps_for_the_first_and_holds_the_others_behind_it() -> None:
    """Send a, b, a: the second request for a waits behind b, though a is loaded when it comes."""
    once = ((0.0, 4.0),)
    herd = two_models(Client("a", 0.0, once), Client("b", 11.0, once), Client("a", 12.0, once))
    herd.run(StrictFifo(herd))
    assert waits(herd) == [("a", 10.0), ("b", 14.0), ("a", 28.0)]
    assert herd.swaps == 2


def test_llama_servers_router_starves_who_waits_for_a_busy_one() -> None:
    """Two overlapping clients of a: b, which came early, gets in only when both have sent all they have."""
    many = tuple((0.0, 4.0) for _ in range(20))
    herd = two_models(
        Client("a", 0.0, many), Client("a", 2.0, ((0.0, 2.0), *many)), Client("b", 11.0, ((0.0, 1.0),))
    )
    herd.run(Router(herd))
    assert dict(waits(herd))["b"] > 80
    herd = two_models(*herd.trace.clients)
    herd.run(ours(herd))
    assert dict(waits(herd))["b"] < 30 + 4 + 1 + 10 + 0.1


def test_the_bound_of_one_entry_and_of_one_behind_it() -> None:
    """Take entries with known costs: one may wait max-wait and its own, the next both and a residence."""
    first = Stay("a", 0.0, rest=3.0, stop=1.0, victim_load=8.0, load=10.0, until=44.0)
    second = Stay("b", 5.0, rest=2.0, stop=1.0, victim_load=10.0, load=7.0, until=60.0)
    after = Stay("c", 50.0, rest=0.0, stop=0.0, load=7.0, until=70.0)
    rows = {row.stay.model: row.bound for row in bounded([after, second, first], Policy())}
    assert rows["a"] == pytest.approx(30 + 3 + 1 + 10, abs=0.2)
    assert rows["b"] == pytest.approx(30 + 3 + 1 + 10 + 2 + 1 + 7 + 5, abs=0.2)
    assert rows["c"] == pytest.approx(30 + 2 + 1 + 7 + 7 + 2, abs=0.2)


def test_priority_counts_as_coming_before() -> None:
    """An entry that came later with a higher class counts among those before."""
    plain = Stay("a", 0.0, load=10.0, until=20.0)
    urgent = Stay("b", 5.0, priority=1, load=7.0, until=15.0)
    rows = {row.stay.model: row.bound for row in bounded([plain, urgent], Policy())}
    assert rows["b"] == pytest.approx(37, abs=0.1)
    assert rows["a"] == pytest.approx(49, abs=0.2)


def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command twice with --json, and once with another seed: alike, and not alike."""

    def figures(seed: int) -> dict[str, Any]:
        assert main(["--json", "--share", "0.05", "--seed", str(seed)]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    one = figures(1)
    assert figures(1) == one
    assert figures(2)["runs"] != one["runs"]
    assert {run["policy"] for run in one["runs"]} == set(POLICIES)


def test_the_table_names_every_trace_and_says_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command: each trace has its row, each verdict its line."""
    assert main(["--share", "0.05"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in TRACES)
    assert shown.count("yes ") == len(PING_PONG) + len(TRACES)


def test_a_herd_answers_in_order_and_as_many_at_once_as_it_has_slots() -> None:
    """Send three requests to an engine with two slots: the third begins when the first of them ends."""
    clients = tuple(Client("a", 0.0, ((0.0, service),)) for service in (4.0, 6.0, 1.0))
    herd = Herd(Trace("t", {"a": Model(1.0)}, 1, clients, parallel=2))
    left: list[float] = []

    class Watches(StrictFifo):
        def on_done(self, engine: Engine) -> None:
            left.append(engine.rest(herd.now))
            super().on_done(engine)

    herd.run(Watches(herd))
    assert left == [2.0, 1.0, 0.0]
    assert herd.answered_at == 7.0
