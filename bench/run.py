"""One run: subjects start together and take turns, so that what disturbs one disturbs all alike."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench import cold, warm
from bench.models import write_models
from bench.plan import Plan
from bench.results import Gate, Results
from bench.subjects import Subject, Workshop, installed
from llamastead.supervisor.engine import find_engine

CORES_FOR_SCALING = 4  # two gateways, the engine and the load generator
PLAIN_PROXIES = ("nginx", "caddy", "httpx")


async def measure(plan: Plan, results: Results) -> None:
    """Start everything, measure into `results`, stop everything.

    Raises TimeoutError after the plan's limit: what was measured until then stands.
    """
    engine = await asyncio.to_thread(find_engine, None)
    generator = "wrk" if warm.uses_wrk(plan.seconds) else "bench/client.py"
    busy = f"load average before the run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    results.remarks += [f"engine: llama-server {engine.version}", f"load generator: {generator}", busy]
    with tempfile.TemporaryDirectory(prefix="lb", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        workshop = Workshop(engine.path, write_models(Path(scratch), "a", "b"), Path(scratch))
        async with asyncio.timeout(plan.limit_s):
            async with _everybody(workshop, results) as subjects:
                await _warm(plan, subjects, results)
                routers = [subject for subject in subjects if subject.name in ("router", "llamastead")]
                await _cold(plan, workshop, routers, results)
            await _listing(plan, workshop, results)
            await _two_gateways(plan, workshop, results)


@asynccontextmanager
async def _everybody(workshop: Workshop, results: Results) -> AsyncIterator[list[Subject]]:
    """Start all subjects and have their model loaded."""
    async with AsyncExitStack() as stack:
        direct = await stack.enter_async_context(workshop.direct())
        subjects = [direct]
        subjects.append(await stack.enter_async_context(workshop.router()))
        subjects.append(await stack.enter_async_context(workshop.llamastead()))
        for name in PLAIN_PROXIES:
            if name == "httpx" or installed(name):
                subjects.append(await stack.enter_async_context(workshop.proxy(name, direct.port)))
            else:
                results.remarks.append(f"{name}: not installed, skipped")
        for subject in subjects:
            await cold.served(subject, "a")
        yield subjects


async def _warm(plan: Plan, subjects: Sequence[Subject], results: Results) -> None:
    for connections in plan.connections:
        for subject in _rounds(plan, subjects):
            await _tried(subject, warm.short_requests(subject, connections, plan.seconds, results), results)
    for at_once in plan.streams:
        for subject in _rounds(plan, subjects):
            await _tried(
                subject,
                warm.streamed_chat(subject, at_once, plan.seconds, plan.tokens, results),
                results,
            )
    for subject in subjects:
        await _tried(subject, warm.uploads(subject, plan.upload_mib, plan.uploads, results), results)
    for subject in subjects:
        if subject.run_dir is not None:
            await _tried(subject, warm.redis_calls(subject, plan.seconds, results), results)
    for subject in subjects:
        if subject.parts():
            await warm.idle(subject, plan.idle_s, results)


async def _cold(plan: Plan, workshop: Workshop, routers: Sequence[Subject], results: Results) -> None:
    for _ in range(plan.loads):
        await cold.engine_start(workshop, results)
        for subject in routers:
            await _tried(subject, cold.cold_start(subject, results), results)
        for subject in routers:
            await _tried(subject, cold.swap(subject, results), results)
    for subject in _rounds(plan, routers):
        await _tried(subject, cold.crowd(subject, plan.crowd, results), results)


async def _tried(subject: Subject, measuring: Awaitable[None], results: Results) -> None:
    """Measure; what a subject can't do is a remark and ends nothing."""
    try:
        await measuring
    except (TimeoutError, RuntimeError, OSError) as problem:
        results.remarks.append(f"{subject.name}: failed: {problem or type(problem).__name__}")


async def _listing(plan: Plan, workshop: Workshop, results: Results) -> None:
    model = workshop.models / "a.gguf"
    preset = ("--models-preset", cold.long_preset(workshop.folder / "many.ini", model, plan.models))
    async with workshop.router(*preset) as router, workshop.llamastead(*preset) as llamastead:
        for subject in _rounds(plan, (router, llamastead)):
            await _tried(subject, cold.listing(subject, plan.models, 10, results), results)


async def _two_gateways(plan: Plan, workshop: Workshop, results: Results) -> None:
    """Compare two gateway processes with one, where two more cores are left for the rest."""
    cores = len(os.sched_getaffinity(0))
    if cores < CORES_FOR_SCALING:
        results.remarks.append(f"two gateways: skipped, {cores} cores leave no room for the second one")
        return
    name = "two gateways"
    row = f"short, {max(plan.connections)} connections: rate"
    async with workshop.llamastead("--gateways", "2", name=name) as subject:
        await cold.served(subject, "a")
        for _ in range(plan.rounds):
            await _tried(
                subject,
                warm.short_requests(subject, max(plan.connections), plan.seconds, results),
                results,
            )
    results.figures[row].gate = Gate("two gateways ≥ 1.6 × one", lambda v: v[name] >= 1.6 * v["llamastead"])


def _rounds(plan: Plan, subjects: Sequence[Subject]) -> list[Subject]:
    return [subject for _ in range(plan.rounds) for subject in subjects]
