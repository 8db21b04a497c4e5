"""GET /metrics for the whole herd and /metrics/gateway for one process, on a real Valkey."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from app_kit import Served, open_app
from gateway_kit import settings_for, until
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from llamastead.gateway.auth import Keys
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
    await store.put_devices("box", {"GPU0": {**account, **held}}, {"GPU0": held["held"]})
    await store.renew(600_000, {"ready": "1", "oldest_demand_ms": "1500"})
    await served.leader.load("i1", "a")
    await served.leader.load("i2", "c")
    await store.ended("i2", EndClass.CRASHED, 1, "it fell over", {"failed": "1"})
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
    """Ask with a model, an empty one and by HEAD: only the first goes to the instance, as a peek."""
    assert (await served.client.get("/metrics?model=a")).json() == {"proxied": "/metrics"}
    route = served.proxy.routes[0]
    assert (route.use, route.may_load) == (UseKind.PEEK, False)
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
    assert await values(served, "/metrics/gateway") == {
        ("llamastead_process_requests_in_flight",): 1,
        ("llamastead_process_requests_waiting",): 1,
        ("llamastead_process_leases",): 1,
        ("llamastead_process_redis",): 0,
        ("llamastead_process_draining",): 1,
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
