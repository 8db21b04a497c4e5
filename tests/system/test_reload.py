"""The registry is read again by call, signal and file watch: only what changed is touched, nothing loads."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from herd import KEYS, instance_pids, until
from pair import DONE, Pair, pair, sections

pytestmark = pytest.mark.asyncio(loop_scope="module")

PRESET = sections("a", "b", "c", ctx_size="256") + sections("eager", load_on_startup="true")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Pair]:
    """Four models, one of them loaded at start, and sources that are looked at often."""
    async with pair(PRESET, "--models-max", "0", env={"LLAMASTEAD_WATCH": "0.1"}) as made:
        yield made


def ini(both: Pair) -> Path:
    """Return the preset file."""
    return both.made.run_dir.parent / "models.ini"


def write(both: Pair, text: str) -> None:
    """Replace the preset file as an editor does."""
    fresh = ini(both).with_suffix(".new")
    fresh.write_text(text.replace("{models}", str(both.made.models)))
    fresh.rename(ini(both))


async def revision(both: Pair) -> str:
    """Return the revision of the herd's registry."""
    async with both.made.redis() as redis:
        return str(await redis.hget(KEYS.herd, "registry_revision"))


async def moved_on(both: Pair, before: str) -> None:
    """Wait until the registry is another than `before`."""

    async def look() -> bool:
        return await revision(both) != before

    await until(look, "a new registry")


def starts(both: Pair, model: str) -> list[str]:
    """Return the context sizes that a model's engines were started with."""
    started = [entry["argv"] for entry in both.journal(model) if entry["event"] == "start"]
    return [argv[argv.index("--ctx-size") + 1] for argv in started if "--ctx-size" in argv]


async def test_c10_many_edits_and_reloads_at_once_start_nothing_twice(both: Pair) -> None:
    """Edit the file five times while a model of load-on-startup loads, and reload at both gateways at
    once: it is started once, and no other engine is (C10).
    """
    await both.state("eager", "ready")
    assert both.events("eager").count("start") == 1
    await both.clear("eager")
    gate = both.file("eager", "gate")
    both.knobs("eager", load_gate=str(gate))
    both.forget_journal("eager")
    await both.one.post("/models/load", json={"model": "eager"})
    await both.state("eager", "loading")
    edits = [PRESET + f"[extra-{number}]\nmodel = {{models}}/a.gguf\n" for number in range(5)]
    before = await revision(both)
    for text in edits:
        write(both, text)
    answers = await asyncio.gather(
        *(client.get("/models", params={"reload": "1"}) for client in both.gateways())
    )
    for answer in answers:
        names = {model["id"] for model in answer.json()["data"]}
        assert names == {"a", "b", "c", "eager", "extra-4"}
    await moved_on(both, before)
    assert (await both.status("eager"))["state"] == "loading"
    gate.touch()
    eager = await both.state("eager", "ready")
    assert both.events("eager").count("start") == 1
    assert instance_pids(both.made.run_dir) == [eager["pid"]]
    events = [event for event in await both.told("registry") if event["changes"] != "{}"]
    revisions = [event["revision"] for event in events]
    assert len(set(revisions)) == len(revisions), "the same registry was made the herd's twice"
    assert events[-1]["revision"] == await revision(both)
    assert not any(both.events(model) for model in "abc"), "a reload loaded something"


async def test_c108_a_stream_goes_on_while_other_models_come_and_go(both: Pair) -> None:
    """Stream on a; by file watch alone b appears anew, c disappears: a's process and stream stay (C108)."""
    write(both, sections("a", "c", "eager", ctx_size="256"))
    await until(lambda: _lists(both, "a", "c", "eager"), "three models")
    gate = both.file("a", "gate")
    both.knobs("a", token_gate=str(gate))
    async with both.stream("a") as stream:
        pid = (await both.state("a", "ready"))["pid"]
        write(both, sections("a", "b", "eager", ctx_size="256"))
        await until(lambda: _lists(both, "a", "b", "eager"), "b to appear and c to go")
        assert (await both.status("a"))["pid"] == pid
        gate.touch()
        assert (await stream.rest()).endswith(DONE)
    assert both.events("a").count("start") == 1
    await both.clear("a")


async def test_c109_a_changed_preset_holds_from_the_next_load_on(both: Pair) -> None:
    """Change loaded a and unloaded b, by SIGHUP and by call: a is marked and keeps its process (C109)."""
    write(both, sections("a", "b", ctx_size="256") + sections("eager"))
    await _reload(both.one)
    both.knobs("a")
    await both.chat("a")
    pid, before = (await both.state("a", "ready"))["pid"], await revision(both)
    write(both, sections("a", "b", ctx_size="512") + sections("eager"))
    process = both.made.roles["supervisor"].process
    assert process is not None
    os.kill(process.pid, signal.SIGHUP)
    await moved_on(both, before)
    await _reload(both.one)
    (event,) = [e for e in await both.told("registry") if e["previous"] == before]
    assert json.loads(event["changes"])["changed"] == {"a": ["ctx-size"], "b": ["ctx-size"]}

    async def marked() -> bool:
        status = await both.status("a")
        return (status.get("changed"), status["pid"]) == (True, pid)

    await until(marked, "a to be marked as changed")
    await both.chat("b")
    await both.chat("a")
    assert (starts(both, "b")[-1], starts(both, "a")[-1]) == ("512", "256")
    code, out, _ = await both.made.command(
        "reload", "--apply", "--url", f"http://127.0.0.1:{both.made.ports[0]}"
    )
    assert (code, out) == (0, "restarted  a\n")

    async def restarted() -> bool:
        status = await both.status("a")
        return status["state"] == "ready" and status["pid"] != pid and "changed" not in status

    await until(restarted, "a to run with its new settings")
    assert starts(both, "a")[-1] == "512"
    assert both.events("b").count("start") == 1
    await both.settled()


async def test_a_removed_model_drains_and_those_who_wait_for_it_are_told(both: Pair) -> None:
    """Remove b while it answers and c while a request waits for it: the answer ends, the other is a 404."""
    text = sections("a", "b", "c", ctx_size="512") + sections("eager")
    write(both, text)
    await until(lambda: _lists(both, "a", "b", "c", "eager"), "four models")
    gate = both.file("b", "gate")
    await both.clear("b")
    both.knobs("b", token_gate=str(gate))
    both.knobs("c", load_gate=str(both.file("c", "gate")))
    async with both.stream("b") as stream:
        waiting = asyncio.create_task(both.ask("c", 1))
        await both.state("c", "loading")
        write(both, sections("a", ctx_size="512") + sections("eager"))
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "model 'c' not found")
        await until(lambda: _lists(both, "a", "eager"), "b and c to be gone")
        assert (await both.ask("b")).status_code in (400, 404)
        gate.touch()
        assert (await stream.rest()).endswith(DONE)
    await until(lambda: _has_gone(both, "b"), "b to stop")
    await both.settled()


async def test_a_broken_file_changes_nothing_and_says_where(both: Pair) -> None:
    """Break the file: reloads answer 500 with file and line, the old registry stays, and mending it heals."""
    before = await revision(both)
    write(both, sections("a", ctx_size="512") + "[b]\nctx_size = 1\n")
    answer = await _reload(both.one)
    assert answer.status_code == 500
    assert "models.ini:5: option 'ctx_size' not recognized" in answer.json()["error"]["message"]
    assert await revision(both) == before
    assert "models.ini:5" in (await _trouble(both))
    ini(both).unlink()
    assert (await _reload(both.two)).status_code == 500
    write(both, sections("a", ctx_size="512") + sections("eager"))

    async def healed() -> bool:
        return not await _trouble(both)

    await until(healed, "the trouble to be over")
    assert await _lists(both, "a", "eager")


def _reload(client: httpx.AsyncClient) -> Awaitable[httpx.Response]:
    return client.get("/models", params={"reload": "1"})


async def _has_gone(both: Pair, model: str) -> bool:
    async with both.made.redis() as redis:
        return not await redis.exists(KEYS.model(model))


async def _trouble(both: Pair) -> str:
    async with both.made.redis() as redis:
        return str(await redis.hget(KEYS.herd, "registry_error") or "")


async def _lists(both: Pair, *names: str) -> bool:
    listings = [(await client.get("/models")).json()["data"] for client in both.gateways()]
    return all([model["id"] for model in listing] == sorted(names) for listing in listings)
