"""Figures of a loaded model: short requests, streams, uploads; what runs when nobody asks."""

import asyncio

from bench.client import Load, ask, post, quantile, repeat, stream
from bench.proc import cpu_seconds, resident_bytes
from bench.results import GENERATOR, Gate, Results, at_least, at_most, below
from bench.subjects import Subject, installed
from bench.wrk import repeat_with_wrk
from llamastead.shared.store.connect import connect

WARM_UP_S = 0.2
_TOKENIZE = ("/tokenize", {"model": "a", "content": "Hello, herd of llamas."})
_SHORT_GATES: dict[tuple[str, int], Gate] = {
    ("CPU", 16): at_most(1 / 3),
    ("rate", 16): at_least(2.5),
    ("p50", 1): at_most(0.5),
}


def chat(tokens: int) -> bytes:
    """Return a request for a streamed chat answer of so many tokens."""
    document = {
        "model": "a",
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "Tell me about llamas."}],
    }
    return post("/v1/chat/completions", document, close=True)


def uses_wrk(seconds: float) -> bool:
    """Tell whether wrk makes the load of so many seconds: where it is installed, it counts in whole ones."""
    return seconds >= 1 and installed("wrk")


async def load_tokenize(port: int, connections: int, seconds: float) -> Load:
    """Ask `/tokenize` over and over, on so many connections."""
    if uses_wrk(seconds):
        return await repeat_with_wrk(port, *_TOKENIZE, connections, seconds)
    return await repeat(port, post(*_TOKENIZE), connections, seconds)


async def short_requests(subject: Subject, connections: int, seconds: float, results: Results) -> None:
    """Ask on so many connections: requests per second, latencies, CPU per request, the generator's share."""
    await repeat(subject.port, post(*_TOKENIZE), connections, WARM_UP_S)
    pids = subject.pids()
    before = cpu_seconds(pids)
    load = await load_tokenize(subject.port, connections, seconds)
    used = cpu_seconds(pids) - before
    if load.errors:
        results.remarks.append(f"{subject.name}: {load.errors} of {load.done} short requests failed")
    row = f"short, {connections} connections"
    gates = {kind: _SHORT_GATES.get((kind, connections)) for kind in ("rate", "p50", "CPU")}
    results.note(f"{row}: rate", "req/s", subject.name, load.done / load.seconds, gates["rate"])
    results.note(f"{row}: p50", "ms", subject.name, load.p50 * 1e3, gates["p50"])
    results.note(f"{row}: p99", "ms", subject.name, load.p99 * 1e3)
    if pids:
        results.note(f"{row}: CPU per request", "µs", subject.name, used / load.done * 1e6, gates["CPU"])
    share = load.busy / load.seconds * 100
    results.note(f"{row}: {GENERATOR}", "% of a core", subject.name, share)


async def redis_calls(subject: Subject, seconds: float, results: Results) -> None:
    """Count Redis's commands, those inside scripts included, while short requests run."""
    assert subject.run_dir is not None
    redis = connect(f"unix://{subject.run_dir}/redis/valkey.sock")
    try:
        before = _calls(await redis.info("commandstats"))
        load = await load_tokenize(subject.port, 16, seconds)
        calls = _calls(await redis.info("commandstats")) - before
    finally:
        await redis.aclose()
    results.note("Redis commands per warm request", "", subject.name, calls / load.done, below(0.1, ""))


def _calls(stats: dict[str, dict[str, int]]) -> int:
    return sum(found["calls"] for name, found in stats.items() if name != "cmdstat_info")


async def streamed_chat(
    subject: Subject, at_once: int, seconds: float, tokens: int, results: Results
) -> None:
    """Read so many streams at once: events per second, CPU per event, time to the first, gaps between."""
    request = chat(tokens)
    pids = subject.pids()
    before = cpu_seconds(pids)
    found = await stream(subject.port, request, at_once, seconds)
    used = cpu_seconds(pids) - before
    results.cut[subject.name] += found.cut
    if not found.gaps:
        results.remarks.append(f"{subject.name}: no two events of a stream in {seconds:g} s: failed")
        return
    row = f"chat, {at_once} streams"
    results.note(f"{row}: rate", "events/s", subject.name, found.events / found.seconds)
    first = quantile(found.first, 0.5) * 1e3
    results.note(f"{row}: first event p50", "ms", subject.name, first, at_most(1.0) if at_once == 1 else None)
    results.note(f"{row}: gap p50", "ms", subject.name, quantile(found.gaps, 0.5) * 1e3)
    results.note(f"{row}: gap p99", "ms", subject.name, quantile(found.gaps, 0.99) * 1e3)
    if pids:
        results.note(f"{row}: CPU per event", "µs", subject.name, used / found.events * 1e6, at_most(1.0))


async def uploads(subject: Subject, mebibytes: int, times: int, results: Results) -> None:
    """Send large bodies that cost the engine little: CPU per MiB, and how long one takes."""
    request = post(
        "/tokenize", {"content": "Hello.", "padding": "A" * (mebibytes << 20), "model": "a"}, close=True
    )
    pids = subject.pids()
    before = cpu_seconds(pids)
    answers = [await ask(subject.port, request) for _ in range(times)]
    used = cpu_seconds(pids) - before
    if any(answer.status != 200 for answer in answers):
        results.remarks.append(f"{subject.name}: an upload was answered {answers[-1].status}")
    row = f"upload of {mebibytes} MiB"
    took = quantile([answer.total_s for answer in answers], 0.5)
    results.note(f"{row}: time", "ms", subject.name, took * 1e3)
    if pids:
        results.note(f"{row}: CPU per MiB", "ms", subject.name, used / times / mebibytes * 1e3)


async def idle(subject: Subject, seconds: float, results: Results) -> None:
    """Watch what runs while nobody asks: CPU as a share of one core, resident memory."""
    parts = subject.parts()
    before = {role: cpu_seconds(pids) for role, pids in parts.items()}
    await asyncio.sleep(seconds)
    used = {role: (cpu_seconds(pids) - before[role]) / seconds * 100 for role, pids in parts.items()}
    memory = {role: resident_bytes(pids) / (1 << 20) for role, pids in parts.items()}
    herd = subject.name == "llamastead"
    gate = below(1.0, "%") if herd else None
    results.note("idle CPU", "% of a core", subject.name, sum(used.values()), gate)
    results.note("resident memory", "MiB", subject.name, sum(memory.values()))
    if not herd:
        return
    for role, share in used.items():
        results.note(f"idle CPU: {role}", "% of a core", subject.name, share)
        results.note(f"resident memory: {role}", "MiB", subject.name, memory[role])
    python = sum(memory.get(role, 0.0) for role in ("gateway", "supervisor", "worker"))
    row = "resident memory: gateway, supervisor and worker"
    results.note(row, "MiB", subject.name, python, below(250, "MiB"))
