"""Downloads through a whole herd, from the hub's stand-in, with real workers that are killed for real."""

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from compat_kit import RealRouter, engine_under_test
from download_stand import CHAT, Stand, content, stand
from herd import until
from hub import Fault
from inside import DONE, is_alive, streaming

from llamastead.shared.hub_cache import HubCache
from llamastead.up.processes import children_of

TOKEN = "hf_" + "s3cret" * 5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Stand]:
    """One herd for the tests that leave it as it was."""
    async with stand({"HF_TOKEN": TOKEN}) as made:
        made.hub.token(TOKEN)
        yield made


@pytest.mark.asyncio(loop_scope="module")
async def test_a_pulled_model_answers(shared: Stand) -> None:
    """POST /models of a model that loads: told as the router tells it, listed under its tag, and it chats."""
    answer = await shared.pull("org/one")
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    finished = await shared.event("org/one", "download_finished")
    assert finished == {"model": "org/one", "event": "download_finished"}
    assert shared.events("org/one") == ["model_status", "download_progress", "download_finished"]
    ((url, progress),) = (await shared.event("org/one", "download_progress"))["data"]["progress"].items()
    assert url.startswith(f"{shared.hub.url}/org/one/resolve/")
    assert progress["done"] == progress["total"]
    await shared.listed("org/one:Q4_K_M")
    entry = await shared.entry("org/one:Q4_K_M")
    assert (entry["source"], entry["can_remove"], entry["in_cache"]) == ("cache", True, True)
    chat = await shared.one.post("/v1/chat/completions", json={"model": "org/one:Q4_K_M", **CHAT})
    assert chat.status_code == 200, chat.text
    again = await shared.pull("org/one:Q4_K_M")
    assert again.status_code == 400
    assert again.json()["error"]["message"] == "model 'org/one:Q4_K_M' already exists"
    await shared.made.unload("org/one:Q4_K_M")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("org/none", 404, "not on the hub"),
        ("org/one:IQ1_S", 404, "it has Q4_K_M, Q8_0"),
        ("org/closed", 403, "is gated: log in, accept its terms"),
        ("noslash", 400, "invalid HF repo format"),
        ("../../etc", 400, "invalid HF repo format"),
        ("org/one:../../x", 400, "invalid HF repo format"),
        ("org/..", 400, "invalid HF repo format"),
    ],
)
async def test_what_cannot_be_had_is_refused_at_once(
    shared: Stand, name: str, status: int, words: str
) -> None:
    """C120: the hub's no is the answer, in one line; nothing is listed, left behind or tried again."""
    shared.hub.add("org/closed", {"c-Q4_K_M.gguf": content(9, 1 << 20)})
    shared.hub.gated.add("org/closed")
    await shared.at_rest()
    before = len(shared.hub.requests)
    answer = await shared.pull(name)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status), error
    assert words in error["message"]
    assert len(error["message"]) < 200
    await shared.gone(name)  # the answer may be ahead of the list
    assert len(shared.hub.requests) - before <= 3
    repo = name.partition(":")[0].replace("/", "--")
    assert not (shared.cache / f"models--{repo}" / "refs").exists() or repo == "org--one"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_token_is_nowhere_but_in_requests_to_the_hub(shared: Stand) -> None:
    """C157: bring a model and have one refused with a token: no log, event, job or key of Redis has it."""
    shared.hub.add("org/own", {"own-Q4_K_M.gguf": content(15, 1 << 20)})
    await shared.have("org/own:Q4_K_M")
    await shared.at_rest()
    assert (await shared.pull("org/none")).status_code == 404
    seen = "".join(role.output() for role in shared.made.roles.values()) + json.dumps(shared.told)
    async with shared.made.redis() as redis:
        for key in await redis.keys("*"):
            kind = await redis.type(key)
            if kind == "hash":
                seen += json.dumps(await redis.hgetall(key))
            elif kind == "stream":
                seen += json.dumps(await redis.xrange(key))
    assert TOKEN not in seen
    assert any(r.authorization == f"Bearer {TOKEN}" for r in shared.hub.requests)


@pytest.mark.asyncio(loop_scope="module")
async def test_two_callers_and_two_quants_share_their_files(shared: Stand) -> None:
    """C115: order one model through both gateways and another quant beside it: each file is fetched once."""
    fault = shared.hub.fault("mmproj-big", hold=500_000, times=1)
    first, second = await asyncio.gather(shared.pull("org/big:Q4_K_M", 0), shared.pull("org/big:Q4_K_M", 1))
    assert [first.status_code, second.status_code] == [200, 200]
    assert {first.json()["download"], second.json()["download"]} == {"org/big:Q4_K_M"}
    assert max(first.json()["askers"], second.json()["askers"]) == 2
    assert (await shared.pull("org/big:Q8_0")).status_code == 200
    await until(fault.held.is_set, "the projector to be on its way")
    for gateway in (0, 1):
        status = await shared.coming("org/big:Q4_K_M", gateway)
        assert status["value"] == "downloading"
        assert status["download"]["total"] == 4 << 20
    fault.release.set()
    for name in ("org/big:Q4_K_M", "org/big:Q8_0"):
        await shared.event(name, "download_finished")
        await shared.listed(name)
    for file in ("mmproj-big", "big-Q4_K_M", "big-Q8_0"):
        fetched = [
            r.range for r in shared.hub.requests if r.path.startswith("/cdn/") and f"/{file}" in r.path
        ]
        assert fetched.count("") == 1, (file, fetched)
    blobs = sorted((shared.cache / "models--org--big" / "blobs").iterdir())
    assert len(blobs) == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_the_last_asker_calls_it_off_and_nothing_is_left(shared: Stand) -> None:
    """C115: two askers, one unload: it goes on; the second unload ends it, without a trace in the cache."""
    shared.hub.add("org/slow", {"slow-Q4_K_M.gguf": content(6, 2 << 20)})
    fault = shared.hub.fault("/cdn/org/slow", hold=1 << 20, times=1)
    for _ in range(2):
        assert (await shared.pull("org/slow")).status_code == 200
    await until(fault.held.is_set, "bytes")
    await shared.coming("org/slow")
    for path in ("/v1/chat/completions", "/models/load"):
        early = await shared.one.post(path, json={"model": "org/slow", **CHAT})
        assert (early.status_code, "is on its way from the hub (" in early.text) == (503, True)
    left = await shared.one.post("/models/unload", json={"model": "org/slow"})
    assert (left.status_code, left.json()["askers"]) == (200, 1)
    assert await shared.value("org/slow") == "downloading"
    assert (await shared.two.post("/models/unload", json={"model": "org/slow"})).json()["askers"] == 0
    failed = await shared.event("org/slow", "download_failed")
    assert failed["data"]["reason"] == "cancelled"
    await shared.gone("org/slow")
    fault.release.set()
    folder = shared.cache / "models--org--slow"
    await until(lambda: not list(folder.rglob("*.incomplete")), "no partial file")
    assert not (folder / "refs").exists()
    assert not (folder / "snapshots").exists()
    none = await shared.one.post("/models/unload", json={"model": "org/slow"})
    assert none.status_code == 400


@pytest.mark.asyncio(loop_scope="module")
async def test_all_files_or_none(shared: Stand) -> None:
    """C121: three shards and a projector; one shard fails twice, the projector always: it is named, and only
    that is fetched by the next order; progress counts all bytes.
    """
    files = {f"s-Q4_K_M-0000{n}-of-00003.gguf": content(10 + n, 1 << 20) for n in (1, 2, 3)}
    shared.hub.add("org/shards", files | {"mmproj-s-F16.gguf": content(20, 1 << 19)})
    twice = shared.hub.fault("s-Q4_K_M-00003", status=503, times=2)
    always = shared.hub.fault("mmproj-s", status=500)
    await shared.at_rest()  # an order that is answered before its plan is made names no total
    size = (3 << 20) + (1 << 19)
    assert (await shared.pull("org/shards")).json()["total"] == size
    progress = (await shared.event("org/shards", "download_progress"))["data"]["progress"]
    assert sum(each["total"] for each in progress.values()) == size
    failed = await shared.event("org/shards", "download_failed")
    assert "(mmproj-s-F16.gguf): the hub answers 500" in failed["data"]["error"]
    assert twice.hits >= 1
    assert always.hits == 5
    await shared.gone("org/shards:Q4_K_M")
    assert HubCache(shared.cache).find("org/shards") is None
    shared.hub.faults.clear()
    before = {file: shared.hub.count(file) for file in shared.hub.repos["org/shards"]}
    assert (await shared.pull("org/shards")).status_code == 200
    await shared.listed("org/shards:Q4_K_M")
    after = {file: shared.hub.count(file) for file in shared.hub.repos["org/shards"]}
    more = [file for file in after if after[file] != before[file]]
    assert "mmproj-s-F16.gguf" in more
    assert len(more) <= 2  # one shard may have been under way when the projector failed
    chosen = HubCache(shared.cache).find("org/shards")
    assert chosen is not None
    assert (len(chosen.shards), chosen.missing, bool(chosen.mmproj)) == (3, (), True)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_worker_loses_no_byte(shared: Stand) -> None:
    """C112, C181: kill the worker and its work-horse at 40 %: nothing is listed, the rest comes by itself."""
    shared.hub.add("org/killed", {"killed-Q4_K_M.gguf": content(7, 4 << 20)})
    fault = shared.hub.fault("/cdn/org/killed", hold=1_600_000, times=1)
    assert (await shared.pull("org/killed")).status_code == 200
    await until(fault.held.is_set, "40 %")

    async def shown() -> bool:
        return bool((await shared.coming("org/killed"))["download"]["bytes"] >= 1_500_000)

    await until(shown, "the bytes to be shown")
    workers = await shared.workers()
    killed = workers + [pid for worker in workers for pid in children_of({worker})]
    assert len(killed) > len(workers)
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):  # the horse ends with its worker
            os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed), "their end")
    assert await shared.value("org/killed:Q4_K_M") == ""
    fault.release.set()
    await until(lambda: "download_finished" in shared.events("org/killed"), "the end", 90.0)
    await shared.listed("org/killed:Q4_K_M")
    ranges = [r.range for r in shared.hub.requests if r.path.startswith("/cdn/org/killed")]
    assert ranges[0] == ""
    assert all(int(r.removeprefix("bytes=").rstrip("-")) > 1_000_000 for r in ranges[1:]), ranges
    assert len(ranges) >= 2
    found = HubCache(shared.cache).find("org/killed")
    assert found is not None
    assert found.path.read_bytes() == shared.hub.repos["org/killed"]["killed-Q4_K_M.gguf"].content


@pytest.mark.asyncio(loop_scope="module")
async def test_a_long_transfer_makes_way_for_short_jobs_and_for_a_stop(shared: Stand) -> None:
    """A slow file is on its way: another order is planned at once, and a worker that is told to stop goes at
    once; the file goes on where it was.
    """
    shared.hub.add("org/long", {"long-Q4_K_M.gguf": content(14, 6 << 20)})
    await shared.at_rest()
    slow = shared.hub.fault("/cdn/org/long", slow=200_000, times=2)  # half a minute, for who stays for it
    assert (await shared.pull("org/long")).status_code == 200
    await until(lambda: slow.hits, "the file")
    refused = await shared.pull("org/long:IQ1_S")
    assert refused.status_code == 404  # so it was planned within the time that an order is answered in
    await until(lambda: slow.hits == 2, "the file to go on")  # or it would be slow under the next worker
    (worker,) = [pid for pid in await shared.workers() if is_alive(pid)]  # one was killed a test ago
    os.kill(worker, signal.SIGTERM)
    await until(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end", 20.0)
    await shared.listed("org/long:Q4_K_M")
    ranges = [r.range for r in shared.hub.requests if r.path.startswith("/cdn/org/long")]
    assert len(ranges) >= 2
    assert len(set(ranges)) == len(ranges)


@pytest.mark.asyncio(loop_scope="module")
async def test_orders_and_events_are_the_routers(shared: Stand, tmp_path: Path) -> None:
    """Order, order again, remove, order and call off at the real router and at ours: the same statuses,
    fields and events. Ours alone: the reason of a failed download, what answers say beside `success`.
    """
    shared.hub.add(
        "org/beside", {"beside-Q4_K_M.gguf": content(16), "beside-Q8_0.gguf": content(17, 2 << 20)}
    )
    fault = shared.hub.fault("beside-Q8_0", hold=1 << 20)
    cache = str(tmp_path / "theirs")
    real = RealRouter(
        engine_under_test().path, tmp_path, {"HF_ENDPOINT": f"{shared.hub.url}/", "LLAMA_CACHE": cache}
    )
    empty = tmp_path / "none"
    empty.mkdir()
    await real.start("--models-dir", str(empty))
    try:
        async with httpx.AsyncClient(base_url=real.address, timeout=30) as client:
            theirs = Stand(shared.made, shared.hub, tmp_path / "theirs", client, client)
            watch = asyncio.create_task(theirs.watch())
            await asyncio.wait_for(theirs.listens.wait(), 30)
            seen = [await steps_beside(side, fault) for side in (theirs, shared)]
            watch.cancel()
    finally:
        await real.stop()
    assert seen[0] == seen[1]


async def steps_beside(side: Stand, fault: Fault) -> list[Any]:
    """Take the steps of that test at one side and return all that is to be the same."""
    name, other = "org/beside:Q4_K_M", "org/beside:Q8_0"
    seen: list[Any] = [(await side.pull(name)).status_code]
    await side.event(name, "download_finished")
    await side.listed(name)
    entry = await side.entry(name)
    seen += [entry["source"], entry["can_remove"], entry["status"]["value"]]
    again = await side.pull(name)
    seen += [again.status_code, again.json()["error"]["message"]]
    fault.held.clear()
    fault.release.clear()
    seen += [(await side.pull(other)).status_code]
    await until(fault.held.is_set, "bytes")
    entry = await until(lambda: side.entry(other), f"{other} to be listed")
    seen += [entry["source"], entry["can_remove"], entry["status"]["value"], entry["object"]]
    later = threading.Timer(1.0, fault.release.set)  # the router waits for its child, which waits for bytes
    later.start()
    seen += [(await side.one.post("/models/unload", json={"model": other})).status_code]
    await side.event(other, "download_failed")
    await side.gone(other)
    removed = await side.one.delete("/models", params={"model": name})
    seen += [removed.status_code, removed.json()]
    await side.event(name, "model_remove")
    later.join()  # before the other side's turn
    seen += [side.events(name), side.events(other)]
    seen += [
        sorted((await side.event(name, kind)).get("data", {})) for kind in dict.fromkeys(side.events(name))
    ]
    return seen


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cached_model_needs_no_network(shared: Stand) -> None:
    """C117: the hub answers 429 to everything: a cached model loads and answers; nobody asked the hub."""
    await shared.have("org/one:Q4_K_M")
    await shared.at_rest()
    fault = shared.hub.fault("/", status=429)
    chat = await shared.one.post("/v1/chat/completions", json={"model": "org/one:Q4_K_M", **CHAT})
    assert chat.status_code == 200, chat.text
    assert fault.hits == 0
    assert (await shared.pull("org/one:Q4_K_M")).status_code == 400
    assert (await shared.pull("org/one:Q8_0")).status_code == 429
    shared.hub.faults.clear()
    await shared.made.unload("org/one:Q4_K_M")


@pytest.mark.asyncio(loop_scope="module")
async def test_removing_a_model_stops_it_first_and_never_while_it_answers(shared: Stand) -> None:
    """C49: busy: 409, nothing happens; idle: the process ends, then its files go, one event."""
    shared.hub.add("org/gone", {"gone-Q4_K_M.gguf": content(8)})
    await shared.pull("org/gone")
    await shared.listed("org/gone:Q4_K_M")
    order = {"model": "org/gone:Q4_K_M"}
    async with streaming(shared.made, order["model"]) as stream:
        refused = await shared.two.delete("/models", params=order)
        assert refused.status_code == 409
        assert "is in use" in refused.json()["error"]["message"]
        await shared.listed("org/gone:Q4_K_M", "loaded")
        assert (await stream.rest()).endswith(DONE)
    instance = await shared.made.instance("org/gone:Q4_K_M")

    async def idle() -> bool:
        answer = await shared.two.delete("/models", params=order)
        assert answer.status_code in (200, 409), answer.text
        return answer.status_code == 200

    await until(idle, "the removal")
    assert not Path(f"/proc/{instance['pid']}").exists()
    assert not (shared.cache / "models--org--gone").exists()
    await shared.gone("org/gone:Q4_K_M")
    await shared.event("org/gone:Q4_K_M", "model_remove")
    assert [e["event"] for e in shared.told if e["model"] == order["model"]].count("model_remove") == 1
    asked = await shared.one.post("/v1/chat/completions", json={**order, **CHAT})
    assert asked.status_code in (400, 404)
    assert (await shared.one.delete("/models", params=order)).status_code == 404
    assert (await shared.one.delete("/models")).status_code == 400
    other = await shared.one.delete("/models", params={"model": "other"})
    assert (other.status_code, "only models of the hub cache" in other.text) == (400, True)
    assert (await shared.pull("org/gone")).status_code == 200
    await shared.listed("org/gone:Q4_K_M")


@pytest.mark.asyncio(loop_scope="module")
async def test_pull_and_rm_say_what_happens(shared: Stand) -> None:
    """Pull in lines and in JSON, what is here and what the hub lacks, call one off with Ctrl-C, remove."""
    shared.hub.add("org/cli", {"cli-Q4_K_M.gguf": content(12), "cli-Q8_0.gguf": content(13, 2 << 20)})
    code, out, err = await shared.made.command("pull", "org/cli")
    assert (code, err) == (0, "")
    assert "org/cli: 100% of 0.4 MiB" in out or "MiB" in out
    assert re.search(r"org/cli is here after [\d.]+s; its name is org/cli:Q4_K_M$", out.rstrip()), out
    await shared.listed("org/cli:Q4_K_M")
    code, out, _ = await shared.made.command("pull", "org/cli:Q4_K_M", "--json")
    exists = {"model": "org/cli:Q4_K_M", "state": "exists", "names": ["org/cli:Q4_K_M"]}
    assert (code, json.loads(out)) == (0, exists)
    await shared.at_rest()
    code, out, err = await shared.made.command("pull", "org/none")
    assert (code, out) == (1, "")
    assert err == "llamastead: 'org/none' is not on the hub\n"
    fault = shared.hub.fault("/cdn/org/cli", hold=1 << 20)  # each try of it, or a busy machine sees its end
    pull = await shared.made.role("pull", "pull", "org/cli:Q8_0", "--json")
    await until(fault.held.is_set, "bytes")
    await until(lambda: '"bytes"' in pull.output(), "progress")
    assert await pull.signal(signal.SIGINT) == 130
    assert "org/cli:Q8_0 is called off" in pull.output()
    fault.release.set()
    await shared.gone("org/cli:Q8_0")
    code, out, err = await shared.made.command("rm", "org/cli:Q4_K_M")
    assert (code, out, err) == (0, "org/cli:Q4_K_M removed\n", "")
    code, _, err = await shared.made.command("rm", "org/cli:Q4_K_M")
    assert (code, err) == (
        1,
        "llamastead: model 'org/cli:Q4_K_M' not found: `llamastead ps` lists the names\n",
    )


async def test_removing_a_model_stops_presets_on_its_files_too(tmp_path: Path) -> None:
    """C49: a preset serves a model's file. Loaded and idle, it is stopped before the files go, and fetches
    them anew at its next use; a model of another file runs on.
    """
    preset = tmp_path / "models.ini"
    preset.write_text("[mine]\nhf-repo = org/one:Q4_K_M\n")
    async with stand({}, "--models-preset", str(preset)) as made:
        for model in ("mine", "other"):
            chat = await made.one.post("/v1/chat/completions", json={"model": model, **CHAT})
            assert chat.status_code == 200, chat.text
        mine, other = [await made.made.instance(model) for model in ("mine", "other")]
        await made.made.nothing_counted()
        removed = await made.one.delete("/models", params={"model": "org/one:Q4_K_M"})
        assert removed.status_code == 200, removed.text
        assert not Path(f"/proc/{mine['pid']}").exists()
        assert Path(f"/proc/{other['pid']}").exists()
        assert not (made.cache / "models--org--one").exists()
        await made.listed("mine")
        before = len(made.hub.from_the_start("/cdn/"))
        again = await made.one.post("/v1/chat/completions", json={"model": "mine", **CHAT})
        assert again.status_code == 200, again.text
        assert len(made.hub.from_the_start("/cdn/")) == before + 1
