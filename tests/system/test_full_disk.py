"""Disks that are full: one clear error that names the place, nothing half done, and all works with room."""

import asyncio
import json
from functools import partial
from pathlib import Path

import httpx
from download_stand import content, stand
from full_disk import full, small_disk
from herd import Herd, free_port, herd, until
from inside import (
    DONE,
    QUICK,
    apart,
    ask,
    is_alive,
    kill,
    leader,
    loads,
    next_leader,
    ready,
    served,
    started,
    streaming,
    stubbed,
)
from redis.exceptions import RedisError

from llamastead.shared.hub_cache import HubCache

FULL = "No space left on device"
ADVICE = "make room"


async def refused(client: httpx.AsyncClient, model: str, status: int, *words: str) -> str:
    """Ask for a model; check the status and that the error says these words, and return it."""
    answer = await client.post("/v1/completions", json=ask(model), timeout=20)
    assert answer.status_code == status, answer.text
    text = str(answer.json()["error"]["message"])
    for word in words:
        assert word in text, text
    return text


def leftovers(made: Herd) -> list[str]:
    """Return the folders of instances that are not spare holders."""
    return [path.name for path in (made.run_dir / "i").iterdir() if not path.name.startswith("spare-")]


async def test_a_load_on_a_full_run_folder_names_it_and_works_once_there_is_room() -> None:
    """Fill the run folder: a loaded model streams and answers on, another one's load ends at once with an
    error that names the folder; nothing is left of it, and it loads when there is room.
    """
    async with apart() as made:
        with small_disk(made.run_dir, "4m"):
            await made.role("s1", "supervisor", *stubbed(made, "a", "b", chatter="x" * 4000))
            await made.gateway("g1")
            async with made.client() as client:
                await served(client, "a")
                first = await ready(made, "a")
                with full(made.run_dir):
                    await refused(client, "b", 500, FULL, str(made.run_dir), ADVICE)
                    await made.nothing_counted()
                    await until(lambda: leftovers(made) == [first["id"]], "nothing to be left of it")
                    for _ in range(20):
                        await served(client, "a")
                    async with streaming(made, "a") as stream:
                        assert (await stream.rest()).endswith(DONE)
                await until(partial(served_or_not, client, "b"), "b to be served")
                await served(client, "a")
            assert await loads(made, "a") == 1
            assert started(made, "a") == [int(first["pid"])]
            assert (await ready(made, "b"))["state"] == "ready"
            await made.nothing_counted()
            await made.stop()


async def served_or_not(client: httpx.AsyncClient, model: str) -> bool:
    """Return whether a model answers."""
    return (await client.post("/v1/completions", json=ask(model))).status_code == 200


async def test_a_supervisor_that_cannot_write_its_number_says_so_and_leads_once_there_is_room() -> None:
    """Fill the run folder before the first lead, and kill the leader on a full one: who comes next says what
    is wrong, keeps no lock, and leads with the loaded model as soon as there is room.
    """
    async with apart() as made:
        with small_disk(made.run_dir, "4m"):
            words = stubbed(made, "a")
            with full(made.run_dir):
                begun = await made.role("s1", "supervisor", *words)
                words_of_it = (str(made.run_dir / "epoch"), FULL, ADVICE)
                await until(lambda: all(word in begun.output() for word in words_of_it), "the complaint")
            await made.gateway("g1")
            async with made.client() as client:
                await served(client, "a")
            first, old = await ready(made, "a"), await until(lambda: leader(made), "a leader")
            with full(made.run_dir):
                async with streaming(made, "a") as stream:
                    kill(int(old["pid"]))
                    second = await made.role("s2", "supervisor", *words)
                    # The file has its room already, so a full disk keeps nobody from the lead.
                    await next_leader(made, old["number"])
                    assert (await stream.rest()).endswith(DONE)
                assert second.process is not None
                assert second.process.returncode is None
            assert (await ready(made, "a"))["pid"] == first["pid"]
            assert await loads(made, "a") == 1
            await made.stop()


async def test_up_on_a_full_run_folder_ends_with_a_line_that_names_it() -> None:
    """Start `up` where nothing can be written: it ends with one line that says where and what to do, leaves
    nothing, and starts once there is room.
    """
    async with herd(QUICK) as made:
        with small_disk(made.run_dir, "8m"):
            words = ("up", "--port", str(free_port()), *stubbed(made, "a"))
            with full(made.run_dir):
                role = await made.role("full", *words)
                assert role.process is not None
                assert await asyncio.wait_for(role.process.wait(), 30) in (1, 78)
                said = role.output().strip()
                assert FULL in said
                assert str(made.run_dir) in said
                assert ADVICE in said
                assert "Traceback" not in said
            await made.up(*stubbed(made, "a"))
            async with made.client() as client:
                await served(client, "a")
            await made.stop()


async def test_c177_the_embedded_valkey_on_a_full_disk_costs_new_admissions_only() -> None:
    """C177: fill the disk of the embedded Valkey's append-only file: who streams and who is warm goes on, who
    needs a load gets one 503 that names the reason and the folder; with room it is served, and a KILL
    of Valkey then loses nothing.
    """
    async with herd(QUICK | {"LLAMASTEAD_LINGER": "60"}) as made:
        folder = made.run_dir / "redis"
        with small_disk(folder, "4m"):
            await made.up(*stubbed(made, "a", "b"))
            async with made.client() as client:
                await served(client, "a")
                first = await ready(made, "a")
                with full(folder):
                    await until(partial(refuses_writes, made), "the last page of the file to be full")

                    async def noticed() -> bool:
                        return "MISCONF" in (await client.post("/v1/completions", json=ask("b"))).text

                    await until(noticed, "Valkey to refuse writes")
                    await refused(client, "b", 503, "MISCONF", ADVICE)
                    await served(client, "a")
                    async with streaming(made, "a") as stream:
                        assert (await stream.rest()).endswith(DONE)
                await until(partial(served_or_not, client, "b"), "b to be served")
                async with made.redis() as redis:
                    pid = int((await redis.info("server"))["process_id"])
                kill(pid)
                await until(lambda: not is_alive(pid), "the end of Valkey")
                await until(partial(served_or_not, client, "b"), "b to be served again")
                await served(client, "a")
            await until(lambda: leader(made), "Valkey to be back with a leader")
            after = await ready(made, "a")
            assert (after["id"], after["pid"]) == (first["id"], first["pid"])
            assert started(made, "a") == [int(first["pid"])]
            assert len(started(made, "b")) == 1
            await made.stop()


async def refuses_writes(made: Herd) -> bool:
    """Write a little to Redis and return whether it refused that."""
    async with made.redis() as redis:
        try:
            await redis.set("written", "x" * 512)
        except RedisError as problem:
            return "MISCONF" in str(problem)
    return False


def open_below(folder: Path, pid: int) -> list[str]:
    """Return the files below a folder that a process has open."""
    links = [path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [str(link) for link in links if link.is_relative_to(folder)]


async def test_an_upload_that_finds_no_room_names_the_folder() -> None:
    """Send three MiB through a gateway whose temporary folder is full: one 503 that names the folder and what
    to do; small requests are served, nothing is counted or left open, and the same upload works with room.
    """
    async with apart() as made:
        spool = made.run_dir.parent / "spool"
        with small_disk(spool, "8m"):
            await made.role("s1", "supervisor", *stubbed(made, "a"))
            made.env["TMPDIR"] = str(spool)
            gateway = await made.gateway("g1")
            big = json.dumps({**ask("a"), "prompt": "x" * (3 << 20)})
            async with made.client() as client:
                await served(client, "a")
                sent = partial(client.post, "/v1/completions", content=big, timeout=20)
                assert (await sent()).status_code == 200
                spooled = partial(open_below, spool, gateway.pid)
                await until(lambda: not spooled(), "the room of that one to be free")
                with full(spool):
                    for _ in range(3):
                        answer = await sent()
                        message = answer.json()["error"]["message"]
                        assert answer.status_code == 503
                        assert "retry-after" in answer.headers
                        for word in (FULL, str(spool), "TMPDIR", ADVICE):
                            assert word in message, message
                    await served(client, "a")
                assert (await sent()).status_code == 200
            await until(lambda: not spooled(), "nothing to be left open")
            await made.nothing_counted()


async def test_the_log_of_an_engine_that_writes_all_the_time_stays_bounded_and_whole() -> None:
    """Have an engine write far more than its log may hold, and fill the disk of the logs in between: it
    serves on, file and predecessor stay within their bound, and every line that is there is whole.
    """
    line = "y" * 8000
    beside = 20  # requests at once
    async with apart() as made:
        logs = made.run_dir / "logs"
        with small_disk(logs, "64m"):
            await made.role("s1", "supervisor", *stubbed(made, "a", chatter=line))
            await made.gateway("g1")
            async with made.client() as client:

                async def talk(times: int) -> None:
                    for _ in range(times):
                        await asyncio.gather(*(served(client, "a") for _ in range(beside)))

                await talk(10)
                with full(logs):
                    await talk(3)
                await talk(60)
                # Its holder may still be about to move the file or to write the last lines.
                await until(lambda: {path.name for path in logs.iterdir()} == {"a.log", "a.log.1"}, "both")
                for path in (logs / "a.log", logs / "a.log.1"):

                    def whole(path: Path = path) -> bool:
                        data = path.read_bytes()
                        assert len(data) <= 4 << 20
                        lines = data.splitlines()
                        return {len(each) for each in lines if each.startswith(b"y")} <= {len(line)}

                    await until(whole, f"every line of {path.name} to be whole")
            await made.stop()


async def test_a_disk_that_fills_amid_a_download_is_named_and_the_rest_comes_once_there_is_room(
    tmp_path: Path,
) -> None:
    """Fill the cache's disk while a file is on its way: one failure that names the folder and says what to
    do, nothing of the model is listed or named in the cache; with room the next order goes on at the byte
    where it stopped, and the model is whole.
    """
    name = "org/big:Q4_K_M"
    with small_disk(tmp_path / "small", "16m") as place:
        async with stand({"HF_HUB_CACHE": str(place / "cache")}) as made:
            fault = made.hub.fault("/cdn/org/big", hold=1 << 20, times=1)
            assert (await made.pull(name)).status_code == 200
            await until(fault.held.is_set, "bytes")

            def written() -> bool:
                return any(path.stat().st_size for path in place.rglob("*.incomplete"))

            await until(written, "bytes on the disk")  # those on their way would find no room
            with full(place):
                fault.release.set()
                failed = await made.event(name, "download_failed")
                assert failed["data"]["reason"] == "no_space"
                for word in (str(place / "cache"), ADVICE):
                    assert word in failed["data"]["error"], failed
                await made.gone(name)
                repository = place / "cache" / "models--org--big"
                assert [path.name for path in repository.iterdir()] == ["blobs"]
                blobs = list((repository / "blobs").iterdir())
                assert {path.suffix for path in blobs} == {".incomplete"}
                have, asked = max(path.stat().st_size for path in blobs), made.hub.count("/cdn/")
                assert 0 < have < 3 << 20
            assert (await made.pull(name)).status_code == 200
            await made.listed(name)
            ranges = [r.range for r in made.hub.requests if r.path.startswith("/cdn/")][asked:]
            assert f"bytes={have}-" in ranges, (have, ranges)
            model = HubCache(place / "cache").find("org/big:Q4_K_M")
            assert model is not None
            assert model.path.read_bytes() == content(3, 3 << 20)
