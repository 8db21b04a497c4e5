"""GET /metrics for the whole herd and /metrics/gateway for one process, on a real Valkey."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from app_kit import Served, open_app
from gateway_kit import settings_for, until
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from llamastead.gateway.auth import Keys
from llamastead.gateway.instance_metrics import InstanceMetrics
from llamastead.gateway.routes import Router
from llamastead.gateway.runtime import open_gateway
from llamastead.gateway.views.metrics import herd_page
from llamastead.shared.words import EndClass, InstanceState, UseKind, WaitReason

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
# Ages differ from one reading to the next.
AGES = ("llamastead_supervisor_heartbeat_age_seconds", "llamastead_oldest_waiting_seconds")
GIB = 1 << 30


@pytest.fixture
async def served(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with open_app(redis, settings, Keys(), "a", "b", "c", al="a") as app:
        yield app


async def values(served: Served, path: str = "/metrics") -> dict[tuple[str, ...], float]:
    """Return the samples of a page: (name, label values in the order of their names) → number."""
    answer = await served.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            key = (sample.name, *(sample.labels[name] for name in sorted(sample.labels)))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def wait_for(served: Served, *models: str) -> "list[asyncio.Task[object]]":
    """Begin requests that wait."""
    return [
        asyncio.ensure_future(served.gateway.admission.acquire(model, UseKind.INFERENCE, f"r{n}"))
        for n, model in enumerate(models)
    ]


async def cancelled(requests: "Iterable[asyncio.Task[object]]") -> None:
    """Have requests given up."""
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


async def populate(served: Served) -> "list[asyncio.Task[object]]":
    """Give the herd something of everything: limits, a device, a waiting, a loaded and a failed model."""
    store = served.leader.store
    limits = {"models_max": 2, "queue_limit": 25, "queue_limit_total": 40}
    times = {"max_wait": "30.0", "min_residence": "2.0", "queue_timeout": "600.0", "stop_timeout": "10.0"}
    await store.open_herd({**limits, **times, "host": "box"})
    account = {"total": 8 * GIB, "margin": GIB, "external": 0, "free": 2 * GIB, "debt": 0, "shows": 3 * GIB}
    held = {"held": {"a": 4 * GIB}, "releasing": {"c": GIB}, "measuring": {"b": GIB // 2}}
    lost = {**account, "held": {}, "releasing": {}, "measuring": {}, "problem": "GPU is lost"}
    await store.put_devices("box", {"GPU0": {**account, **held}, "GPU1": lost}, {"GPU0": held["held"]})
    await store.renew(600_000, {"ready": "1", "oldest_demand_ms": "1500"})
    memory = {"source": "measured", "min": {"gpu": {"model": GIB, "context": 1}}, "peak": {"gpu": 2 * GIB}}
    memory["max"] = {"host": {"model": GIB, "mapped": GIB}}
    await store.put_model("a", {"memory": json.dumps(memory), "meta": json.dumps({"n_ctx": 4096})})
    await served.leader.load("i1", "a")
    work = {
        "prompt_tokens": 20,
        "predicted_tokens": 7,
        "prompt_seconds": 0.5,
        "predicted_seconds": 1.5,
        "decodes": 9,
    }
    now = {"slots_busy": 1, "requests_deferred": 2}
    await store.count(
        "a", "i1", work, {**now, "prompt_tokens_per_second": 40, "predicted_tokens_per_second": 5}
    )
    await served.leader.load("i2", "c")
    await store.count("c", "i2", {"predicted_tokens": 3}, now)
    await store.ended("i2", EndClass.CRASHED, 1, "it fell over", {"failed": "1"})
    tally = served.gateway.tally
    for status in (200, 200, 429):
        tally.answered("a", status)
    tally.cut("a")
    tally.waited("a", 1500)
    await served.gateway.heartbeat.beat(served.gateway.admission)
    requests = wait_for(served, "b", "b")
    await until(lambda: len(served.gateway.admission.tickets().get("b", ())) == 2, "two tickets")
    await store.put_model("b", {"wait_reason": WaitReason.BUSY, "wait_for": json.dumps({"i1": "a"})})
    return requests


async def test_the_page_tells_the_whole_herd(served: Served) -> None:
    """Fill a herd with something of everything: each fact stands on the page under its name and labels."""
    requests = await populate(served)
    claim = await served.gateway.admission.acquire("a", UseKind.INFERENCE, "r")
    await served.gateway.heartbeat.beat(served.gateway.admission)
    page = await values(served)
    gateway = served.gateway.id
    expected: dict[tuple[str, ...], float] = {
        ("herd_open",): 1,
        ("supervisor_leading",): 1,
        ("supervisor_ready",): 1,
        ("supervisor_leaderships_total",): 1,
        ("supervisor_oldest_demand_seconds",): 1.5,
        ("queue_entries", "b", "busy"): 1,
        ("waiting_requests", "b", "busy"): 2,
        ("model_loaded", "a"): 1,
        ("model_loaded", "b"): 0,
        ("model_asleep", "a"): 0,
        ("model_failed", "a"): 0,
        ("model_failed", "c"): 1,
        ("model_loads_total", "a"): 1,
        ("model_loads_total", "b"): 0,
        ("model_last_end", "crashed", "c"): 1,
        ("model_ends_total", "crashed", "c"): 1,
        ("model_requests_total", "a", "200"): 2,
        ("model_requests_total", "a", "429"): 1,
        ("model_answers_cut_total", "a"): 1,
        ("model_answers_cut_total", "b"): 0,
        ("model_waits_total", "a"): 1,
        ("model_wait_seconds_total", "a"): 1.5,
        ("model_memory_bytes", "gpu", "min", "a"): GIB + 1,
        ("model_memory_bytes", "host", "max", "a"): GIB,
        ("model_memory_bytes", "gpu", "peak", "a"): 2 * GIB,
        ("model_figures", "a", "measured"): 1,
        ("model_context_tokens", "a"): 4096,
        ("model_prompt_tokens_total", "a"): 20,
        ("model_predicted_tokens_total", "a"): 7,
        ("model_predicted_tokens_total", "c"): 3,
        ("model_prompt_seconds_total", "a"): 0.5,
        ("model_predicted_seconds_total", "a"): 1.5,
        ("model_decodes_total", "a"): 9,
        ("model_slots_busy", "a"): 1,
        ("model_slots_busy", "c"): 0,
        ("model_requests_deferred", "a"): 2,
        ("model_prompt_tokens_per_second", "a"): 40,
        ("model_predicted_tokens_per_second", "a"): 5,
        ("instances", "ready"): 1,
        ("instances", "loading"): 0,
        ("instance_leases", "i1", "a"): 1,
        ("instance_errors", "i1", "a"): 0,
        ("models_max",): 2,
        ("queue_limit", "model"): 25,
        ("queue_limit", "herd"): 40,
        ("max_wait_seconds",): 30,
        ("stop_timeout_seconds",): 10,
        ("device_total_bytes", "GPU0", "box"): 8 * GIB,
        ("device_read_well", "GPU0", "box"): 1,
        ("device_read_well", "GPU1", "box"): 0,
        ("device_shown_free_bytes", "GPU0", "box"): 3 * GIB,
        ("device_held_bytes", "GPU0", "box", "a"): 4 * GIB,
        ("device_releasing_bytes", "GPU0", "box", "c"): GIB,
        ("gateways",): 1,
        ("gateway_requests_in_flight", gateway): 1,
        ("gateway_requests_waiting", gateway): 2,
        ("workers",): 0,
    }
    for (name, *labels), value in expected.items():
        assert page[f"llamastead_{name}", *labels] == value, (name, labels)
    states = {labels[0] for name, *labels in page if name == "llamastead_instances"}
    assert states == set(InstanceState)
    assert ("llamastead_model_predicted_tokens_total", "b") not in page
    assert page["llamastead_oldest_waiting_seconds", "b"] > 0
    assert page["llamastead_oldest_waiting_seconds", "a"] == 0
    claim.close()
    await cancelled(requests)


async def test_who_waits_unseen_unexplained_or_by_order(served: Served) -> None:
    """Let entries wait that nobody looked at, without a reason, and ordered: each says so in its reason."""
    requests = wait_for(served, "a", "b")
    await until(lambda: len(served.gateway.admission.tickets()) == 2, "tickets of both")
    await served.leader.store.put_model("b", {"wait_reason": "unexplained"})
    await served.leader.store.put_model("c", {"wait_reason": WaitReason.LOADING, "wait_ordered": 1})
    page = await values(served)
    waiting = {key[1:]: n for key, n in page.items() if key[0] == "llamastead_waiting_requests"}
    assert waiting == {("a", "unseen"): 1, ("b", "unexplained"): 1, ("c", "loading"): 0}
    await cancelled(requests)


async def test_every_gateway_has_the_same_page(served: Served, redis_url: str, tmp_path: Path) -> None:
    """Read the page through two gateways, one of them busy: line for line the same, but for ages."""
    requests = await populate(served)
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    async with open_gateway(settings_for(other_folder, redis_url=redis_url)) as other:
        await until(lambda: other.heartbeat.reached_redis, "the other gateway")
        await served.gateway.heartbeat.beat(served.gateway.admission)
        pages = [await herd_page(gateway.store) for gateway in (served.gateway, other)]
        one, two = ([line for line in page.splitlines() if not line.startswith(AGES)] for page in pages)
        assert one == two
        assert "llamastead_gateways 2.0" in one
    await cancelled(requests)


async def test_a_read_of_the_page_touches_nothing(served: Served, redis: Redis) -> None:
    """Read both pages with a loaded and a sleeping model: Redis stays as it was, nobody is asked."""
    await served.leader.load("i1", "a")
    await served.leader.load("i2", "b")
    assert await served.leader.store.sleep("i2")
    await served.leader.asked()

    async def everything() -> dict[str, object]:
        found: dict[str, object] = {}
        for key in sorted(await redis.keys("*")):
            match await redis.type(key):
                case "hash":
                    found[key] = await redis.hgetall(key)
                case "zset":
                    found[key] = await redis.zrange(key, 0, -1, withscores=True)
                case "stream":
                    found[key] = await redis.xrange(key)
                case _:
                    found[key] = await redis.get(key)
        return found

    before = await everything()
    page = await values(served)
    await values(served, "/metrics/gateway")
    assert await everything() == before
    assert (page["llamastead_model_asleep", "b"], page["llamastead_model_loaded", "b"]) == (1, 0)
    assert served.proxy.asked == []
    assert await served.leader.asked() == []


async def test_with_a_model_the_page_is_its_instances(served: Served) -> None:
    """Ask with a model, an empty one and by HEAD: only the first goes to the instance, as a read."""
    assert (await served.client.get("/metrics?model=a")).json() == {"proxied": "/metrics"}
    route = served.proxy.routes[0]
    assert (route.use, route.may_load) == (UseKind.READ, False)
    assert ("llamastead_herd_open",) in await values(served, "/metrics?model=")
    assert (await served.client.head("/metrics")).status_code == 200
    assert Router().find("GET", "/metrics/other") is None


async def test_the_process_page_is_of_this_process_and_needs_no_redis(served: Served) -> None:
    """Hold one request, let one wait, call Redis failing and leave: its own page tells it."""
    await served.leader.load("i1", "a")
    claim = await served.gateway.admission.acquire("a", UseKind.INFERENCE, "r")
    requests = wait_for(served, "b")
    await until(lambda: served.gateway.admission.tickets(), "the ticket")
    served.gateway.heartbeat.failing = True
    served.gateway.draining.set()
    served.gateway.clients.connections, served.gateway.clients.limit = {1, 2}, 9
    page = await values(served, "/metrics/gateway")
    assert page.pop(("llamastead_process_resident_bytes",)) > 1 << 20
    assert page == {
        ("llamastead_process_requests_in_flight",): 1,
        ("llamastead_process_requests_waiting",): 1,
        ("llamastead_process_leases",): 1,
        ("llamastead_process_redis",): 0,
        ("llamastead_process_draining",): 1,
        ("llamastead_process_clients",): 2,
        ("llamastead_process_clients_limit",): 9,
    }
    claim.close()
    await cancelled(requests)


async def test_an_emptied_redis_has_a_page_too(served: Served, redis: Redis) -> None:
    """Empty Redis: the page says that nobody leads and no herd is open, with no error."""
    await redis.flushdb()
    page = await values(served)
    for name in ("herd_open", "supervisor_leading", "supervisor_ready", "gateways"):
        assert page[f"llamastead_{name}",] == 0
    assert ("llamastead_models_max",) not in page


async def test_without_redis_the_page_is_a_503(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have reads of Redis fail: the herd's page is a 503 with Retry-After, no page of zeros."""

    async def away() -> dict[str, str]:
        raise RedisConnectionError

    monkeypatch.setattr(served.gateway.store, "read_herd", away)
    refused = await served.client.get("/metrics")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")


async def test_readiness_names_trouble_of_the_herd_and_stays_its_own(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Have the leader new, ready, troubled and gone: /readyz says which, names no model, and stays 200."""
    settings = settings_for(tmp_path, redis_url=redis_url, heartbeat=0.02)
    async with open_app(redis, settings, Keys(), "secret-name") as served:

        async def says(trouble: str) -> None:
            async def look() -> bool:
                answer = await served.client.get("/readyz")
                assert (answer.status_code, answer.json()["status"]) == (200, "ok")
                assert "secret-name" not in answer.text
                return bool(answer.json()["trouble"] == trouble)

            await until(look, f"trouble {trouble!r}")

        await says("the supervisor is not ready")
        await served.leader.store.renew(600_000, {"ready": "1", "trouble": ""})
        await says("")
        trouble = "requests for 'secret-name' wait without a reason"
        await served.leader.store.renew(600_000, {"ready": "0", "trouble": trouble})
        await says("the supervisor is not ready")
        await served.leader.store.resign()
        await says("no supervisor leads")


async def test_the_documented_metrics_are_those_of_the_pages(served: Served) -> None:
    """Read both pages and the tables of docs/metrics.md: names, types, labels and words agree."""
    requests = await populate(served)
    shown = set()
    for path in ("/metrics", "/metrics/gateway"):
        text = (await served.client.get(path)).text
        types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        words = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
        labels: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(text):
            assert family.samples, f"{family.name} has no sample to tell its labels"
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
        assert types.keys() == words.keys() == labels.keys()
        shown |= {(n, types[n], ", ".join(sorted(labels[n])), words[n]) for n in types}
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \| (.*?) ?\| (.+) \|$", DOCS.read_text(), re.MULTILINE)
    documented = [
        (n, kind, ", ".join(sorted(re.findall(r"\w+", marks))), told) for n, kind, marks, told in rows
    ]
    assert len(documented) == len(set(documented))
    assert set(documented) == shown
    await cancelled(requests)


async def test_an_instances_page_that_was_cut_is_not_shown_again(served: Served) -> None:
    """Cut an instance's page in its middle: it is asked again, and only the whole one is kept for later."""
    await served.leader.load("i1", "a")
    await until(lambda: (found := served.gateway.catalog.resolve("a")) and found.running, "a to be loaded")
    answers = [[(b"half", True)], [(b"half", True), (b"whole", False)]]
    seen: list[Any] = []

    async def send(message: Any) -> None:
        seen.append(message)

    async def instance(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body, more in answers.pop(0):
            await send({"type": "http.response.body", "body": body, "more_body": more})

    pages = InstanceMetrics(served.gateway.catalog, served.gateway.store, instance)
    scope = {"type": "http", "method": "GET", "path": "/metrics", "state": {"request_id": "r"}}
    for _ in range(3):
        await pages(scope, asyncio.Event().wait, send, "a")
    assert answers == []
    assert seen[-1]["body"] == b"halfwhole"


class Watched:
    """A loaded model whose own page is asked for through `pages`; `asked` counts those that reach it."""

    def __init__(self, served: Served) -> None:
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.pages = InstanceMetrics(served.gateway.catalog, served.gateway.store, self._instance)
        self._admission = served.gateway.admission

    async def _instance(self, _: Any, __: Any, send: Any) -> None:
        claim = await self._admission.acquire("a", UseKind.READ, "r")
        self.asked += 1
        await self.answers.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x 1\n", "more_body": False})
        claim.close()

    def settled(self, before: int, looks: list[asyncio.Future[None]]) -> bool:
        """Return whether each look has its answer or waits for the engine, asked `before` times so far."""
        return sum(look.done() for look in looks) + self.asked - before == len(looks)

    async def look(self) -> None:
        """Ask for the page once."""

        async def send(_: Any) -> None:
            pass

        scope = {"type": "http", "method": "GET", "path": "/metrics", "state": {"request_id": "r"}}
        await self.pages(scope, asyncio.Event().wait, send, "a")


async def no_lease(served: Served) -> None:
    """Return once nobody holds the instance."""

    async def look() -> bool:
        return not await served.gateway.store.read_leases("i1")

    await until(look, "no lease")


@pytest.fixture
async def watched(served: Served) -> Watched:
    """The model `a`, loaded and at rest."""
    await served.leader.load("i1", "a")
    await until(lambda: (found := served.gateway.catalog.resolve("a")) and found.running, "a to be loaded")
    return Watched(served)


async def test_c79_a_look_at_its_properties_is_no_reason_to_ask_for_metrics(
    served: Served, watched: Watched
) -> None:
    """Read both of a model at rest at once, as a page that shows both does: its engine is asked once, however
    often; after it was used, once more.
    """
    await watched.look()
    await no_lease(served)
    for asked in (1, 2):
        for _ in range(3):
            peek = await served.gateway.admission.acquire("a", UseKind.PEEK, "r")
            await watched.look()
            peek.close()
            await no_lease(served)
        assert watched.asked == asked
        (await served.gateway.admission.acquire("a", UseKind.INFERENCE, "r")).close()
        await no_lease(served)


async def test_c79_two_who_watch_in_step_come_to_rest(served: Served, watched: Watched) -> None:
    """Have two ask for a model's page at the same time, again and again: its engine gets some rest."""
    for _ in range(3):
        watched.answers.clear()
        before = watched.asked
        both: list[asyncio.Future[None]] = []
        for _ in range(2):
            both.append(asyncio.ensure_future(watched.look()))
            await until(partial(watched.settled, before, both), "an answer, or the engine to be asked")
        watched.answers.set()
        await asyncio.gather(*both)
        await no_lease(served)
    assert watched.asked <= 4
