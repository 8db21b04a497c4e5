"""Two gateways and room for one model: who gets the place, who waits and why, what ends a wait."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from herd import KEYS, herd, instance_pids, until
from inside import ready
from pair import DONE, Pair, pair, sections
from tiny import stub_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEALTHY = Path(__file__).parents[2] / "deploy" / "image" / "healthy.py"
MAX_WAIT_S = 2.0
CALM_WAIT_S = 20.0
STALL_S = 3.0  # what a busy machine may take until a new process says its first word, and more
PRESET = (
    "[*]\nmodels-max = 4\n"
    + sections("a", "b", "c", "d")
    + sections("eager", max_wait="0.5")
    + sections("vip", priority="1", max_wait=str(CALM_WAIT_S))
    + sections("calm-1", "calm-2", max_wait=str(CALM_WAIT_S))
    + "".join(
        f"[{name}]\nmodel = {{models}}/base.gguf\nctx-size = {size}\nload-on-startup = {start}\n"
        for name, size, start in (("small", 256, "true"), ("middle", 512, "false"), ("large", 1024, "false"))
    )
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Pair]:
    """Room for one by the command line, whatever environment and presets say."""
    env = {
        "LLAMASTEAD_MODELS_MAX": "2",
        "LLAMA_ARG_MODELS_MAX": "3",
        "LLAMASTEAD_MAX_WAIT": str(MAX_WAIT_S),
        "LLAMASTEAD_MIN_RESIDENCE": "0.4",
        "LLAMASTEAD_STALL_TIMEOUT": str(STALL_S),
        "LLAMASTEAD_REREAD": "0.5",
    }
    async with pair(PRESET, "--models-max", "1", env=env, files=("base",)) as made:
        yield made


async def test_c04_three_presets_over_one_file_take_turns(both: Pair) -> None:
    """Ask for the second, third and first preset of a file at once beside a status poll: each is served."""
    await both.state("small", "ready")
    polling = True

    async def poll() -> int:
        seen = 0
        while polling:
            seen += (await both.two.get("/models")).status_code == 200
        return seen

    polls = asyncio.create_task(poll())
    answers = await asyncio.gather(*(both.chat(m, k % 2) for k, m in enumerate(("middle", "large", "small"))))
    polling = False
    assert await polls > 3
    assert len({answer.headers["x-llamastead-instance"] for answer in answers}) == 3
    started = [entry["argv"] for entry in both.journal("base") if entry["event"] == "start"]
    assert {argv[argv.index("--ctx-size") + 1] for argv in started} == {"256", "512", "1024"}
    async with both.made.redis() as redis:

        async def is_ready() -> bool:
            return bool(await redis.hget(KEYS.leadership, "ready") == "1")

        await until(is_ready, "the supervisor to say that nobody is forgotten")
    await both.settled()


async def test_c166_one_limit_counts_and_is_never_exceeded(both: Pair) -> None:
    """Limits differ by source: /props shows the command line's, and no more processes live at any moment."""
    for client in both.gateways():
        assert (await client.get("/props")).json()["max_instances"] == 1
    most, swapping = 0, True

    async def watch() -> None:
        nonlocal most
        while swapping:
            most = max(most, len(instance_pids(both.made.run_dir)))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(both.chat(model, k % 2) for k, model in enumerate("abcab")))
    swapping = False
    await watching
    assert most == 1
    await both.settled()


async def test_c01_r3_two_entries_and_one_victim(both: Pair) -> None:
    """With A idle, ask for B and C at once, each through another gateway: both are served, one at a time."""
    await both.chat("a")
    await both.made.nothing_counted()
    answers = await asyncio.gather(both.chat("b", 0), both.chat("c", 1))
    assert [answer.headers["x-llamastead-path"] for answer in answers] == ["cold", "cold"]
    assert await both.loads("a") >= 1
    await both.settled()


async def test_c06_every_load_serves_somebody(both: Pair) -> None:
    """Four clients ask for A and B without end: no load is for nothing, and both models get on."""
    for model in "ab":
        both.forget_journal(model)
    over = time.monotonic() + 4

    async def keep_asking(model: str, gateway: int) -> int:
        served = 0
        while time.monotonic() < over:
            await both.chat(model, gateway)
            served += 1
        return served

    served = await asyncio.gather(*(keep_asking(m, g) for m in "ab" for g in (0, 1)))
    assert min(served) >= 2
    started = 0
    for model in "ab":
        entries = both.journal(model)
        pids = {entry["pid"] for entry in entries if entry["event"] == "start"}
        busy = {entry["pid"] for entry in entries if entry["event"] == "request"}
        assert pids <= busy, "a load served nobody"
        started += len(pids)
    assert started <= sum(served) / 2
    await both.settled()


async def test_c21_agents_that_take_turns_keep_their_models_for_several_turns(both: Pair) -> None:
    """Three agents with a model each ask again as soon as they are answered: at least three answers a load
    (strict order has one), and nobody waits longer than the bound.
    """
    models = ("a", "b", "c")
    for model in models:
        both.forget_journal(model)
    over = time.monotonic() + 7
    waits: list[float] = []

    async def agent(model: str, gateway: int) -> None:
        while time.monotonic() < over:
            began = time.monotonic()
            await both.chat(model, gateway)
            waits.append(time.monotonic() - began)

    await asyncio.gather(*(agent(m, k % 2) for k, m in enumerate(models)))
    started = sum(both.events(model).count("start") for model in models)
    assert len(waits) >= 3 * started, (len(waits), started)
    # Two entries before it, each with its max-wait, rest, stop and load, on a machine that is busy.
    assert max(waits) < 2 * (MAX_WAIT_S + 2)
    await both.settled()


async def test_c27_a_load_nobody_waits_for_makes_room(both: Pair) -> None:
    """Leave while A loads without end, then ask for another, before which a busy model would not go for long:
    A's load is given up in good order, the other is served.
    """
    both.forget_journal("a")
    await both.clear("a")
    both.knobs("a", hang="loading")
    wrong = asyncio.create_task(both.ask("a", 0))
    await both.state("a", "loading")
    wrong.cancel()
    await asyncio.wait([wrong])
    await both.tickets_are("a", 0)
    began = time.monotonic()
    await both.chat("calm-1", 1)
    assert time.monotonic() - began < CALM_WAIT_S, "it waited as for a busy model"
    status = await both.state("a", "stopped")
    assert (status["end_class"], "failed" in status) == ("abandoned", False)
    assert "request" not in both.events("a")
    both.knobs("a")
    await both.settled()


async def test_c33_an_unload_ends_a_load_at_once(both: Pair) -> None:
    """Order a load that takes for ever, and B behind it; unload the first: gone without failure, B loads."""
    both.knobs("a", hang="loading")
    assert (await both.one.post("/models/load", json={"model": "a"})).status_code == 200
    await both.state("a", "loading")
    second = asyncio.create_task(both.chat("b", 1))
    await both.waiting("b", "starting_others", "behind")
    began = time.monotonic()
    assert (await both.two.post("/models/unload", json={"model": "a"})).status_code == 200
    status = await both.state("a", "stopped")
    assert ("failed" in status, status["value"]) == (False, "unloaded")
    await second
    assert time.monotonic() - began < 15
    both.knobs("a")
    await both.settled()


async def test_c37_c42_loads_are_watched_for_progress_and_not_for_time(both: Pair) -> None:
    """A load without progress fails naming the limit, and the next request tries again; one that takes three
    times as long and makes progress is served.
    """
    both.knobs("a", hang="loading", stall=True)
    first = await both.ask("a", 0)
    error = first.json()["error"]
    assert (first.status_code, error["reason"]) == (503, "stalled")
    assert f"{STALL_S:g} s (stall-timeout)" in error["message"]
    status = await both.state("a", "failed")
    assert (status["end_class"], status["failed"]) == ("failed_to_start", True)
    both.knobs("a", load_seconds=3 * STALL_S, load_steps=15)
    again = await both.chat("a", 1)
    assert int(again.headers["x-llamastead-load-ms"]) > 3000 * STALL_S
    both.knobs("a")
    await both.settled()


async def test_c39_one_bad_start_is_tried_again_and_a_missing_file_is_not(both: Pair) -> None:
    """A stub that fails its first start only: its client waits longer. A file that it can't open, as one that
    went since the supervisor looked, fails at once.
    """
    await both.clear("c", "d")
    both.forget_journal("c")
    both.knobs("c", crash="loading", crash_once=True)
    await both.chat("c", 1)
    assert both.events("c").count("start") == 2
    missing = "gguf_init_from_file: failed to open GGUF file 'd.gguf' (No such file or directory)"
    both.knobs("d", crash="loading", crash_text=missing)
    both.forget_journal("d")
    answer = await both.ask("d", 0)
    assert (answer.status_code, answer.json()["error"]["end_class"]) == (500, "failed_to_start")
    assert any("failed to open GGUF file" in line for line in answer.json()["error"]["log"])
    assert both.events("d").count("start") == 1
    again = await both.ask("d", 1)
    assert again.json()["error"]["reason"] == "doomed"
    assert int(again.headers["retry-after"]) >= 1
    assert both.events("d").count("start") == 1
    both.knobs("c")
    both.knobs("d")
    await both.settled()


async def test_r6_requests_at_any_point_of_a_stop_are_answered(both: Pair) -> None:
    """Unload A while a stream holds it and requests for it arrive at both gateways: while it drains, stops
    and is gone, all are answered, by another instance in the end.
    """
    await both.clear("a")
    gate = both.file("a", "stop-gate")
    both.knobs("a", token_gate=str(gate))
    sent: list[asyncio.Task[object]] = []

    def send() -> None:
        # All may have to wait for the next instance: so many, and not more than may wait.
        if sum(not each.done() for each in sent) < 100:
            sent.extend(asyncio.create_task(both.chat("a", gateway)) for gateway in (0, 1))

    async with both.stream("a", 0) as stream:
        instance = (await both.made.instance("a"))["id"]
        assert (await both.one.post("/models/unload", json={"model": "a"})).status_code == 200
        await both.state("a", "draining")
        send()
        await both.tickets_are("a", 2)
        gate.touch()
        assert (await stream.rest()).endswith(DONE)

    async def swapped() -> bool:
        send()
        now = await both.made.instance("a")
        return now.get("state") == "ready" and now["id"] != instance

    await until(swapped, "another instance of A")
    await asyncio.gather(*sent)
    assert len(sent) >= 4
    both.knobs("a")
    await both.settled()


async def test_r8_a_busy_model_does_not_starve_another(both: Pair) -> None:
    """Keep A busy without a gap through both gateways and ask for B: served within max-wait, rest, stop and
    load; A's clients are never cut.
    """
    await both.clear("a")
    both.knobs("a", token_seconds=0.1)
    await both.chat("a")
    asking = True

    async def keep_busy(gateway: int) -> int:
        served = 0
        while asking:
            await both.chat("a", gateway, tokens=2)
            served += 1
        return served

    # Six times as many as it answers at a time: it is busy for half a second, too, in which we are not let
    # run, and would else be idle and go at once.
    hot = [asyncio.create_task(keep_busy(k % 2)) for k in range(24)]
    began = time.monotonic()
    cold = asyncio.create_task(both.chat("b", 1))
    entry = await both.waiting("b", "busy")
    assert entry["blockers"][0]["model"] == "a"
    await cold
    waited = time.monotonic() - began
    assert MAX_WAIT_S * 0.9 < waited < MAX_WAIT_S + 3
    # Its own key outranks the herd's: this one has busy models drained sooner.
    instance = (await ready(both.made, "a"))["id"]
    began = time.monotonic()
    eager = asyncio.create_task(both.chat("eager", 0))

    async def leaves() -> bool:
        now = await both.made.instance("a")
        return now.get("id") != instance or now.get("state") != "ready"

    await until(leaves, "A to be drained")
    assert time.monotonic() - began < MAX_WAIT_S
    await eager
    asking = False
    assert min(await asyncio.gather(*hot)) >= 1
    both.knobs("a")
    await both.settled()


async def test_the_queue_tells_everybody_why_they_wait(both: Pair) -> None:
    """Two streams on A, one through each gateway, hold up two models and a prior one: place, reason,
    numbers and time are in GET /queue of both gateways, the command, log and events, with request ids.
    """
    gate = both.file("a", "gate")
    await both.clear("a")
    both.knobs("a", token_gate=str(gate))
    async with both.stream("a", 0) as first, both.stream("a", 1) as second:
        later = [asyncio.create_task(both.chat("calm-1", 0, headers={"x-request-id": "why-c"}))]
        await both.waiting("calm-1", "busy")
        later.append(asyncio.create_task(both.chat("calm-2", 1)))
        await both.waiting("calm-2")
        later.append(asyncio.create_task(both.chat("vip", 1)))
        await both.waiting("vip")

        async def told() -> bool:
            # What the other gateway answers is known from its last heartbeat.
            entries = [await both.entry("vip", gateway) for gateway in (0, 1)]
            return [b["in_flight"] for entry in entries for b in entry.get("blockers", [])[:1]] == [2, 2]

        await until(told, "two requests in flight")

        async def explained() -> list[dict[str, Any]]:
            # The supervisor writes the reason of one entry after the other.
            entries = await both.queue(1)
            return entries if [e["reason"] for e in entries] == ["busy", "behind", "behind"] else []

        entries = await until(explained, "the reasons of all three")
        assert [(e["position"], e["model"]) for e in entries] == [(1, "vip"), (2, "calm-1"), (3, "calm-2")]
        assert [len(e["requests"]) for e in entries] == [1, 1, 1]
        assert entries[1]["requests"][0]["request_id"] == "why-c"
        first_entry = entries[0]
        seconds = f"{first_entry['left_ms'] / 1000:.0f}"
        assert first_entry["wait"] == f"waits for a: 2 requests in flight, drains in {seconds} s"
        assert 0 < first_entry["left_ms"] <= CALM_WAIT_S * 1000
        code, out, _ = await both.made.command("queue", "--url", f"http://127.0.0.1:{both.made.ports[0]}")
        assert code == 0
        assert "waits for a: 2 requests in flight, drains in" in out
        assert [line.split()[:2] for line in out.splitlines()[1:]] == [
            ["1", "vip"],
            ["2", "calm-1"],
            ["3", "calm-2"],
        ]
        gate.touch()
        assert (await first.rest()).endswith(DONE)
        assert (await second.rest()).endswith(DONE)
    await asyncio.gather(*later)
    waits = await both.told("wait", model="calm-1", reason="busy", request_ids='["why-c"]')
    assert any(event["wait"].startswith("waits for a, in use, drains in") for event in waits)
    assert 'reason=busy why="waits for a, in use' in both.made.roles["supervisor"].output()
    decided = await both.told("decision", model="calm-1")
    assert any(json.loads(event["request_ids"]) == ["why-c"] for event in decided)
    assert all("vip: " in event["candidates"] or "calm-2: " in event["candidates"] for event in decided[-1:])
    both.knobs("a")
    await both.settled()


async def test_c84_probes_that_forbid_a_load_cause_none(both: Pair) -> None:
    """Probe all models with real prompts that say not to load, beside a user of A: refused without a load,
    and the user's model stays.
    """
    await both.clear("a")
    before = (await both.chat("a")).headers["x-llamastead-instance"]
    loads = {model: await both.loads(model) for model in ("b", "c", "d", "eager", "vip")}
    for k in range(3):
        for model in loads:
            words = {"headers": {"x-llamastead-autoload": "false"}} if k % 2 else {}
            target = "/v1/chat/completions" + ("" if k % 2 else "?autoload=false")
            body = {"model": model, "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
            probe = await both.gateways()[k % 2].post(target, json=body, **words)
            refused = (503 if k % 2 else 400, "model is not loaded")
            assert (probe.status_code, probe.json()["error"]["message"]) == refused
        answer = await both.chat("a", k % 2)
        assert answer.headers["x-llamastead-instance"] == before
    assert {model: await both.loads(model) for model in loads} == loads
    await both.settled()


async def test_r5_a_supervisor_that_stands_still_fails_its_health_check(both: Pair) -> None:
    """Stop the supervisor's process while a request waits: the container's check fails and doctor says why;
    it goes on: the request is served, the check passes.
    """
    await both.clear("a")
    url = both.made.run_dir.parent / "redis-url"
    url.write_text(both.made.redis_url)

    async def check() -> int:
        check = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HEALTHY),
            "supervisor",
            env={**os.environ, "LLAMASTEAD_REDIS_URL_FILE": str(url)},
        )
        return await check.wait()

    async def doctor() -> dict[str, str]:
        _, out, _ = await both.made.command("doctor", "--json")
        return next(finding for finding in json.loads(out) if finding["what"] == "supervisor")

    async def passes() -> bool:
        return await check() == 0

    await until(passes, "the health check to pass")
    assert (await doctor())["verdict"] == "ok"
    pid = both.made.roles["supervisor"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        asked = asyncio.create_task(both.chat("a"))
        await both.tickets_are("a", 1)

        async def fails() -> bool:
            return await check() != 0

        await until(fails, "the health check to fail")
        found = await doctor()
        assert (found["verdict"], f"pid {pid}" in found["text"]) == ("warn", True)
    finally:
        os.kill(pid, signal.SIGCONT)
    await asked
    await until(passes, "the health check to pass again")
    await both.settled()


async def test_a_herd_that_can_not_load_what_it_shall_does_not_start() -> None:
    """Ask for two models at start and room for one: exit code 78 and a line that says so."""
    async with herd() as made:
        made.add_models("p", "q")
        preset = made.run_dir.parent / "models.ini"
        text = sections("p", "q", load_on_startup="true").replace("{models}", str(made.models))
        preset.write_text(text)
        engine = str(stub_engine(made.run_dir.parent))
        words = ("--models-preset", str(preset), "--models-max", "1", "--engine", engine)
        role = await made.role("up", "up", "--port", "0", *words)
        assert role.process is not None
        assert await asyncio.wait_for(role.process.wait(), 30) == 78
        assert "number of models to load on startup (2) exceeds models_max (1)" in role.output()
