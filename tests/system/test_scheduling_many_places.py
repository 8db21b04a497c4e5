"""Two gateways and room for several models: idle ends, pins, sleepers, broken and hung engines, limits."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from herd import KEYS, until
from pair import DONE, Pair, pair, sections

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNLOAD_AFTER_S = 2.0
QUEUE_TIMEOUT_S = 8.0
PRESET = (
    sections("a", "b", "c")
    + sections("silent", "chatty", unload_after=str(UNLOAD_AFTER_S))
    + sections("sleeper", unload_after="4", sleep_idle_seconds="1")
    + "".join(
        f"[{name}]\nmodel = {{models}}/base.gguf\nctx-size = {size}\npin = true\n"
        for name, size in (("pin-1", 256), ("pin-2", 512))
    )
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Pair]:
    """Room for four, a health probe every half second, short queues."""
    env = {
        "LLAMASTEAD_REREAD": "0.5",
        "LLAMASTEAD_STOP_TIMEOUT": "2",
        "LLAMASTEAD_QUEUE_LIMIT": "25",
        "LLAMASTEAD_QUEUE_LIMIT_TOTAL": "30",
        "LLAMASTEAD_QUEUE_TIMEOUT": str(QUEUE_TIMEOUT_S),
    }
    async with pair(PRESET, "--models-max", "4", env=env, files=("base",)) as made:
        yield made


async def test_c15_c16_c79_only_inference_counts_and_its_end_starts_the_clock(both: Pair) -> None:
    """At once: an answer that is silent for longer than unload-after (C15), a question right after a long one
    (C16), and a sleeper whose metrics are scraped all the time (C79); each goes when it is due, not before.
    """

    async def unloaded(model: str, busy_s: float, after_s: float) -> None:
        """Wait for its end, which comes so long after the last request, which took `busy_s` at least."""
        status = await both.state(model, "stopped", patience_s=after_s + 15)
        assert status["end_class"] == "idle"
        last = max(entry["t"] for entry in both.journal(model) if entry["event"] == "request")
        (told,) = [entry["t"] for entry in both.journal(model) if entry["event"] == "exit_line"]
        assert told - last - busy_s >= after_s * 0.9

    async def silent() -> None:
        both.knobs("silent", prompt_seconds=2 * UNLOAD_AFTER_S)
        async with both.stream("silent", 0) as stream:
            assert (await stream.rest()).endswith(DONE)
        await unloaded("silent", 2 * UNLOAD_AFTER_S, UNLOAD_AFTER_S)

    async def chatty() -> None:
        both.knobs("chatty", token_seconds=UNLOAD_AFTER_S / 4)
        first = await both.chat("chatty", 0, tokens=8)
        await asyncio.sleep(UNLOAD_AFTER_S / 4)  # a person reads
        second = await both.chat("chatty", 1, tokens=1)
        ids = [answer.headers["x-llamastead-instance"] for answer in (first, second)]
        assert (ids[0] == ids[1], second.headers["x-llamastead-path"]) == (True, "hot")
        await unloaded("chatty", 0.0, UNLOAD_AFTER_S)

    async def scraped() -> None:
        await both.chat("sleeper", 0)
        seen = set()

        async def look() -> bool:
            for path in ("/metrics", "/props", "/slots", "/lora-adapters"):
                answer = await both.two.get(path, params={"model": "sleeper"})
                asleep = answer.status_code == 400 and "not loaded" in answer.text
                assert asleep or answer.status_code in (200, 404), answer.text
            status = await both.status("sleeper", 1)
            seen.add(status["state"])
            assert status["asleep"] == (status["value"] == "sleeping")
            # This gateway's copy may be of before the load that the other one had done.
            return status["state"] == "stopped" and len(seen) > 1

        await until(look, "the sleeper unloaded", 4 * 5)
        (used,) = [entry["t"] for entry in both.journal("sleeper") if entry["event"] == "request"]
        (told,) = [entry["t"] for entry in both.journal("sleeper") if entry["event"] == "exit_line"]
        assert 4 * 0.9 <= told - used < 4 * 5
        assert {"ready", "sleeping"} <= seen, seen
        assert "waking" not in seen, seen
        assert both.events("sleeper").count("ready") == 1, "a read woke it"

    await asyncio.gather(silent(), chatty(), scraped())
    await both.settled()


async def test_c18_c48_pinned_presets_of_one_file_both_stay(both: Pair) -> None:
    """Ask for both pinned presets and for more models than there is room: pins stay, the others take turns;
    the list says of each what it is and what keeps it.
    """
    pins = ("pin-1", "pin-2")
    first = {pin: (await both.chat(pin, k)).headers["x-llamastead-instance"] for k, pin in enumerate(pins)}
    for k, model in enumerate("abcabc"):
        await both.chat(model, k % 2)
        await both.chat(pins[k % 2], k % 2)
    for pin in pins:
        assert (await both.chat(pin)).headers["x-llamastead-instance"] == first[pin]
        assert await both.loads(pin) == 1

        async def pinned(pin: str = pin) -> bool:
            status = await both.status(pin)
            assert (status["resident"], status["ready"], status["asleep"]) == (True, True, False)
            return (status.get("evictable"), status.get("spared")) == (False, "pinned")

        await until(pinned, f"{pin} to be shown as pinned")
        assert (await both.status(pin))["pid"] == int((await both.made.instance(pin))["pid"])

    async def may_go() -> bool:
        return bool((await both.status("c")).get("evictable"))

    await until(may_go, "the idle c to be evictable")
    gone = await both.status("silent")
    assert (gone["configured"], gone["resident"], "evictable" in gone, "pid" in gone) == (
        True,
        False,
        False,
        False,
    )
    assert (await both.two.get("/props")).json()["models_autoload"] is True
    await both.clear(*pins)
    await both.settled()


async def test_c19_options_of_requests_never_reload(both: Pair) -> None:
    """Twenty requests that differ in sampling and context hints, through both gateways: one load."""
    await both.clear("a")
    loads = await both.loads("a")
    wishes = [{"temperature": k / 10, "top_k": k, "num_ctx": 256 * k, "n_ctx": 128 * k} for k in range(20)]
    answers = await asyncio.gather(*(both.chat("a", k % 2, **wish) for k, wish in enumerate(wishes)))
    assert len({answer.headers["x-llamastead-instance"] for answer in answers}) == 1
    assert await both.loads("a") == loads + 1
    await both.settled()


async def test_c25_a_hung_engine_hurts_only_its_own_requests(both: Pair) -> None:
    """Stop A's process and send fifty requests to it, then ten to B: B is as quick as ever, A is found out,
    its requests end in an error, and it serves again.
    """
    await asyncio.gather(both.chat("a"), both.chat("b"))
    hung = int((await both.made.instance("a"))["pid"])
    os.kill(hung, signal.SIGSTOP)
    stuck = [asyncio.create_task(both.ask("a", k % 2)) for k in range(50)]
    began = time.monotonic()
    for k in range(10):
        assert (await both.chat("b", k % 2)).headers["x-llamastead-path"] == "hot"
    assert time.monotonic() - began < 10
    answers = await asyncio.gather(*stuck)
    assert {answer.status_code for answer in answers} <= {200, 502, 503}
    failed = [answer.json()["error"] for answer in answers if answer.status_code == 502]
    assert failed
    assert all("the model's server gave no answer" in error["message"] for error in failed)
    # Its requests end before its process has.
    ended = await until(lambda: both.told("status", model="a", end_class="crashed"), "its end to be told")
    assert "did not answer /health 3 times" in ended[-1]["reason"]
    await both.chat("a", 1)
    # It may have been stopped while it served, and rightly so.
    both.file("a", f"serving.{hung}").unlink(missing_ok=True)
    await both.settled()


async def test_c34_a_killed_engine_is_noticed_and_loaded_once(both: Pair) -> None:
    """Kill A's idle engine: both gateways show it without a request; three requests share one fresh load."""
    await both.chat("a")
    await both.made.nothing_counted()
    loads = await both.loads("a")
    os.kill(int((await both.made.instance("a"))["pid"]), signal.SIGKILL)
    status = await both.state("a", "failed")
    assert (status["value"], status["end_class"]) == ("unloaded", "killed")
    await asyncio.gather(*(both.chat("a", k % 2) for k in range(3)))
    assert await both.loads("a") == loads + 1
    await both.settled()


async def test_c40_an_engine_that_only_answers_errors_is_broken(both: Pair) -> None:
    """Let A answer 500 to everything since its load, through both gateways: stopped after five, with a
    reason; one that is right proves itself.
    """
    await both.clear("a", "b")
    both.knobs("a", status=500)
    for k in range(5):
        assert (await both.ask("a", k % 2)).status_code == 500
    status = await both.state("a", "failed")
    assert status["failed"] is True
    assert status["reason"] == "answered 5 requests with errors and none right since its load"
    both.knobs("a")
    await both.chat("a", 1)
    async with both.made.redis() as redis:
        instance = (await both.made.instance("a"))["id"]
        await until(lambda: redis.hget(KEYS.instance(instance), "proven"), "A to have proved itself")
    await both.settled()


async def test_c160_c162_waiting_is_bounded_in_number_and_age(both: Pair) -> None:
    """Loads that never end collect requests: beyond a model's limit and beyond the total 429 names it, old
    ones end in 503; what takes no ticket is served all the while. /props tells the limits.
    """
    await both.clear("a", "b", "c")
    both.knobs("a", hang="loading")
    both.knobs("b", hang="loading")
    for client in both.gateways():
        limits = (await client.get("/props")).json()["llamastead"]
        assert (limits["queue_limit"], limits["queue_limit_total"]) == (25, 30)
        assert limits["queue_timeout"] == QUEUE_TIMEOUT_S
    await both.chat("c")
    began = time.monotonic()
    asked = [asyncio.create_task(both.ask("a", k % 2)) for k in range(25)]
    await both.tickets_are("a", 25)
    for gateway in (0, 1):
        refused = await both.ask("a", gateway)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        error = refused.json()["error"]
        assert (error["reason"], error["limit_name"], error["limit"]) == ("queue_full", "queue_limit", 25)
        assert int(refused.headers["retry-after"]) >= 1
    asked += [asyncio.create_task(both.ask("b", k % 2)) for k in range(5)]
    await both.tickets_are("b", 5)
    refused = await both.ask("b", 1)
    assert (refused.status_code, refused.json()["error"]["limit_name"]) == (429, "queue_limit_total")
    for path in (
        "/props",
        "/models",
        "/v1/models",
        "/queue",
        "/health",
        "/props?model=c",
        "/metrics?model=c",
    ):
        assert (await both.one.get(path)).status_code == 200, path
    tokens = await both.two.post("/tokenize", json={"model": "c", "content": "hi"})
    assert (tokens.status_code, tokens.headers["x-llamastead-path"]) == (200, "hot")
    answers = await asyncio.gather(*asked)
    assert time.monotonic() - began < QUEUE_TIMEOUT_S * 5
    errors = [(answer.status_code, answer.json()["error"]["reason"]) for answer in answers]
    assert set(errors) == {(503, "queue_timeout")}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    await both.clear("a", "b")
    both.knobs("a")
    both.knobs("b")
    await both.settled()


async def test_r4_ready_is_never_seen_without_the_claim_of_who_waited(both: Pair) -> None:
    """Look at state and leases in one transaction, over and over, while a load with a waiting stream ends."""
    await both.clear("a")
    gate, loaded = both.file("a", "gate"), both.file("a", "loaded")
    both.knobs("a", load_gate=str(loaded), token_gate=str(gate))
    looks: list[tuple[str, int]] = []

    async def stream() -> bytes:
        async with both.stream("a", 1) as begun:
            return await begun.rest()

    streaming = asyncio.create_task(stream())
    instance = (await until(lambda: _instance(both, "a"), "an instance"))["id"]
    async with both.made.redis() as redis:

        async def look() -> bool:
            async with redis.pipeline(transaction=True) as both_at_once:
                both_at_once.hget(KEYS.model("a"), "state")
                both_at_once.hlen(KEYS.leases(instance))
                state, leases = await both_at_once.execute()
            looks.append((state, leases))
            if state == "loading":
                loaded.touch()
            return sum(state == "ready" for state, _ in looks) > 20

        await until(look, "twenty looks at the ready model")
    assert {"loading", "ready"} <= {state for state, _ in looks}
    assert all(leases == 1 for state, leases in looks if state == "ready")
    gate.touch()
    assert (await streaming).endswith(DONE)
    both.knobs("a")
    await both.settled()


async def test_r12_lost_messages_cost_time_and_nothing_else(both: Pair) -> None:
    """Stop the supervisor while requests arrive and lose its commands, then the gateways while the model gets
    ready and lose their inboxes and events: all requests are served all the same, by that load.
    """
    await both.clear("a")
    gate = both.file("a", "gate")
    gate.unlink(missing_ok=True)
    both.knobs("a", load_gate=str(gate))
    loads = await both.loads("a")
    async with both.made.redis() as redis:
        with stopped(both, "supervisor"):
            asked = [asyncio.create_task(both.chat("a", k % 2)) for k in range(4)]
            await both.tickets_are("a", 4)
            await redis.xtrim(KEYS.commands, maxlen=0, approximate=False)
        await until(lambda: _instance(both, "a"), "a load that nobody told the supervisor of")
        # From there to its end is no time: gateways that stand still for long are swept, with their tickets.
        await both.state("a", "loading")
        with stopped(both, "gateway-1", "gateway-2"):
            gate.touch()
            await until(lambda: _is_ready(both, "a"), "A to be ready")
            inboxes = [name async for name in redis.scan_iter(match=KEYS.inbox("*"))]
            assert sum([await redis.xlen(name) for name in inboxes]) >= 2
            for name in (KEYS.events, *inboxes):
                await redis.xtrim(name, maxlen=0, approximate=False)
        await asyncio.gather(*asked)
    assert await both.loads("a") == loads + 1
    both.knobs("a")
    await both.settled()


@contextlib.contextmanager
def stopped(both: Pair, *roles: str) -> Iterator[None]:
    """Stop the processes of these roles, and let them go on afterwards."""
    pids = [both.made.roles[role].pid for role in roles]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def _is_ready(both: Pair, model: str) -> bool:
    return (await both.made.instance(model)).get("state") == "ready"


async def _instance(both: Pair, model: str) -> dict[str, str]:
    return await both.made.instance(model)
