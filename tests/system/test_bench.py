"""The benchmark measures what it says, on the smallest plan, and leaves nothing behind."""

import json
import os

from bench.plan import Plan
from bench.report import added_sections, to_json, to_markdown
from bench.results import Results, at_most, below
from bench.run import measure
from llamastead.up.processes import descendants_of

TINY = Plan(
    rounds=1,
    seconds=0.5,
    connections=(2,),
    streams=(2,),
    tokens=5,
    upload_mib=1,
    uploads=1,
    loads=1,
    crowd=4,
    models=20,
    idle_s=0.2,
    limit_s=60.0,
)
ROWS = {
    "short, 2 connections: rate",
    "short, 2 connections: CPU per request",
    "chat, 2 streams: rate",
    "chat, 2 streams: first event p50",
    "upload of 1 MiB: time",
    "Redis commands per warm request",
    "idle CPU",
    "resident memory: gateway, supervisor and worker",
    "cold start: request to answer",
    "swap A to B: request to answer",
    "4 requests at once for a cold model: last answer",
    "listing 20 models: time",
}


async def test_one_small_run_gives_every_figure_of_router_and_llamastead() -> None:
    """All is started, measured and stopped once: positive figures for both, and no process is left."""
    before = descendants_of(os.getpid(), set())
    results = Results()
    await measure(TINY, results)
    assert results.figures.keys() >= ROWS
    for name, figure in results.figures.items():
        medians = figure.medians
        if name.endswith(": failed"):
            assert set(medians.values()) == {0}, name
        elif name.endswith((": time", ": rate", "answer", "p50")):
            assert medians["llamastead"] > 0, name
            assert medians["router"] > 0, name
    assert not [remark for remark in results.remarks if "failed" in remark or "answered" in remark]
    assert json.loads(to_json(results))["figures"][0]["medians"].keys() >= {"direct", "router", "llamastead"}
    page = to_markdown(results, "2026-01-01")
    assert "| cold start: request to answer |" in page
    assert added_sections(page) == ""
    assert added_sections(page + "\n## Notes\n\nStays.\n") == "\n## Notes\n\nStays.\n"
    assert descendants_of(os.getpid(), set()) <= before


def test_gates_compare_medians_and_say_nothing_without_values() -> None:
    """A gate over two subjects: met, not met, and undecided while one of them is missing."""
    results = Results()
    results.note("a", "ms", "direct", 0.1)
    results.note("a", "ms", "llamastead", 1.0, at_most(0.5))
    assert results.figures["a"].holds is None
    for value in (1.0, 2.0, 99.0):
        results.note("a", "ms", "router", value)
    results.note("b", "ms", "llamastead", 3.0, below(2.0, "ms"))
    assert results.figures["a"].holds is True
    assert results.figures["a"].ratio == 0.5
    assert results.failed == [results.figures["b"]]
