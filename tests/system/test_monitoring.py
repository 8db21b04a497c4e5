"""Watching loads nothing, wakes nothing and counts as no use; what needs a model says so or has it loaded."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from compat_requests import GOOD, named, with_query
from herd import QUICK, Herd, herd, until
from routes_page import WAKES

from llamastead.gateway.routes import ROUTES, Route, Serves

pytestmark = pytest.mark.asyncio(loop_scope="module")

PRESET = """\
[*]
ctx-size = 512
threads = 1
warmup = off
[sleeper]
alias = dozer
sleep-idle-seconds = 1
[leaver]
unload-after = 2
[embed]
embeddings = true
[rank]
reranking = true
"""
PROBE = "sk-probe-5d"
MODELS = ("sleeper", "leaver", "chat", "fim", "embed", "rank", "cold")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd with a model that sleeps when idle, one that is unloaded, and some that are never loaded."""
    async with herd(QUICK | {"LLAMASTEAD_MODELS_MAX": "0", "LLAMASTEAD_PROBE_KEYS": PROBE}) as made:
        made.add_models(*MODELS)
        preset = made.models.parent / "models.ini"
        preset.write_text(PRESET)
        await made.up("--models-dir", str(made.models), "--models-preset", str(preset))
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(stead: Herd) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway."""
    async with stead.client() as made:
        yield made


def reads() -> list[str]:
    """Return every GET that ends by itself, the reads of a model with `?model=`."""
    paths = ["/v1/models/{}", "/props?model={}", "/metrics?model={}", "/v1/streams/lookup", "/nothere"]
    return paths + [
        f"{route.path}?model={{}}" if route.needs_model else route.path
        for route in ROUTES
        if route.method == "GET" and "*" not in route.path and route.serves is not Serves.EVENTS
    ]


async def is_(stead: Herd, model: str, word: str) -> None:
    """Wait until a model has this status word."""

    async def look() -> bool:
        return bool((await stead.status(model))["value"] == word)

    await until(look, f"{model} {word}")


async def put_to_sleep(stead: Herd, client: httpx.AsyncClient, model: str = "sleeper") -> None:
    """Have a model asleep."""
    if (await stead.status(model))["value"] == "unloaded":
        await client.post("/models/load", json={"model": model})

    async def look() -> bool:
        # The gateway's copy may be of before it was woken, the record in Redis of after it fell asleep.
        asleep = (await stead.instance(model)).get("state") == "sleeping"
        return asleep and bool((await stead.status(model))["value"] == "sleeping")

    await until(look, f"{model} to sleep")


@pytest.mark.parametrize("path", reads())
async def test_c81_reads_of_a_sleeper_leave_it_asleep(
    stead: Herd, client: httpx.AsyncClient, path: str
) -> None:
    """Call every read while the model sleeps, by its alias too: an answer, and it sleeps on."""
    await put_to_sleep(stead, client)
    instance = await stead.instance("sleeper")
    for name in ("sleeper", "dozer"):
        answer = await client.get(path.format(name))
        assert answer.status_code < 500
        if path.startswith(WAKES):
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "model is not loaded")
    async with await stead.direct("sleeper") as engine:
        assert (await engine.get("/props")).json()["is_sleeping"] is True
    # What it takes is noted when that is seen; nothing woke it, and nothing counted as its use.
    lasting = ("id", "pid", "state", "state_revision", "last_used_ms")
    after = await stead.instance("sleeper")
    assert [after[name] for name in lasting] == [instance[name] for name in lasting]


async def test_c81_what_needs_the_model_wakes_it(stead: Herd, client: httpx.AsyncClient) -> None:
    """Call inference and control routes of a sleeper, each after it fell asleep: the same process wakes."""
    await put_to_sleep(stead, client)
    pid = (await stead.instance("sleeper"))["pid"]
    for path in ("/tokenize", "/v1/chat/completions", "/apply-template", "/lora-adapters"):
        await put_to_sleep(stead, client)
        body = named("sleeper", GOOD[path][1])
        answer = await client.post(with_query(path, "model=sleeper"), json=body)
        assert answer.status_code == 200, answer.text
    await put_to_sleep(stead, client)
    assert (await client.get("/slots?model=sleeper&autoload=true")).status_code == 200
    assert (await stead.instance("sleeper"))["pid"] == pid


async def test_c79_a_model_that_is_scraped_falls_asleep_on_time(
    stead: Herd, client: httpx.AsyncClient
) -> None:
    """Read everything of an awake model over and over: it sleeps about when it would have anyway."""
    await put_to_sleep(stead, client)
    await client.post("/tokenize", json={"model": "sleeper", "content": "x"})
    used, scrapes = time.monotonic(), 0
    # Redis knew of its waking before the answer came; the gateway's copy may still say that it sleeps.
    while scrapes <= 2 or (await stead.instance("sleeper"))["state"] != "sleeping":
        for path in ("/metrics?model=sleeper", "/props?model=sleeper", "/v1/models/sleeper", "/health"):
            assert (await client.get(path)).status_code == 200, path
        scrapes += 1
        assert time.monotonic() - used < 15, "kept awake by being watched"
    await is_(stead, "sleeper", "sleeping")


async def test_c79_a_model_that_is_scraped_is_unloaded_on_time(
    stead: Herd, client: httpx.AsyncClient
) -> None:
    """Read everything of a model with `unload-after`, slots too: it goes all the same, for being idle."""
    await client.post("/v1/completions", json=named("leaver", GOOD["/v1/completions"][1]))
    scrapes = 0
    # It was never loaded before, so that it has no earlier end; right after the answer the gateway's copy may
    # still be of its load.
    while "end_class" not in await stead.status("leaver"):
        for path in reads():
            assert (await client.get(path.format("leaver"))).status_code < 500, path
        scrapes += 1
        assert scrapes < 2000, "kept loaded by being watched"
    assert (await stead.status("leaver"))["end_class"] == "idle"


async def test_c82_figures_of_a_sleeper_are_at_rest(stead: Herd, client: httpx.AsyncClient) -> None:
    """Read an instance's metrics after work, asleep, unloaded: counters stay, rates are 0, then an error."""
    await client.post("/v1/completions", json=named("sleeper", GOOD["/v1/completions"][1]))
    worked = await client.get("/metrics?model=sleeper")
    await put_to_sleep(stead, client)
    asleep = await client.get("/metrics?model=sleeper")
    for page in (worked, asleep):
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    before, after = figures(worked.text), figures(asleep.text)
    assert before["llamacpp:tokens_predicted_total"] == after["llamacpp:tokens_predicted_total"] > 0
    assert after["llamacpp:predicted_tokens_seconds"] == 0
    assert before.keys() == after.keys()
    await stead.unload("sleeper")
    gone = await client.get("/metrics?model=sleeper")
    assert (gone.status_code, gone.headers["content-type"]) == (400, "application/json; charset=utf-8")


async def test_c82_the_herds_page_counts_on_through_sleep_unload_and_reload(
    stead: Herd, client: httpx.AsyncClient
) -> None:
    """Let a model work, sleep, work, be unloaded and work again: its totals only grow, and lose nothing; at
    rest its gauges are 0.
    """
    labels = '{model="sleeper"}'

    async def page() -> dict[str, float]:
        return figures((await client.get("/metrics")).text)

    async def counted(least: float) -> dict[str, float]:
        found: dict[str, float] = {}

        async def look() -> bool:
            nonlocal found
            found = await page()
            return found.get(f"llamastead_model_predicted_tokens_total{labels}", 0) >= least

        await until(look, f"{least} tokens counted")
        return found

    async def work() -> float:
        answer = await client.post("/v1/completions", json=named("sleeper", GOOD["/v1/completions"][1]))
        return float(answer.json()["usage"]["completion_tokens"])

    async def rest(page: dict[str, float]) -> None:
        rates = ("slots_busy", "requests_deferred", "prompt_tokens_per_second", "predicted_tokens_per_second")
        assert {page[f"llamastead_model_{name}{labels}"] for name in rates} == {0.0}

    await stead.unload("sleeper")
    before = (await page()).get(f"llamastead_model_predicted_tokens_total{labels}", 0.0)
    tokens = await work()
    assert tokens > 0
    first = await counted(before + tokens)
    await put_to_sleep(stead, client)
    asleep = await page()
    await rest(asleep)
    counters = [name for name in first if name.endswith(f"_total{labels}")]
    assert all(asleep[name] >= first[name] for name in counters)
    tokens += await work()
    await stead.unload("sleeper")
    await rest(await counted(before + tokens))
    tokens += await work()
    last = await counted(before + tokens)
    assert last[f"llamastead_model_predicted_tokens_total{labels}"] == before + tokens
    assert all(last[name] >= asleep[name] for name in counters)


async def test_the_herds_page_counts_requests_waits_and_evictions() -> None:
    """One place: ask for a, for b, which takes it, and for what is not there to be loaded; a second gateway
    leaves with what it served. Requests by status, waits, loads and ends by reason stand on the page.
    """
    async with herd(QUICK | {"LLAMASTEAD_MODELS_MAX": "1", "LLAMASTEAD_HEARTBEAT": "0.2"}) as made:
        made.add_models("a", "b")
        await made.up("--models-dir", str(made.models), "--threads", "1")
        second = await made.gateway("second")
        async with made.client() as client, made.client(1) as other:
            body = GOOD["/v1/completions"][1]
            for front, model in ((client, "a"), (client, "b"), (other, "b")):
                assert (await front.post("/v1/completions", json=named(model, body))).status_code == 200
            refused = await client.post("/v1/completions?autoload=false", json=named("a", body))
            assert refused.status_code == 400
            await second.signal(signal.SIGTERM)
            wanted = {
                'llamastead_model_requests_total{model="a",status="200"}': 1,
                'llamastead_model_requests_total{model="a",status="400"}': 1,
                'llamastead_model_requests_total{model="b",status="200"}': 2,
                'llamastead_model_ends_total{end_class="evicted",model="a"}': 1,
                'llamastead_model_loads_total{model="b"}': 1,
                'llamastead_model_waits_total{model="a"}': 1,
                'llamastead_model_waits_total{model="b"}': 1,
                'llamastead_model_answers_cut_total{model="b"}': 0,
            }
            found: dict[str, float] = {}

            async def counted() -> bool:
                nonlocal found
                page = figures((await client.get("/metrics")).text)
                found = {name: page.get(name, -1) for name in wanted}
                return found == wanted

            await until(counted, f"{wanted}")
            page = figures((await client.get("/metrics")).text)
            assert page['llamastead_model_wait_seconds_total{model="b"}'] > 0


def figures(page: str) -> dict[str, float]:
    """Return the samples of a page of metrics."""
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_c85_one_models_status_costs_nothing(stead: Herd, client: httpx.AsyncClient) -> None:
    """Look one model up with GET and HEAD, unloaded, by alias, unknown: its entry, at once, and no load."""
    entry: dict[str, Any] = {}

    async def alike() -> bool:
        # What the worker finds out meanwhile comes into one of the two.
        nonlocal entry
        entry = (await client.get("/v1/models/cold")).json()
        listed = (await client.get("/v1/models")).json()["data"]
        return bool(entry.keys() == next(model for model in listed if model["id"] == "cold").keys())

    await until(alike, "the entry to be as it is listed")
    assert (entry["id"], entry["object"], entry["status"]["value"]) == ("cold", "model", "unloaded")
    head = await client.head("/v1/models/cold")
    assert (head.status_code, head.content) == (200, b"")
    assert (await client.get("/v1/models/dozer")).json()["id"] == "sleeper"
    assert (await client.get("/v1/models/nope")).status_code == 404
    assert await stead.instance("cold") == {}


async def test_c84_probes_that_refuse_a_load_load_nothing(stead: Herd, client: httpx.AsyncClient) -> None:
    """Probe models with one token each, by query, by header and by key, beside a real user: only the user's
    loads; a key that may load nothing gets 503, and an answer from what is loaded.
    """
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    key = {"Authorization": f"Bearer {PROBE}"}

    async def probe(model: str) -> None:
        for query, headers, status in (
            ("?autoload=false", {}, 400),
            ("", {"X-Llamastead-Autoload": "false"}, 503),
            ("?autoload=true", {"X-Llamastead-Autoload": "false"}, 503),
            ("?autoload=true", key, 503),
        ):
            answer = await client.post(
                f"/v1/chat/completions{query}", json={"model": model, **chat}, headers=headers
            )
            assert (answer.status_code, answer.json()["error"]["message"]) == (status, "model is not loaded")
        for path in ("/slots", "/lora-adapters", "/props"):
            answer = await client.get(f"{path}?model={model}&autoload=true", headers=key)
            assert answer.status_code == 503
        refused = await client.post("/models/load", json={"model": model}, headers=key)
        assert refused.status_code == 403

    await client.post("/models/load", json={"model": "chat"})
    await is_(stead, "chat", "loaded")
    idle = [model for model in ("cold", "fim", "rank") if await stead.instance(model) == {}]
    assert idle
    used = client.post("/v1/chat/completions", json={"model": "chat", **chat})
    answers = await asyncio.gather(used, *(probe(model) for model in idle))
    assert answers[0].status_code == 200
    probed = await client.post("/v1/chat/completions", json={"model": "chat", **chat}, headers=key)
    assert probed.status_code == 200
    assert [await stead.instance(model) for model in idle] == [{}] * len(idle)


def loading_routes() -> list[Route]:
    """Return the routes that load a model which is not loaded."""
    return [route for route in ROUTES if route.may_load]


@pytest.mark.parametrize("route", loading_routes(), ids=lambda route: route.path)
async def test_c168_every_inference_path_loads(stead: Herd, client: httpx.AsyncClient, route: Route) -> None:
    """Call each route first of all after an unload: the model is loaded for it, whatever it then answers."""
    path = route.path.replace("*", "0?action=erase")
    model = GOOD.get(path, ("chat",))[0]
    if await stead.instance(model):
        await stead.unload(model)
    body = GOOD.get(path, ("", {}))[1]
    answer = await client.post(with_query(path, f"model={model}"), json=named(model, body))
    assert answer.headers["x-llamastead-path"] == "cold", answer.text
    await is_(stead, model, "loaded")


@pytest.mark.parametrize("path", ["/props", "/metrics", "/slots", "/lora-adapters"])
async def test_c168_reads_load_only_when_told(stead: Herd, client: httpx.AsyncClient, path: str) -> None:
    """Read from a model that is not loaded, without and with `autoload=true`: a clear 400, then a load."""
    if await stead.instance("chat"):
        await stead.unload("chat")
    refused = await client.get(f"{path}?model=chat")
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "model is not loaded")
    assert await stead.instance("chat") == {}
    assert (await client.get(f"{path}?model=chat&autoload=true")).status_code == 200
    await is_(stead, "chat", "loaded")


async def test_the_routes_are_json_where_they_say_so(client: httpx.AsyncClient) -> None:
    """Read the views of the herd: each is the JSON that its clients expect."""
    for path in ("/models", "/props", "/queue", "/health", "/healthz", "/readyz"):
        assert isinstance(json.loads((await client.get(path)).text), dict)
