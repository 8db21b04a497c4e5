"""Figures of loads and swaps, and of long listings."""

import asyncio
import time
from pathlib import Path

from bench.client import Answer, ask, get, post, quantile
from bench.proc import cpu_seconds
from bench.results import Results, at_most_above
from bench.subjects import Subject, Workshop, until_listed

SPARE_S = 0.5  # Llamastead starts a new spare holder after each load; the router has nothing to wait for
PATIENCE_S = 30.0


async def engine_start(workshop: Workshop, results: Results) -> None:
    """Time the engine alone from its spawn to its first answer: what no router can undercut."""
    began = time.perf_counter()
    async with workshop.direct() as subject:
        await served(subject, "a")
        results.note("cold start: request to answer", "ms", subject.name, (time.perf_counter() - began) * 1e3)


async def cold_start(subject: Subject, results: Results) -> None:
    """Time a request for a model that isn't loaded, with nothing to stop first."""
    await unload(subject, "a")
    answer = await served(subject, "a")
    row = "cold start: request to answer"
    results.note(row, "ms", subject.name, answer.first_byte_s * 1e3, at_most_above(30, "ms"))


async def swap(subject: Subject, results: Results) -> None:
    """Time a request for B while A, idle, takes the only place."""
    await served(subject, "a")
    await asyncio.sleep(SPARE_S)
    answer = await served(subject, "b")
    results.note("swap A to B: request to answer", "ms", subject.name, answer.first_byte_s * 1e3)


async def crowd(subject: Subject, size: int, results: Results) -> None:
    """Ask for one cold model many times at once: until the last is answered, and how many fail."""
    await unload(subject, "a")
    began = time.perf_counter()
    asked = await asyncio.gather(
        *(ask(subject.port, _request("a")) for _ in range(size)), return_exceptions=True
    )
    took = time.perf_counter() - began
    failed = sum(isinstance(a, BaseException) or a.status != 200 for a in asked)
    row = f"{size} requests at once for a cold model"
    results.note(f"{row}: last answer", "ms", subject.name, took * 1e3)
    results.note(f"{row}: failed", "", subject.name, failed)


async def listing(subject: Subject, models: int, times: int, results: Results) -> None:
    """List a long registry, once all of it is there."""
    await until_listed(subject.name, subject.port, models)
    pids = subject.pids()
    before = cpu_seconds(pids)
    answers = [await ask(subject.port, get("/v1/models")) for _ in range(times)]
    used = cpu_seconds(pids) - before
    row = f"listing {models} models"
    results.note(f"{row}: time", "ms", subject.name, quantile([a.total_s for a in answers], 0.5) * 1e3)
    results.note(f"{row}: CPU", "ms", subject.name, used / times * 1e3)


def long_preset(path: Path, model: Path, models: int) -> Path:
    """Write a preset file with so many models, all of one file."""
    path.write_text("".join(f"[model-{number}]\nmodel = {model}\n\n" for number in range(models)))
    return path


async def unload(subject: Subject, model: str) -> None:
    """Unload a model and wait until it is, and whatever stands by for the next load is there."""
    await ask(subject.port, post("/models/unload", {"model": model}, close=True))
    until = time.monotonic() + PATIENCE_S
    while await _status(subject, model) != "unloaded":
        if time.monotonic() > until:
            raise TimeoutError(f"{subject.name}: '{model}' was not unloaded within {PATIENCE_S:.0f} s")
        await asyncio.sleep(0.02)
    await asyncio.sleep(SPARE_S)


async def _status(subject: Subject, model: str) -> str:
    entries = (await ask(subject.port, get("/models"))).entries()
    return next(str(entry["status"]["value"]) for entry in entries if entry["id"] == model)


async def served(subject: Subject, model: str) -> Answer:
    """Ask for a model, loaded or not; RuntimeError unless it is served."""
    answer = await ask(subject.port, _request(model))
    if answer.status != 200 or not answer.body:
        raise RuntimeError(f"{subject.name}: '{model}' was answered {answer.status}: {answer.body[:300]!r}")
    return answer


def _request(model: str) -> bytes:
    return post("/tokenize", {"model": model, "content": "Hello."}, close=True)
