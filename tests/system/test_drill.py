"""Drill and report against a real herd: three presets, room for two, which loads and stops happen."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from herd import QUICK, Herd, herd

pytestmark = pytest.mark.asyncio(loop_scope="module")

PRESET = """\
[*]
ctx-size = 2048
threads = 1
warmup = false
[A]
model = {models}/A.gguf
alias = first
[B]
model = {models}/B.gguf
hf-token = hf_secret
[C]
model = {models}/C.gguf
[vectors]
model = {models}/vectors.gguf
embeddings = true
pooling = mean
[ranks]
model = {models}/ranks.gguf
reranking = true
[broken]
model = {models}/broken.gguf
hidden = true
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd of real engines with room for two, and a model whose file is none."""
    async with herd(QUICK) as made:
        made.add_models("A", "B", "C", "vectors", "ranks")
        (made.models / "broken.gguf").write_bytes(b"GGUF, but no more than that")
        preset = made.models.parent / "models.ini"
        preset.write_text(PRESET.format(models=made.models))
        await made.up("--models-preset", str(preset), "--models-max", "2")
        yield made


async def drill(made: Herd, *words: str, code: int = 0) -> dict[str, Any]:
    """Start with nothing loaded, run a drill and return its record."""
    for model in ("A", "B", "C", "vectors", "ranks"):
        await made.unload(model)
    ended, out, err = await made.command("drill", *words, "--json")
    assert ended == code, err
    record: dict[str, Any] = json.loads(out)
    return record


def happened(step: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what was loaded and stopped during a step, in order; a stop with its class."""
    return [
        (event["model"], event.get("end_class", event["status"]))
        for event in step["events"]
        if event["status"] != "loading"
    ]


async def test_three_presets_with_room_for_two(stead: Herd) -> None:
    """Ask for A, B, C, A: four cold starts, the third stops A, the fourth B, and the report names each."""
    assert not (stead.run_dir / "drill.json").exists()
    record = await drill(stead, "A", "B", "C", "A")
    steps = record["steps"]
    assert [happened(step) for step in steps] == [
        [("A", "loaded")],
        [("B", "loaded")],
        [("A", "evicted"), ("C", "loaded")],
        [("B", "evicted"), ("A", "loaded")],
    ]
    assert [set(step["after"]) for step in steps] == [{"A"}, {"A", "B"}, {"B", "C"}, {"A", "C"}]
    assert [step["before"] for step in steps] == [{}, *(step["after"] for step in steps[:-1])]
    answers = [answer for step in steps for answer in step["answers"]]
    assert [(answer["path"], answer["error"]) for answer in answers] == [("cold", "")] * 4
    assert len({answer["process"]["pid"] for answer in answers}) == 4
    stopped = [event["instance"] for step in steps for event in step["events"] if "end_class" in event]
    assert stopped == [answers[0]["instance"], answers[1]["instance"]]
    for answer in answers:
        assert answer["process"]["rss_bytes"] > 2**20
        assert answer["load_ms"] <= answer["wait_ms"] <= answer["first_byte_ms"] <= answer["total_ms"]
    assert record["herd"]["limits"]["models_max"] == 2
    revisions = {entry["model"]: entry["revision"] for entry in record["presets"]}
    assert len({revisions[name] for name in "ABC"}) == 3

    back, before = answers[3]["instance"], answers[0]["instance"]
    code, report, _ = await stead.command("report")
    assert code == 0
    for line in (
        "4 of 4 requests were answered in full.",
        "Cold answers: 4 (A 2, B 1, C 1).",
        "Hot answers: none.",
        "Step 3: A was stopped (evicted), then C was loaded.",
        "Step 4: B was stopped (evicted), then A was loaded.",
        f"Step 4: A came back cold in a new process, {back}; {before} had ended in step 3.",
        "At the ends of the steps at most 2 models had a process; the limit is 2.",
        "No hot answer of: A, B, C.",
    ):
        assert f"- {line}\n" in report
    for fact in (*revisions.values(), record["herd"]["engine"], answers[0]["process"]["pid"]):
        assert f"| {fact} |" in report
    assert "hf-token" not in report  # it goes by environment, so that no list of processes shows it
    assert "hf_secret" not in report + json.dumps(record)


async def test_hot_and_at_once(stead: Herd, tmp_path: Path) -> None:
    """Ask for A twice, once by its alias, then for A and B at once: A stays hot in one process, B is cold."""
    record = await drill(stead, "A", "first", "A+B", "-o", str(tmp_path / "kept.json"))
    assert json.loads((tmp_path / "kept.json").read_text()) == record
    assert [[answer["path"] for answer in step["answers"]] for step in record["steps"]] == [
        ["cold"],
        ["hot"],
        ["hot", "cold"],
    ]
    assert [happened(step) for step in record["steps"]] == [[("A", "loaded")], [], [("B", "loaded")]]
    own = {a["process"]["pid"] for step in record["steps"] for a in step["answers"] if a["model"] == "A"}
    assert len(own) == 1
    code, out, _ = await stead.command("report", str(tmp_path / "kept.json"), "--json")
    assert code == 0
    figures = [(row["model"], row["path"], row["answers"]) for row in json.loads(out)["figures"]]
    assert figures == [("A", "cold", 1), ("A", "hot", 2), ("B", "cold", 1)]


async def test_each_kind_of_model_is_asked_what_it_can_answer(stead: Herd) -> None:
    """Drill a model of embeddings and one that ranks: both are answered in full."""
    record = await drill(stead, "vectors", "ranks", "vectors")
    answers = [answer for step in record["steps"] for answer in step["answers"]]
    assert [(answer["kind"], answer["path"]) for answer in answers] == [
        ("embedding", "cold"),
        ("rerank", "cold"),
        ("embedding", "hot"),
    ]


async def test_a_model_that_cannot_load_is_part_of_the_record(stead: Herd) -> None:
    """Drill A, a hidden model with a broken file, and A: exit code 1, the reason is kept, A is untouched."""
    record = await drill(stead, "A", "broken", "A", code=1)
    first, failed, last = (step["answers"][0] for step in record["steps"])
    assert failed["status"] == 500
    assert failed["error"]
    assert ("broken", "failed_to_start") in happened(record["steps"][1])
    assert (last["path"], last["instance"]) == ("hot", first["instance"])


async def test_a_herd_that_is_known_by_its_address(stead: Herd) -> None:
    """Drill by URL: the pid is known, its machine's memory is not, and the run folder is left alone."""
    kept = stead.run_dir / "drill.json"
    kept.write_text("of another drill")
    record = await drill(stead, "C", "C", "--url", f"127.0.0.1:{stead.ports[0]}")
    assert [step["answers"][0]["path"] for step in record["steps"]] == ["cold", "hot"]
    processes = [step["answers"][0]["process"] for step in record["steps"]]
    assert processes == [{"model": "C", "pid": int((await stead.instance("C"))["pid"])}] * 2
    assert record["memory"] is None
    assert kept.read_text() == "of another drill"


async def test_an_unknown_model_ends_it_before_it_begins(stead: Herd) -> None:
    """Name a model that is not there as the last step: refused by name, and A was not loaded for it."""
    await stead.unload("A")
    code, out, err = await stead.command("drill", "A", "nope")
    assert (code, out, err) == (
        1,
        "",
        "llamastead: model 'nope' not found: `llamastead ps` lists the names\n",
    )
    assert (await stead.status("A"))["value"] == "unloaded"
