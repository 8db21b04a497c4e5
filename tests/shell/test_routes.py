"""Routes of the application: views, orders, logs and errors, and what never touches the queue."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from app_kit import OpenRequest, Served, open_app
from gateway_kit import settings_for, until
from redis.asyncio import Redis

from llamastead.gateway.auth import Keys
from llamastead.gateway.routes import ROUTES, WITH_MODEL_PROXIED, Access, Router, Serves
from llamastead.shared.errors import ApiError
from llamastead.shared.words import UseKind


@pytest.fixture
async def served(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with open_app(redis, settings, Keys(), "a", "b", al="a") as app:
        yield app


async def answer(served: Served, **payload: object) -> tuple[str, dict[str, str]]:
    """Play the supervisor: answer the next command with this payload; return its verb and fields."""
    while True:
        for command in await served.leader.store.read_commands(1000):
            if command.gateway:
                await served.leader.store.answer(command.id, command.gateway, payload)
                fields = {k: v for k, v in command.fields.items() if k not in ("verb", "gateway")}
                return command.verb, {k: v for k, v in fields.items() if k != "deadline_ms"}
            await served.leader.store.done([command.id])


def test_the_table_is_consistent() -> None:
    """Look at every row: no route twice, proxied ones need a model and say their use, views do not."""
    assert len({(r.method, r.path) for r in ROUTES}) == len(ROUTES)
    for route in ROUTES:
        proxied = route.serves is Serves.PROXY
        assert route.needs_model == proxied
        assert (route.use is not None) == (proxied or route.serves in WITH_MODEL_PROXIED)
        assert not route.may_load or route.method == "POST"
    open_paths = {r.path for r in ROUTES if r.access is Access.OPEN}
    assert open_paths == {"/health", "/v1/health", "/healthz", "/readyz"}


def test_c162_only_inference_counts_as_use() -> None:
    """List what counts as use: POSTs that make the model work, nothing that looks or configures."""
    used = {r.path for r in ROUTES if r.use is UseKind.INFERENCE}
    assert {"/v1/chat/completions", "/v1/embeddings", "/rerank", "/tokenize", "/v1/messages"} <= used
    assert not used & {"/props", "/slots", "/slots/*", "/metrics", "/lora-adapters"}


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/chat/completions", "/v1/chat/completions"),
        ("HEAD", "/models", "/models"),
        ("POST", "/slots/3", "/slots/*"),
        ("GET", "/logs/org/name:Q4", "/logs/*"),
        ("GET", "/v1/chat/completions", None),
        ("GET", "/logs/", None),
        ("PUT", "/models", None),
        ("GET", "/models/", None),
        ("GET", "//models", None),
    ],
)
def test_routes_are_found_by_method_and_path(method: str, path: str, expected: str | None) -> None:
    """Look up exact, open-ended and unknown paths."""
    found = Router().find(method, path)
    assert (found[0].path if found else None) == expected


async def test_c24_control_and_listing_routes_never_take_a_ticket(served: Served) -> None:
    """Let B wait, the queue full: A and every view answer at once, and only B's ticket exists."""
    await served.leader.store.open_herd({"queue_limit_total": 1})
    waiting = asyncio.ensure_future(served.gateway.admission.acquire("b", UseKind.INFERENCE, "r"))
    await until(lambda: served.leader.waiting("b"), "the ticket for B")
    await served.leader.load("i1", "a")
    for path in (
        "/props",
        "/models",
        "/v1/models",
        "/v1/models/b",
        "/health",
        "/healthz",
        "/readyz",
        "/queue",
        "/metrics",
        "/metrics/gateway",
    ):
        assert (await served.client.get(path)).status_code == 200, path
    for kind in (UseKind.INFERENCE, UseKind.READ):
        claim = await served.gateway.admission.acquire("a", kind, "r")
        assert claim.instance == "i1"
        claim.close()
    assert await served.leader.waiting("a") == []
    assert len(await served.leader.waiting("b")) == 1
    waiting.cancel()


async def test_without_the_herd_secret_a_request_is_refused_and_its_lease_ends(served: Served) -> None:
    """Take the secret away before its first use: 500 that says so, for a ticket and for a ready model."""
    (served.gateway.settings.run_dir / "secret").unlink()
    waiting = asyncio.ensure_future(served.gateway.admission.acquire("a", UseKind.INFERENCE, "r"))
    await until(lambda: served.gateway.admission.tickets(), "the ticket")
    await served.leader.load("i1", "a")
    for request in (waiting, served.gateway.admission.acquire("a", UseKind.INFERENCE, "r")):
        with pytest.raises(ApiError, match="herd secret"):
            await request
    for _ in range(3):  # what is not named for two heartbeats is taken away
        await served.gateway.heartbeat.beat(served.gateway.admission)
    assert await served.leader.leases("i1") == {}


async def test_props_with_a_model_goes_to_its_instance(served: Served) -> None:
    """Ask for /props with and without a model: the instance's as a read that loads nothing, or our own."""
    assert (await served.client.get("/props?model=a")).json() == {"proxied": "/props"}
    route = served.proxy.routes[0]
    assert (route.use, route.may_load) == (UseKind.PEEK, False)
    assert (await served.client.get("/props?model=")).json()["role"] == "router"


async def test_unknown_paths_and_disabled_features_look_like_llama_servers(served: Served) -> None:
    """Ask for what is not there and for what is off: the real router's answers."""
    missing = await served.client.get("/nothere")
    assert missing.status_code == 404
    assert missing.json() == {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}
    off = await served.client.get("/tools")
    assert (off.status_code, off.json()["error"]["type"]) == (403, "feature_disabled")


async def test_the_request_id_is_the_clients_if_it_is_a_plain_word(served: Served) -> None:
    """Send a good id, a bad one and none: the good one comes back, the others are made anew."""
    good = await served.client.get("/health", headers={"X-Request-Id": "abc-1.2:3"})
    assert good.headers["x-request-id"] == "abc-1.2:3"
    for headers in ({"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 200}, {}):
        made = (await served.client.get("/health", headers=headers)).headers["x-request-id"]
        assert len(made) == 24


async def test_web_pages_of_any_origin_may_call_without_credentials(served: Served) -> None:
    """Call with an Origin: it is named once with Vary, no credentials; without one nothing is said."""
    page = {"Origin": "http://page"}
    called = await served.client.get("/models", headers=page)
    assert called.headers.get_list("access-control-allow-origin") == ["http://page"]
    assert called.headers["vary"] == "Origin"
    preflight = await served.client.options("/v1/chat/completions", headers=page)
    assert (preflight.status_code, preflight.content) == (200, b"")
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in preflight.headers
    assert "access-control-allow-origin" not in (await served.client.get("/models")).headers


async def test_load_and_unload_are_asked_of_the_supervisor_by_canonical_name(served: Served) -> None:
    """Load by alias, unload by force, and have one refused: passed on, answered, refused in its own words."""
    supervisor = asyncio.ensure_future(answer(served))
    assert (await served.client.post("/models/load", json={"model": "al"})).json() == {"success": True}
    assert await supervisor == ("load", {"model": "a"})
    supervisor = asyncio.ensure_future(answer(served))
    unload = await served.client.post("/models/unload", json={"model": "a", "force": True})
    assert unload.json() == {"success": True}
    assert await supervisor == ("unload", {"model": "a", "force": "1"})
    refusal = {"status": 400, "message": "model is already running", "fields": {}, "retry_after": None}
    supervisor = asyncio.ensure_future(answer(served, error=refusal))
    refused = await served.client.post("/models/load", json={"model": "a"})
    await supervisor
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "model is already running"


async def test_an_order_nobody_answers_is_a_503_in_time(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    """Let the supervisor be silent: 503 with Retry-After, and nothing of it is kept."""
    settings = settings_for(tmp_path, redis_url=redis_url, admission_timeout=0.3)
    async with open_app(redis, settings, Keys(), "a") as served:
        silent = await served.client.post("/models/load", json={"model": "a"})
        assert (silent.status_code, silent.headers["retry-after"]) == (503, "5")
        assert served.gateway.commands.open_questions == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/models/load", b'{"model":"zebra"}', 404, "model 'zebra' not found"),
        ("/models/unload", b'{"model":"zebra"}', 400, "model 'zebra' not found"),
        ("/models/load", b"{}", 400, "model must be a non-empty string, not None"),
        ("/models/load", b'{"model":5}', 400, "model must be a non-empty string, not 5"),
        ("/models/load", b"[]", 400, "the body must be a JSON object"),
        ("/models/load", b'{"model"', 400, "the body is not valid JSON"),
        ("/models/unload", b'{"model":"a","force":"yes"}', 400, "force must be true or false, not 'yes'"),
        ("/models/load", b"[" * 60_000, 400, "the body is not valid JSON: it is nested too deep"),
        ("/v1/streams/lookup", b'{"a":' * 10_000, 400, "the body is not valid JSON: it is nested too deep"),
        ("/v1/streams/lookup", b"[]", 400, "conversation_ids must be a list of strings"),
        ("/models/load", b'{"model":"' + b"x" * 70_000 + b'"}', 413, "the body of this request may have"),
    ],
)
async def test_bad_orders_are_refused_at_once(
    served: Served, path: str, body: bytes, status: int, message: str
) -> None:
    """Send orders that can't be followed: a clear refusal without asking the supervisor."""
    refused = await served.client.post(path, content=body)
    assert refused.status_code == status
    assert refused.json()["error"]["message"].startswith(message)
    assert [verb for verb, _ in await served.leader.asked()] == []


async def test_an_id_that_is_no_text_is_the_id_of_no_conversation(served: Served) -> None:
    """Look a lone surrogate up, which JSON can write and UTF-8 cannot: nothing is known of it."""
    answer = await served.client.post("/v1/streams/lookup", content=b'{"conversation_ids":["\\ud800"]}')
    assert (answer.status_code, answer.json()) == (200, [])


async def test_the_queue_is_shown(served: Served) -> None:
    """Let two requests wait for one model: one entry with both, and their ids."""
    waiting = [
        asyncio.ensure_future(served.gateway.admission.acquire("b", UseKind.INFERENCE, f"r{n}"))
        for n in range(2)
    ]
    await until(lambda: served.gateway.admission.tickets().get("b", [None])[1:], "two tickets")
    shown = (await served.client.get("/queue")).json()
    assert shown["waiting"] == 2
    assert [entry["model"] for entry in shown["queue"]] == ["b"]
    assert sorted(r["request_id"] for r in shown["queue"][0]["requests"]) == ["r0", "r1"]
    for request in waiting:
        request.cancel()


async def test_logs_are_read_and_followed_through_the_supervisor(served: Served) -> None:
    """Read the tail, then follow: the second answer's text comes behind the first, from where that ended."""
    supervisor = asyncio.ensure_future(answer(served, text="one\n", next=4))
    tail = await served.client.get("/logs/a?lines=5")
    assert (tail.text, tail.headers["content-type"]) == ("one\n", "text/plain; charset=utf-8")
    assert await supervisor == ("logs", {"model": "a", "lines": "5", "offset": ""})
    supervisor = asyncio.ensure_future(answer(served, text="one\n", next=4))
    stream = OpenRequest(served.app, "/logs/al", "follow=1")
    assert (await stream.head())[0] == 200
    assert await stream.chunk() == b"one\n"
    await supervisor
    assert await answer(served, text="two\n", next=8) == ("logs", {"model": "a", "lines": "0", "offset": "4"})
    assert await stream.chunk() == b"two\n"
    stream.leave()
    await stream.task


@pytest.mark.parametrize("lines", ["x", "-1", "10001", "²", "9" * 5000])
async def test_a_wrong_number_of_log_lines_is_refused(served: Served, lines: str) -> None:
    """Ask for lines that are no number within bounds: 400 that names the parameter."""
    refused = await served.client.get("/logs/a", params={"lines": lines})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lines")


async def test_readiness_is_the_gateways_own(served: Served) -> None:
    """Look at readiness with Redis known, failing, and while leaving: only the last is a 503."""
    ready = await served.client.get("/readyz")
    assert (ready.status_code, ready.json()["redis"], ready.json()["herd"]) == (200, True, True)
    served.gateway.heartbeat.failing = True
    trouble = await served.client.get("/readyz")
    assert (trouble.status_code, trouble.json()["redis"]) == (200, False)
    served.gateway.draining.set()
    leaving = await served.client.get("/readyz")
    assert (leaving.status_code, leaving.json()["status"]) == (503, "draining")
    assert (await served.client.get("/health")).json() == {"status": "ok"}
