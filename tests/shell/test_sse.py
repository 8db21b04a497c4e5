"""GET /models/sse: the router's events, in the order in which things happened."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from app_kit import OpenRequest, Served, open_app
from gateway_kit import settings_for, until
from redis.asyncio import Redis

from llamastead.gateway.auth import Keys
from llamastead.shared.words import EndClass, InstanceState

PROGRESS = {"stages": ["text_model"], "current": "text_model", "value": 1.0}


@pytest.fixture
async def served(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    async with open_app(redis, settings_for(tmp_path, redis_url=redis_url), Keys(), "a") as app:
        yield app


async def told(stream: OpenRequest) -> dict[str, Any]:
    """Return the next event of a stream."""
    chunk = await stream.chunk()
    assert chunk is not None
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    event: dict[str, Any] = json.loads(chunk[6:])
    return event


async def test_a_models_life_is_told_as_the_real_router_tells_it(served: Served) -> None:
    """Load with progress, drain, put to sleep and end an instance: each change of the wire status, once."""
    stream = OpenRequest(served.app, "/models/sse")
    status, headers = await stream.head()
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    assert headers["x-accel-buffering"] == "no"
    store = served.leader.store
    await store.put_instance("i1", {"state": InstanceState.STARTING.value}, "a", {})
    await served.leader.begin("i1", "a")
    event = {"kind": "progress", "model": "a", "instance": "i1", "progress": json.dumps(PROGRESS)}
    await store.put_instance("i1", {}, "a", {}, event)
    await store.ready("i1", "a", {}, {"meta": json.dumps({"n_ctx": 512}), "tags": json.dumps(["x", "y"])})
    assert await told(stream) == {
        "model": "a",
        "event": "model_status",
        "data": {"status": "loading", "instance": "i1"},
    }
    assert await told(stream) == {
        "model": "a",
        "event": "status_change",
        "data": {"status": "loading", "progress": PROGRESS},
    }
    loaded = await told(stream)
    assert loaded["data"]["info"].pop("created") > 0
    assert loaded == {
        "model": "a",
        "event": "status_change",
        "data": {
            "status": "loaded",
            "instance": "i1",
            "info": {
                "id": "a",
                "aliases": ["a"],
                "tags": ["x", "y"],
                "object": "model",
                "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
                "owned_by": "llamacpp",
                "meta": {"n_ctx": 512},
            },
        },
    }
    # Only now: what is told of a loaded model is read when it is told.
    await store.drain("i1")
    await store.undrain("i1")
    await store.sleep("i1")
    await store.ended("i1", EndClass.STOPPED, 0, "")
    await store.publish("r2", {"a": {}}, {})
    assert (await told(stream))["data"] == {"status": "sleeping", "instance": "i1"}
    ended = {"status": "unloaded", "instance": "i1", "exit_code": 0, "end_class": "stopped"}
    assert (await told(stream))["data"] == ended
    assert await told(stream) == {"model": "*", "event": "models_reload"}
    stream.leave()
    await stream.task


async def test_a_client_that_leaves_is_forgotten(served: Served) -> None:
    """Open a stream and leave: the request ends, and nothing is kept for it."""
    stream = OpenRequest(served.app, "/models/sse")
    await stream.head()
    await until(lambda: served.gateway.events.open_streams == 1, "the stream")
    stream.leave()
    await stream.task
    assert served.gateway.events.open_streams == 0


async def test_a_gateway_that_leaves_ends_its_streams(served: Served) -> None:
    """Close the streams while two are open: both end properly, and a new one ends at once."""
    streams = [OpenRequest(served.app, "/models/sse") for _ in range(2)]
    await until(lambda: served.gateway.events.open_streams == 2, "the streams")
    served.gateway.events.close()
    late = OpenRequest(served.app, "/models/sse")
    for stream in (*streams, late):
        assert (await stream.head())[0] == 200
        assert await stream.chunk() is None
        await stream.task


async def test_no_event_is_lost_while_redis_is_out_of_reach(served: Served, redis: Redis) -> None:
    """Cut the gateway's connections while a model comes and goes five times: each event is told, in order."""
    stream = OpenRequest(served.app, "/models/sse")
    await stream.head()
    store, expected = served.leader.store, []
    for number in range(5):
        instance, cut = f"i{number}", 0
        while not cut:  # the gateway may still be about to connect again
            cut = await redis.client_kill_filter(_type="normal", skipme=True)
        await store.put_instance(instance, {"state": InstanceState.STARTING.value}, "a", {})
        await served.leader.begin(instance, "a")
        await redis.client_kill_filter(_type="normal", skipme=True)
        await store.ended(instance, EndClass.CRASHED, 1, f"end {number}")
        expected += [("loading", None), ("unloaded", f"end {number}")]
    heard = [(await told(stream))["data"] for _ in expected]
    assert [(data["status"], data.get("reason")) for data in heard] == expected
    stream.leave()
    await stream.task
