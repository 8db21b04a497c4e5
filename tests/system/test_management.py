"""What people and front-ends ask of a herd: lists, orders, settings, health, events, logs, the command."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from herd import PATIENCE_S, QUICK, Herd, clean_environment, herd, until
from tiny import tiny_model

from llamastead.supervisor.engine import find_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
ADMIN = {"Authorization": "Bearer for-admins"}
ARGS = ("-c", "512", "-t", "1", "--no-warmup")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd of three real models with room for two and a key for management."""
    env = {**QUICK, "LLAMASTEAD_ADMIN_KEYS": "for-admins", "LLAMASTEAD_API_KEYS": "for-clients"}
    async with herd(env) as made:
        made.add_models("a", "b", "c", "idle")
        (made.models / "boxed").mkdir()
        tiny_model(made.models / "boxed" / "weights.gguf", 7)
        made.headers = {"Authorization": "Bearer for-clients"}
        await made.up("--models-dir", str(made.models), "--models-max", "2", *ARGS)
        yield made


@contextlib.asynccontextmanager
async def admin(stead: Herd) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client with the admin key."""
    async with stead.client(headers=ADMIN) as client:
        yield client


async def is_status(stead: Herd, model: str, value: str) -> bool:
    """Return whether a model is listed with this status."""
    return bool((await stead.status(model))["value"] == value)


async def order(client: httpx.AsyncClient, verb: str, model: str) -> None:
    """Load or unload a model through HTTP; the order must be taken."""
    answer = await client.post(f"/models/{verb}", json={"model": model})
    assert (answer.status_code, answer.json()) == (200, {"success": True})


async def real_router(models: Path) -> list[dict[str, Any]]:
    """Return what llama-server's own router lists for a folder while its first model is loaded."""
    process = await asyncio.create_subprocess_exec(
        str(find_engine(None).path),
        *("--models-dir", str(models), "--host", "127.0.0.1", "--port", "0", *ARGS),
        stderr=asyncio.subprocess.PIPE,
        env=clean_environment({"LLAMA_CACHE": str(models.parent), "HF_HOME": str(models.parent)}),
    )
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if address := re.search(rb"listening on (http://127.0.0.1:\d+)", line):
                break
        else:
            raise AssertionError("the real router did not start")
        drain = asyncio.create_task(process.stderr.read())
        async with httpx.AsyncClient(base_url=address[1].decode(), timeout=PATIENCE_S) as client:
            # It drops kept connections that were idle for some seconds, and its child's load takes a while.
            closing = {"Connection": "close"}
            await client.post("/v1/chat/completions", json={"model": "a", **CHAT}, headers=closing)
            listed: list[dict[str, Any]] = (await client.get("/models", headers=closing)).json()["data"]
    finally:
        process.kill()
        await process.wait()
    await drain
    return listed


def changed(value: Any) -> Any:
    """Return a listing without what differs between two moments or two routers on the same files."""
    skipped = ("created", "--port", "age_s", "effective_age_s")
    if isinstance(value, dict):
        return {name: changed(part) for name, part in value.items() if name not in skipped}
    if isinstance(value, list) and "--port" in value:
        return value[: value.index("--port")] + value[value.index("--port") + 2 :]
    return [changed(part) for part in value] if isinstance(value, list) else value


async def test_c46_models_are_listed_as_the_real_router_lists_them(stead: Herd) -> None:
    """List models, one of them loaded, with both: each of the router's fields is there and says the same."""
    async with stead.client() as client:
        await client.post("/v1/chat/completions", json={"model": "a", **CHAT})
        await until(lambda: is_status(stead, "a", "loaded"), "a loaded")
        listing: dict[str, Any] = {}

        async def alike() -> bool:
            nonlocal listing
            listing = (await client.get("/models")).json()
            return bool(changed((await client.get("/v1/models")).json()) == changed(listing))

        # What the worker finds out meanwhile comes into one of two listings.
        await until(alike, "both paths to list the same")
    theirs = await real_router(stead.models)
    assert listing["object"] == "list"
    mine = {entry["id"]: entry for entry in listing["data"]}
    assert list(mine) == [entry["id"] for entry in theirs] == ["a", "b", "boxed", "c", "idle"]
    for entry in theirs:
        own = mine[entry["id"]]
        own["status"] = {name: own["status"][name] for name in entry["status"]}
        assert changed({name: own[name] for name in entry}) == changed(entry)
    # The rule of front-ends: no status means active, else `loaded` does.
    assert [name for name, entry in mine.items() if entry["status"]["value"] == "loaded"] == ["a"]


async def test_a_folder_is_a_model(stead: Herd) -> None:
    """Ask for a model that is a folder with a file in it, by the folder's name."""
    async with stead.client() as client:
        answer = await client.post("/v1/chat/completions", json={"model": "boxed", **CHAT})
    assert (answer.status_code, answer.json()["model"]) == (200, "boxed")


async def test_the_file_of_a_model_that_never_ran_is_described(stead: Herd) -> None:
    """List a model that was not loaded: what the worker read from its file is there."""

    async def described() -> Any:
        async with stead.client() as client:
            return (await client.get("/v1/models/c")).json().get("metadata")

    found = await until(described, "metadata of c")
    size = (stead.models / "c.gguf").stat().st_size
    assert found == {"architecture": "llama", "n_ctx_train": 2048, "size_bytes": size, "shards": 1}


async def test_models_are_loaded_and_unloaded_by_order(stead: Herd) -> None:
    """Load, load again, unload, unload again, and name models that are none, over HTTP."""
    async with admin(stead) as client:
        await order(client, "load", "b")
        await until(lambda: is_status(stead, "b", "loaded"), "b loaded")
        again = await client.post("/models/load", json={"model": "b"})
        assert again.status_code == 400
        assert again.json()["error"]["type"] == "invalid_request_error"
        await order(client, "unload", "b")
        await until(lambda: is_status(stead, "b", "unloaded"), "b unloaded")
        assert "failed" not in await stead.status("b")
        assert (await client.post("/models/unload", json={"model": "b"})).status_code == 400
        for verb, model, status in (
            ("load", "nope", 404),
            ("unload", "nope", 400),
            ("load", 7, 400),
            ("load", None, 400),
        ):
            answer = await client.post(f"/models/{verb}", json={"model": model})
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
        assert (await client.post("/models/load", content=b"{")).status_code == 400


async def test_orders_and_logs_want_the_admin_key(stead: Herd) -> None:
    """Use no key, a client's, an unknown one and the admin's on open, inference and admin routes."""
    keys = {"none": "", "client": "for-clients", "wrong": "x", "admin": "for-admins"}
    expected = {
        "/health": (200, 200, 200, 200),
        "/readyz": (200, 200, 200, 200),
        "/models": (401, 200, 401, 200),
        "/queue": (401, 200, 401, 200),
        "/logs/a": (401, 403, 401, 200),
    }
    async with stead.client(headers={}) as client:
        for path, statuses in expected.items():
            for key, status in zip(keys.values(), statuses, strict=True):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                answer = await client.get(path, headers=headers)
                assert answer.status_code == status, (path, key, answer.text)
        refused = await client.post("/models/unload", json={"model": "a"}, headers=stead.headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")


async def test_props_and_health_are_the_routers(stead: Herd) -> None:
    """Read the gateway's own settings and its three kinds of health."""
    async with stead.client() as client:
        props = (await client.get("/props")).json()
        assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 2, True)
        assert props["llamastead"]["version"] == "0.1.0"
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        ready = (await client.get("/readyz")).json()
        assert (ready["status"], ready["redis"], ready["herd"]) == ("ok", True, True)
        for path in ("/tools", "/cors-proxy"):
            assert (await client.get(path)).status_code == 403


async def test_status_changes_are_streamed(stead: Herd) -> None:
    """Follow /models/sse while a model is loaded and unloaded: loading, loaded with its facts, unloaded."""
    seen: list[dict[str, Any]] = []
    open_ = asyncio.Event()

    async def follow() -> None:
        async with stead.client(timeout=None) as client, client.stream("GET", "/models/sse") as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            open_.set()
            async for line in answer.aiter_lines():
                name, _, data = line.partition(": ")
                seen.extend([json.loads(data)] if name == "data" else [])

    following = asyncio.create_task(follow())
    await open_.wait()

    def told(status: str) -> dict[str, Any] | None:
        return next(
            (e for e in seen if e["model"] == "c" and e.get("data", {}).get("status") == status), None
        )

    async with admin(stead) as client:
        await order(client, "load", "c")
        loaded = await until(lambda: told("loaded"), "event: c loaded")
        await order(client, "unload", "c")
        unloaded = await until(lambda: told("unloaded"), "event: c unloaded")
    following.cancel()
    await asyncio.wait([following])
    assert told("loading")
    assert loaded["event"] == "status_change"
    assert loaded["data"]["info"]["meta"]["n_ctx_train"] == 2048
    assert unloaded["data"]["exit_code"] == 0


async def test_logs_are_there_when_the_instance_is_gone(stead: Herd) -> None:
    """Read the log of a model after its unload, over HTTP and by the command; one that never ran has none."""
    async with admin(stead) as client:
        await client.post("/v1/chat/completions", json={"model": "a", **CHAT})
        await order(client, "unload", "a")
        await until(lambda: is_status(stead, "a", "unloaded"), "a unloaded")
        page = await client.get("/logs/a", params={"lines": "2000"})
        assert page.headers["content-type"].startswith("text/plain")
        assert "model loaded" in page.text
        assert len((await client.get("/logs/a", params={"lines": "3"})).text.splitlines()) == 3
        for model in ("nope", "idle"):
            assert (await client.get(f"/logs/{model}")).status_code == 404
        assert (await client.get("/logs/a", params={"lines": "x"})).status_code == 400
    code, out, err = await stead.command("logs", "a", "-n", "5")
    assert (code, err) == (0, "")
    assert out.splitlines() == page.text.splitlines()[-5:]
    # Every line also went to the supervisor's output, with the model's name.
    spoken = [line for line in stead.roles["up"].output().splitlines() if "model=a" in line]
    assert any("model loaded" in line for line in spoken)


async def test_a_log_is_followed(stead: Herd) -> None:
    """Follow a model's log by HTTP while it is used: new lines arrive while the stream is open."""
    async with admin(stead) as client, admin(stead) as other:
        await other.post("/v1/chat/completions", json={"model": "b", **CHAT})
        query = {"follow": "true", "lines": "0"}
        async with client.stream("GET", "/logs/b", params=query) as answer:
            lines = answer.aiter_lines()
            await other.post("/v1/chat/completions", json={"model": "b", **CHAT})
            async with asyncio.timeout(PATIENCE_S):
                while "slot" not in await anext(lines):
                    pass


async def test_the_command_does_what_http_does(stead: Herd) -> None:
    """Load, list, show the queue, unload all and read events by `llamastead`, as a person and as JSON."""
    code, out, err = await stead.command("load", "a", "c")
    assert (code, err) == (0, ""), err
    assert [line.split(" after")[0] for line in out.splitlines()] == ["a loaded", "c loaded"]
    code, out, _ = await stead.command("ps", "--json")
    values = {entry["id"]: entry["status"]["value"] for entry in json.loads(out)}
    assert {name: values[name] for name in "abc"} == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    code, out, _ = await stead.command("ps")
    assert out.splitlines()[0].split() == ["MODEL", "STATE", "CONTEXT", "SIZE", "SOURCE", "NOTE"]
    assert out.splitlines()[1].split()[:3] == ["a", "ready", "512"]

    async def nobody_waits() -> bool:
        # That an ordered load is over is taken out of the queue a moment after its model is ready.
        code, out, _ = await stead.command("queue", "--json")
        assert code == 0
        return bool(json.loads(out) == {"queue": [], "waiting": 0})

    await until(nobody_waits, "an empty queue")
    code, out, err = await stead.command("unload", "--all")
    assert (code, err) == (0, ""), err
    assert [line.split(" after")[0] for line in out.splitlines()] == ["a unloaded", "c unloaded"]
    assert (await stead.status("a"))["value"] == "unloaded"
    code, out, _ = await stead.command("events", "--json", "-n", "1000")
    events = [json.loads(line) for line in out.splitlines()]
    states = [e["state"] for e in events if e["kind"] == "status" and e.get("model") == "c"]
    assert states[-2:] == ["stopping", "stopped"]
    assert "ready" in states
    code, out, err = await stead.command("load", "nope")
    assert (code, out, err) == (
        1,
        "",
        "llamastead: model 'nope' not found: `llamastead ps` lists the names\n",
    )
    code, out, err = await stead.command("unload")
    assert (code, out) == (1, "")
    assert "--all" in err
