"""Clients and preset files that try to get out of their place: names, options, files, instances."""

import json
import stat
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from herd import herd, instance_pids
from inside import QUICK, ask, ready, real, served

NASTY = [
    "../../../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "--host",
    "-m",
    "a\n--host 0.0.0.0",
    "a\0b",
    "a\r\nX-Injected: 1",
    "llamastead:leader",
    "*",
    "$(id)",
    "`id`",
    "a" * 70_000,
    "\ud800",
    "{{a}}",
]


async def test_names_are_only_ever_looked_up() -> None:
    """Ask for models by names that are paths, options, keys of Redis or not text at all, on every route that
    takes one: each is a 4xx in the shape of all errors; nothing starts, no file and no key appears.
    """
    async with herd(QUICK) as made:
        await made.up(*real(made, "a"))
        before = {path.name for path in (made.run_dir / "logs").glob("*")}
        async with made.client() as client, made.redis() as redis:
            keys = {name async for name in redis.scan_iter(match="llamastead:model:*")}
            for name in NASTY:
                body = json.dumps({"model": name, "prompt": "x"}).encode()
                plain = name.encode("utf-8", "surrogatepass")
                paths = [f"/logs/{quote(plain, safe='')}", f"/v1/models/{quote(plain, safe='')}"]
                answers = [
                    await client.post(route, content=body)
                    for route in ("/v1/completions", "/models/load", "/models/unload")
                ]
                if len(name) < 1000 and name.strip("."):  # clients resolve dots themselves
                    answers += [await client.get(path) for path in paths]
                    answers.append(await client.get(f"/props?model={quote(plain, safe='')}"))
                for answer in answers:
                    assert 400 <= answer.status_code < 500, (name, answer.request.url, answer.text)
                    assert answer.json()["error"]["message"]
                    assert "x-injected" not in answer.headers
                    assert "root:" not in answer.text
            assert keys == {name async for name in redis.scan_iter(match="llamastead:model:*")}
        assert instance_pids(made.run_dir) == []
        assert {path.name for path in (made.run_dir / "logs").glob("*")} == before
        await made.nothing_counted()


async def test_what_a_preset_calls_a_model_is_one_word_to_the_engine() -> None:
    """Name a section like options: the model is served, and its name is one argument among others."""
    name = "x --host 0.0.0.0 --port 1 --api-key none"
    async with herd(QUICK) as made:
        made.add_models("a")
        preset = made.run_dir.parent / "models.ini"
        preset.write_text(f"[{name}]\nmodel = {made.models / 'a.gguf'}\nthreads = 1\n")
        await made.up("--models-preset", str(preset))
        async with made.client() as client:
            await served(client, name)
        (pid,) = instance_pids(made.run_dir)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        assert words.count(name) == 1
        assert words.count("--host") == 1
        assert words[words.index("--host") + 1].startswith(str(made.run_dir))


async def test_a_request_sets_no_start_argument() -> None:
    """Send members that are named like options of the engine: the instance runs as it was started."""
    async with herd(QUICK) as made:
        await made.up(*real(made, "a"))
        async with made.client() as client:
            await served(client, "a")
            (pid,) = instance_pids(made.run_dir)
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            extra = {
                "host": "0.0.0.0",
                "--host": "0.0.0.0",
                "ctx-size": 1,
                "engine": "/bin/sh",
                "env": {"A": "1"},
            }
            assert (await client.post("/v1/completions", json=ask("a", **extra))).status_code == 200
            assert instance_pids(made.run_dir) == [pid]
            assert Path(f"/proc/{pid}/cmdline").read_bytes() == words


@pytest.mark.parametrize("key", ["", "wrong", "client-key"])
async def test_an_instance_wants_its_own_key_and_is_nobody_elses_to_reach(key: str) -> None:
    """Talk to a model's socket itself without a key, with a wrong one, with a client's: 401. The run
    folder that it lies in is closed to all other users.
    """
    async with herd(QUICK | {"LLAMASTEAD_API_KEYS": "client-key"}) as made:
        made.headers = {"Authorization": "Bearer client-key"}
        await made.up(*real(made, "a"))
        async with made.client() as client:
            await served(client, "a")
        path = (await ready(made, "a"))["address"].removeprefix("unix:")
        transport = httpx.AsyncHTTPTransport(uds=path)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(transport=transport, headers=headers) as stray:
            for route in ("/props", "/metrics", "/slots"):
                assert (await stray.get(f"http://i{route}")).status_code == 401
            answer = await stray.post("http://i/v1/completions", json=ask("a"))
            assert answer.status_code == 401
        assert stat.S_IMODE(made.run_dir.stat().st_mode) & 0o077 == 0
