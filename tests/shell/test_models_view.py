"""GET /models and its neighbours: every state in llama-server's words, and beside the real router."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_kit import Served, open_app
from gateway_kit import settings_for, until
from ports import free_port
from redis.asyncio import Redis
from tiny import tiny_model
from waiting import PATIENCE_S

from llamastead.gateway.auth import Keys
from llamastead.gateway.routes import ROUTES, Serves
from llamastead.shared.errors import ApiError
from llamastead.shared.words import EndClass, InstanceState

# What each of our states is on the wire (design section 2).
ON_THE_WIRE = {
    InstanceState.STARTING: "loading",
    InstanceState.LOADING: "loading",
    InstanceState.WAKING: "loading",
    InstanceState.READY: "loaded",
    InstanceState.DRAINING: "loaded",
    InstanceState.STOPPING: "loaded",
    InstanceState.STOP_FAILED: "loaded",
    InstanceState.SLEEPING: "sleeping",
}


@pytest.fixture
async def served(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    async with open_app(redis, settings_for(tmp_path, redis_url=redis_url), Keys(), "a", "b", al="a") as app:
        yield app


@pytest.fixture(scope="module")
def real_router(real_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real llama-server in router mode with one model, and its address."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "tiny.gguf", 1)
    port = free_port()
    command = [str(real_engine), "--models-dir", str(folder), "--port", str(port), "--offline"]
    router = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        router.kill()
        router.wait()


async def entry(served: Served, name: str) -> dict[str, Any]:
    """Return a model's entry in GET /models."""
    answer = (await served.client.get("/models")).json()
    return next(model for model in answer["data"] if model["id"] == name)


async def entry_once(served: Served, name: str, state: str) -> dict[str, Any]:
    """Return a model's entry once the gateway has heard that it is in that state."""
    found: dict[str, Any] = {}

    async def look() -> bool:
        found.update(await entry(served, name))
        return bool(found["status"]["state"] == state)

    await until(look, f"{name} to be {state}")
    return found


@pytest.mark.parametrize("state", sorted(ON_THE_WIRE))
async def test_c46_c48_each_state_in_the_words_of_llama_server(served: Served, state: InstanceState) -> None:
    """Put an instance into each state: the status is the router's word, only resident models look active."""
    await served.leader.begin("i1", "a")
    if state is not InstanceState.READY:
        await served.leader.store.put_instance("i1", {"state": state.value}, "a", {})
    else:
        await served.leader.store.ready("i1", "a", {})
    shown = await entry_once(served, "a", state)
    assert shown["status"]["value"] == ON_THE_WIRE[state]
    assert (await entry(served, "b"))["status"]["value"] == "unloaded"
    listed = (await served.client.get("/v1/models")).json()
    assert [model["status"]["value"] for model in listed["data"]] == [ON_THE_WIRE[state], "unloaded"]
    assert listed["object"] == "list"


async def test_c48_props_says_whether_a_request_would_load(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Switch autoload off: /props says so, for this gateway."""
    settings = settings_for(tmp_path, redis_url=redis_url, models_autoload=False)
    async with open_app(redis, settings, Keys(), "a") as served:
        assert (await served.client.get("/props")).json()["models_autoload"] is False


async def test_c45_a_lost_event_delays_the_truth_by_one_look(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Change a model behind the back of the event stream: the list converges all the same."""
    settings = settings_for(tmp_path, redis_url=redis_url, reread=0.05)
    async with open_app(redis, settings, Keys(), "a") as served:
        model = served.leader.keys.model("a")
        await served.leader.redis.hset(model, mapping={"status": "loaded", "state": "ready"})
        assert (await entry_once(served, "a", "ready"))["status"]["value"] == "loaded"


async def test_a_model_that_failed_says_why(served: Served) -> None:
    """Let a start fail: failed, exit code and reason, as the router and in our own words."""
    await served.leader.begin("i1", "a")
    await served.leader.store.ended(
        "i1", EndClass.FAILED_TO_START, 1, "no such file", {"failed": 1}, InstanceState.FAILED
    )
    status = (await entry_once(served, "a", "failed"))["status"]
    assert (status["value"], status["failed"], status["exit_code"]) == ("unloaded", True, 1)
    assert (status["end_class"], status["reason"]) == ("failed_to_start", "no such file")


async def test_progress_and_what_the_engine_said_are_shown(served: Served) -> None:
    """Report progress, then ready with the engine's words: `progress` while it loads, `meta` once loaded."""
    progress = {"stages": ["text_model"], "current": "text_model", "value": 0.5}
    await served.leader.begin("i1", "a")
    await served.leader.store.put_instance("i1", {}, "a", {"progress": json.dumps(progress)})
    served.gateway.catalog.mark("a")
    await until(lambda: served.gateway.catalog.models["a"].progress, "the progress")
    assert (await entry(served, "a"))["status"]["progress"] == progress
    await served.leader.store.ready("i1", "a", {}, {"meta": json.dumps({"n_ctx": 512})})
    shown = await entry_once(served, "a", "ready")
    assert shown["meta"] == {"n_ctx": 512}
    assert "progress" not in shown["status"]


async def test_one_model_by_name_or_alias(served: Served) -> None:
    """Look one up by name, alias and a name that isn't there: the entry, the same entry, 404."""
    by_name = (await served.client.get("/v1/models/a")).json()
    by_alias = (await served.client.get("/v1/models/al")).json()
    assert by_name["id"] == by_alias["id"] == "a"
    missing = await served.client.get("/v1/models/org/zebra")
    assert (missing.status_code, missing.json()["error"]["message"]) == (404, "model 'org/zebra' not found")


async def test_hidden_models_are_not_listed_but_answer_to_their_name(served: Served) -> None:
    """Hide a model: it is missing from the list unless that is asked for, and still found by name."""
    await served.leader.store.publish("r2", {"a": {"hidden": 1}, "b": {}}, {})
    await until(lambda: served.gateway.catalog.models["a"].hidden, "the new registry")
    listed = (await served.client.get("/models")).json()["data"]
    assert [model["id"] for model in listed] == ["b"]
    all_of_them = (await served.client.get("/models", params={"hidden": "true"})).json()["data"]
    assert [(model["id"], model.get("hidden")) for model in all_of_them] == [("a", True), ("b", None)]
    assert (await served.client.get("/v1/models/a")).status_code == 200


async def test_a_new_model_is_asked_of_redis_before_it_is_refused(served: Served) -> None:
    """Deafen the gateway and publish a model: looked up once, it is found; an unknown one is not."""
    served.gateway.catalog.mark_all = lambda: None  # type: ignore[method-assign]
    await served.leader.store.publish("r2", {"a": {}, "new": {}}, {"alias": "new"})
    assert served.gateway.catalog.resolve("new") is None
    found = await served.gateway.catalog.look_again("alias")
    assert found is not None
    assert found.name == "new"
    assert await served.gateway.catalog.look_again("zebra") is None


async def test_no_name_is_unknown_before_the_herd_is_open(served: Served) -> None:
    """Empty Redis, as it is before the first supervisor led: a name is asked for again later, not refused."""
    await served.leader.redis.flushdb()
    with pytest.raises(ApiError) as refused:
        await served.gateway.catalog.look_again("zebra")
    assert (refused.value.status, refused.value.retry_after) == (503, 5)
    assert refused.value.message == "No supervisor has opened the herd yet"


async def test_lists_and_props_have_every_field_of_the_real_router(served: Served, real_router: str) -> None:
    """Load and unload a model on the real router and here: no field of its answers is missing in ours."""
    async with httpx.AsyncClient(base_url=real_router, timeout=PATIENCE_S) as real:
        await until_up(real)
        assert fields(await real.get("/props")) <= fields(await served.client.get("/props"))
        unloaded = (await real.get("/models")).json()["data"][0]
        assert unloaded["status"]["value"] == "unloaded"
        ours = await entry(served, "b")
        assert set(unloaded) <= set(ours)
        assert set(unloaded["status"]) <= set(ours["status"])
        assert (await real.post("/models/load", json={"model": "tiny"})).json() == {"success": True}
        loaded: dict[str, Any] = {}

        async def ready() -> bool:
            loaded.update((await real.get("/models")).json()["data"][0])
            return bool(loaded["status"]["value"] == "loaded")

        await until(ready, "the real router's model")
        await served.leader.begin("i1", "a")
        await served.leader.store.ready("i1", "a", {}, {"meta": json.dumps(loaded["meta"])})
        ours = await entry_once(served, "a", "ready")
        assert set(loaded) <= set(ours)
        assert ours["meta"] == loaded["meta"]
        assert (ours["object"], ours["owned_by"]) == (loaded["object"], loaded["owned_by"])


async def test_routes_are_those_of_the_real_router(real_router: str) -> None:
    """Ask the real router for each route in our table that is not our own: it knows every one."""
    ours = {"/healthz", "/readyz", "/queue", "/metrics/gateway", "/logs/*", "/v1/models/*", "/models/sse"} | {
        "/models/reload",
        *("/v1/stream", "/v1/stream/*"),  # an unknown conversation is answered as an unknown path
        "/v1/systemone",  # newer engines alone have it
    }
    async with httpx.AsyncClient(base_url=real_router, timeout=PATIENCE_S) as real:
        await until_up(real)
        for route in ROUTES:
            if route.path in ours:
                continue
            path = route.path.replace("*", "0")
            answer = await real.request(route.method, path, json={} if route.method == "POST" else None)
            known = "File Not Found" not in answer.text or route.serves is Serves.LOAD
            assert known, f"{route.method} {path}"


async def until_up(client: httpx.AsyncClient) -> None:
    """Return once the router answers."""

    async def look() -> bool:
        try:
            return (await client.get("/health")).status_code == 200
        except httpx.TransportError:
            await asyncio.sleep(0.02)
            return False

    await until(look, "the real router")


def fields(answer: httpx.Response) -> set[str]:
    """Return the names of an answer's members."""
    return set(answer.json())
