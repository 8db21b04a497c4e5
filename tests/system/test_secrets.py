"""Keys: who may do what, rotation, and that no secret stands in anything that Llamastead shows or stores."""

import contextlib
import json
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from herd import QUICK, Herd, herd, processes_naming, until
from inside import ask, kill, leader, next_leader, ready, real, served, stubbed
from looks import environment_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENT, ADMIN, NEW = "sk-client-3f9a", "sk-admin-77c1", "sk-rotated-b2d4"
HUB_TOKEN, PROXY_PASSWORD = "hf_Xq81secret", "pr0xy-pass-5e"
SECTION_TOKEN, ENV_TOKEN = "hf_sectionSecret4", "env-secret-9k"
SECRETS = (CLIENT, ADMIN, NEW, HUB_TOKEN, PROXY_PASSWORD, SECTION_TOKEN, ENV_TOKEN)
PRESET = f"""\
[*]
ctx-size = 512
threads = 1
warmup = off
[chat]
hf-token = {SECTION_TOKEN}
env = MY_TOKEN={ENV_TOKEN}
[broken]
model = /nowhere/broken.gguf
hf-token = {SECTION_TOKEN}
"""
ENVIRONMENT = {
    "HF_TOKEN": HUB_TOKEN,
    "https_proxy": f"http://user:{PROXY_PASSWORD}@127.0.0.1:9",
    "LLAMASTEAD_ADMIN_KEYS": ADMIN,
    "LLAMASTEAD_LOG_LEVEL": "debug",
    "LLAMASTEAD_UI": "true",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd with a key file, an admin key, and secrets in its environment and preset."""
    async with herd({**QUICK, **ENVIRONMENT}) as made:
        made.add_models("chat")
        folder = made.models.parent
        (folder / "models.ini").write_text(PRESET)
        key_file(made).write_text(f"# clients\n{CLIENT}\n")
        made.headers = as_(ADMIN)
        words = ("--models-dir", str(made.models), "--models-preset", str(folder / "models.ini"))
        await made.up(*words, "--api-key-file", str(key_file(made)))
        yield made


def key_file(stead: Herd) -> Path:
    """Return the file with the clients' keys."""
    return stead.models.parent / "keys"


def as_(key: str) -> dict[str, str]:
    """Return the headers of somebody with this key."""
    return {"Authorization": f"Bearer {key}"}


async def test_c157_no_secret_is_shown_or_stored(stead: Herd) -> None:
    """Use all of the herd, also wrongly, then read answers, events, logs, metrics, Redis, files and ps."""
    shown: dict[str, str] = {}
    async with stead.client() as client, httpx.AsyncClient(base_url=client.base_url) as stranger:
        events: list[str] = []
        async with client.stream("GET", "/models/sse") as stream:
            lines = stream.aiter_lines()
            chat = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            for path, body in (
                ("/v1/chat/completions", chat),
                ("/v1/chat/completions", {**chat, "model": "broken"}),
                ("/v1/chat/completions", {"model": CLIENT[:2]}),
                ("/models/load", {"model": "broken"}),
            ):
                shown[f"POST {path} {body['model']}"] = (await client.post(path, json=body)).text
            async for line in lines:
                events.append(line)
                if '"unloaded"' in line:
                    break
        shown["events"] = "\n".join(events)
        for path in (
            *("/models", "/v1/models/chat", "/props", "/props?model=chat", "/metrics", "/metrics/gateway"),
            *("/metrics?model=chat", "/queue", "/readyz", "/logs/chat", "/logs/broken", "/slots?model=chat"),
        ):
            shown[path] = (await client.get(path)).text
        shown["wrong key"] = (await stranger.get("/models", headers=as_(NEW[:-1]))).text
    for words in (("ps",), ("ps", "--json"), ("doctor",), ("check", "--models-preset", str(preset(stead)))):
        shown[" ".join(words)] = "".join(
            map(str, await stead.command(*words, env={"LLAMASTEAD_API_KEY": ADMIN}))
        )
    shown |= {f"log of {name}": role.output() for name, role in stead.roles.items()}
    shown |= {f"Redis {name}": value for name, value in (await in_redis(stead)).items()}
    shown |= {f"ps {pid}": words_of(pid) for pid in processes_naming(stead.run_dir)}
    shown |= {f"file {path}": text for path, text in open_files(stead.run_dir)}
    found = [(where, secret) for where, text in shown.items() for secret in SECRETS if secret in text]
    assert found == []
    # The proof that there was something to find, and that the looks looked.
    engine = environment_of(int((await ready(stead, "chat"))["pid"]))
    assert (engine["HF_TOKEN"], engine["MY_TOKEN"]) == (SECTION_TOKEN, ENV_TOKEN)
    assert "chat" in shown["/models"]
    assert "Invalid API Key" in shown["wrong key"]


def preset(stead: Herd) -> Path:
    """Return the preset file."""
    return stead.models.parent / "models.ini"


def open_files(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files that not only the owner may read, with what is in them; the others may hold what their
    process needs to start. Jobs and holders make folders and remove them meanwhile.
    """
    for folder, _, names in os.walk(run_dir):
        for path in (Path(folder) / name for name in names):
            with contextlib.suppress(FileNotFoundError):
                mode = path.stat().st_mode
                if stat.S_ISREG(mode) and mode & 0o077 and "redis" not in path.parts:
                    yield path, path.read_text(errors="replace")


def words_of(pid: int) -> str:
    """Return a process's command line, which everybody on the machine can read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


async def in_redis(stead: Herd) -> dict[str, str]:
    """Return every key of Redis and what it holds, as text."""
    found: dict[str, str] = {}
    async with stead.redis() as redis:
        async for name in redis.scan_iter():
            kind = await redis.type(name)
            if kind == "hash":
                found[name] = json.dumps(await redis.hgetall(name))
            elif kind == "zset":
                found[name] = str(await redis.zrange(name, 0, -1))
            elif kind == "stream":
                found[name] = str(await redis.xrange(name))
            elif kind == "string":
                found[name] = await redis.get(name) or ""  # it may have run out since
            elif kind == "set":
                found[name] = str(await redis.smembers(name))
            elif kind == "list":
                found[name] = str(await redis.lrange(name, 0, -1))
    return found


async def test_admin_routes_want_an_admin_key(stead: Herd) -> None:
    """Call management and inference with each kind of key, in both headers."""
    async with httpx.AsyncClient(base_url=stead.client().base_url) as client:
        load = {"json": {"model": "chat"}}
        assert (await client.post("/models/load", **load)).status_code == 401
        refused = await client.post("/models/load", headers=as_(CLIENT), **load)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        for headers in (as_(ADMIN), {"X-Api-Key": ADMIN}):
            assert (await client.post("/models/load", headers=headers, **load)).status_code in (200, 400)
        for headers in (as_(CLIENT), {"X-Api-Key": CLIENT}, as_(ADMIN)):
            assert (await client.get("/models", headers=headers)).status_code == 200


async def test_keys_are_rotated_while_the_herd_runs(stead: Herd) -> None:
    """Change the key file: the new key comes in, then the old one goes out, with no restart."""
    async with httpx.AsyncClient(base_url=stead.client().base_url) as client:

        async def status(key: str) -> int:
            return (await client.get("/models", headers=as_(key))).status_code

        async def both() -> bool:
            return (await status(CLIENT), await status(NEW)) == (200, 200)

        async def only_the_new_one() -> bool:
            return (await status(CLIENT), await status(NEW)) == (401, 200)

        assert (await status(CLIENT), await status(NEW)) == (200, 401)
        key_file(stead).write_text(f"{CLIENT}\n{NEW}\n")
        await until(both, "both keys")
        key_file(stead).write_text(f"{NEW}\n")
        await until(only_the_new_one, "the new key alone")


async def test_c159_adopted_instances_still_take_our_key() -> None:
    """KILL the supervisor under instances with private keys: the next one and we still get in."""
    async with herd(QUICK) as made:
        await made.up(*real(made, "a"))
        async with made.client() as client:
            await served(client, "a")
            before, old = await ready(made, "a"), await leader(made)
            kill(int(old["pid"]))
            await next_leader(made, old["number"])
            await served(client, "a")
            assert (await client.get("/slots?model=a")).status_code == 200
            await made.nothing_counted()
        after = await ready(made, "a")
        assert (after["pid"], after["nonce"]) == (before["pid"], before["nonce"])
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=after["address"].removeprefix("unix:"))
        ) as stranger:
            assert (await stranger.get("http://instance/slots")).status_code == 401


async def test_c159_an_instance_that_refuses_our_key_is_our_fault() -> None:
    """Have an instance answer 401: the client, whose key is right, gets a 502 that says whose mistake."""
    async with herd(QUICK) as made:
        await made.up(*stubbed(made, "a", status=401))
        async with made.client() as client:
            refused = await client.post("/v1/completions", json=ask("a"))
        assert refused.status_code == 502
        assert "refused this gateway's key" in refused.json()["error"]["message"]
        await made.nothing_counted()
