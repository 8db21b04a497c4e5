"""GET /metrics and /metrics/gateway: the herd as Redis has it, and this process, as pages for Prometheus.

docs/metrics.md has the same tables; a test holds one against the other.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from llamastead.gateway.runtime import Gateway
from llamastead.shared.store.errors import NoHerd
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.records import Demand, Leadership, Wait
from llamastead.shared.words import InstanceState, WireStatus

PREFIX = "llamastead_"
UNSEEN = "unseen"
UNEXPLAINED = "unexplained"

Samples = Iterable[tuple[tuple[str, ...], float]]
F = TypeVar("F")


@dataclass(frozen=True)
class Herd:
    """What Redis says, read piece by piece: each piece is of one instant, all of them of about the same."""

    now_ms: int
    about: Mapping[str, str]
    leadership: Leadership
    models: Mapping[str, Mapping[str, str]]
    queue: Mapping[str, Demand]
    waits: Mapping[str, Wait]
    instances: Mapping[str, Mapping[str, str]]
    claims: Mapping[str, int]
    gateways: Mapping[str, Mapping[str, str]]
    workers: int
    devices: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Process:
    """What this gateway process knows of itself."""

    in_flight: int
    waiting: int
    leases: int
    redis: bool
    draining: bool


@dataclass(frozen=True)
class Metric(Generic[F]):
    """One named metric: its samples are label values (in the order of `labels`) and a number."""

    name: str
    help: str
    samples: Callable[[F], Samples]
    labels: tuple[str, ...] = ()
    counter: bool = False


class _Page(Collector, Generic[F]):
    """Gives the registry one look at facts that no longer change."""

    def __init__(self, metrics: tuple[Metric[F], ...], facts: F) -> None:
        self._metrics = metrics
        self._facts = facts

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for metric in self._metrics:
            kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
            family = kind(PREFIX + metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.samples(self._facts):
                family.add_metric(labels, value)
            yield family


async def herd_page(store: GatewayStore) -> str:
    """Return the page of the whole herd, the same at every gateway; RedisError while Redis is away.

    It only reads: nothing is loaded, woken or used by it.
    """
    herd = await _read(store)
    # A large herd has thousands of lines, and answers flow through this loop.
    return await asyncio.to_thread(_render, HERD, herd)


def process_page(gateway: Gateway) -> str:
    """Return the page of this gateway process alone; it needs no Redis."""
    leases = gateway.admission.leases
    return _render(
        PROCESS,
        Process(
            in_flight=leases.in_flight(),
            waiting=gateway.admission.waiting(),
            leases=len(leases.ids()),
            redis=not gateway.heartbeat.failing,
            draining=gateway.draining.is_set(),
        ),
    )


def _render(metrics: tuple[Metric[F], ...], facts: F) -> str:
    registry = CollectorRegistry()
    registry.register(_Page(metrics, facts))
    return generate_latest(registry).decode()


async def _read(store: GatewayStore) -> Herd:
    try:
        about = await store.read_herd()
    except NoHerd:
        about = {}
    models, queue = await store.read_models(), await store.read_queue()
    now_ms, waits = await store.read_waits()
    return Herd(
        now_ms=now_ms,
        about=about,
        leadership=await store.read_leadership(),
        models=models,
        queue=queue,
        waits=waits,
        instances=await store.read_instances(),
        claims=await store.read_claims(),
        gateways=await store.read_gateways(),
        workers=len(await store.read_workers()),
        devices=await store.read_devices(about.get("host", "")),
    )


def _one(value: float) -> Samples:
    return (((), value),)


def _seconds(herd: Herd, since_ms: int) -> float:
    """Return how long ago a time of Redis is; pieces are read one after the other, so never less than 0."""
    return max(0, herd.now_ms - since_ms) / 1000


def _limit(field: str) -> Callable[[Herd], Samples]:
    return lambda herd: _one(float(herd.about[field])) if herd.about.get(field) else ()


def _queue_limits(herd: Herd) -> Samples:
    for scope, field in (("model", "queue_limit"), ("herd", "queue_limit_total")):
        if herd.about.get(field):
            yield (scope,), float(herd.about[field])


def _entries(herd: Herd) -> Iterator[tuple[str, str, int]]:
    """Yield model, reason and requests of each entry that GET /queue shows."""
    for model in sorted(herd.queue.keys() | herd.waits.keys()):
        wait = herd.waits.get(model)
        if model in herd.queue or (wait is not None and wait.ordered):
            reason = UNSEEN if wait is None else wait.reason or UNEXPLAINED
            yield model, reason, len(herd.queue[model].tickets) if model in herd.queue else 0


def _oldest(herd: Herd) -> Samples:
    for model in sorted(herd.models.keys() | herd.queue.keys()):
        tickets = herd.queue[model].tickets if model in herd.queue else ()
        yield (model,), max((_seconds(herd, ticket.enqueued_ms) for ticket in tickets), default=0.0)


def _of_models(value: Callable[[Mapping[str, str]], float]) -> Callable[[Herd], Samples]:
    return lambda herd: [((model,), value(fields)) for model, fields in herd.models.items()]


def _has_status(status: WireStatus) -> Callable[[Herd], Samples]:
    return _of_models(lambda fields: float(fields.get("status") == status))


def _last_ends(herd: Herd) -> Samples:
    for model, fields in herd.models.items():
        if fields.get("end_class"):
            yield (model, fields["end_class"]), 1


def _states(herd: Herd) -> Samples:
    states = [fields.get("state") for fields in herd.instances.values()]
    return [((state,), states.count(state)) for state in InstanceState]


def _leases(herd: Herd) -> Samples:
    for instance, fields in herd.instances.items():
        yield (fields.get("model", ""), instance), herd.claims.get(instance, 0)


def _errors(herd: Herd) -> Samples:
    for instance, fields in herd.instances.items():
        yield (fields.get("model", ""), instance), int(fields.get("errors") or 0)


def _bytes(part: str) -> Callable[[Herd], Samples]:
    """Return what yields one amount of each device that says it."""
    return lambda herd: [
        ((herd.about["host"], device), account[part])
        for device, account in herd.devices.items()
        if account.get(part) is not None
    ]


def _bytes_by_model(part: str) -> Callable[[Herd], Samples]:
    return lambda herd: [
        ((herd.about["host"], device, model), amount)
        for device, account in herd.devices.items()
        for model, amount in account[part].items()
    ]


def _of_gateways(field: str) -> Callable[[Herd], Samples]:
    return lambda herd: [((gateway,), int(about.get(field) or 0)) for gateway, about in herd.gateways.items()]


_ON_DEVICE = ("host", "device")

HERD: tuple[Metric[Herd], ...] = (
    Metric(
        "herd_open", "1 once a supervisor has opened the herd in this Redis.", lambda h: _one(bool(h.about))
    ),
    Metric("supervisor_leading", "1 while a supervisor leads.", lambda h: _one(h.leadership.leading)),
    Metric(
        "supervisor_ready",
        "1 while the supervisor that leads says that no request is overlooked or waits without a reason.",
        lambda h: _one(h.leadership.ready),
    ),
    Metric(
        "supervisor_leaderships",
        "Number of the present or last leadership; it grows by one whenever a supervisor takes the lead.",
        lambda h: _one(h.leadership.number),
        counter=True,
    ),
    Metric(
        "supervisor_heartbeat_age_seconds",
        "Time since the last heartbeat of a leading supervisor.",
        lambda h: _one(_seconds(h, h.leadership.heartbeat_ms)) if h.leadership.heartbeat_ms else (),
    ),
    Metric(
        "supervisor_oldest_demand_seconds",
        "How long the oldest request has waited that the supervisor has not looked at, as it said last.",
        lambda h: _one(h.leadership.oldest_demand_ms / 1000),
    ),
    Metric(
        "queue_entries",
        "1 for each entry of the queue, by the one reason why it waits.",
        lambda h: [((model, reason), 1) for model, reason, _ in _entries(h)],
        ("model", "reason"),
    ),
    Metric(
        "waiting_requests",
        "Requests that wait for a model, by the one reason why; 0 for a load that was ordered.",
        lambda h: [((model, reason), requests) for model, reason, requests in _entries(h)],
        ("model", "reason"),
    ),
    Metric(
        "oldest_waiting_seconds",
        "How long the oldest waiting request of a model has waited; 0 when none waits.",
        _oldest,
        ("model",),
    ),
    Metric(
        "model_loaded",
        "1 while the model is loaded, as in GET /models.",
        _has_status(WireStatus.LOADED),
        ("model",),
    ),
    Metric("model_asleep", "1 while its engine sleeps.", _has_status(WireStatus.SLEEPING), ("model",)),
    Metric(
        "model_failed",
        "1 when its last instance ended in a failure.",
        _of_models(lambda fields: float(fields.get("failed") == "1")),
        ("model",),
    ),
    Metric(
        "model_loads",
        "Loads that came to be ready, since the model is in this Redis.",
        _of_models(lambda fields: int(fields.get("loads") or 0)),
        ("model",),
        counter=True,
    ),
    Metric("model_last_end", "1 for how its last instance ended.", _last_ends, ("model", "end_class")),
    Metric("instances", "Instances by state.", _states, ("state",)),
    Metric(
        "instance_leases",
        "Gateways that hold a lease on the instance; with any it is not stopped.",
        _leases,
        ("model", "instance"),
    ),
    Metric(
        "instance_errors",
        "Errors an instance answered since its load while no answer was right; 0 after a right one.",
        _errors,
        ("model", "instance"),
    ),
    Metric("models_max", "Most instances at once; 0: no limit.", _limit("models_max")),
    Metric(
        "queue_limit",
        "Most requests that may wait, by scope: for one model, in the whole herd.",
        _queue_limits,
        ("scope",),
    ),
    Metric("max_wait_seconds", "The limit --max-wait.", _limit("max_wait")),
    Metric("min_residence_seconds", "The limit --min-residence.", _limit("min_residence")),
    Metric("queue_timeout_seconds", "The limit --queue-timeout.", _limit("queue_timeout")),
    Metric("stop_timeout_seconds", "The limit --stop-timeout.", _limit("stop_timeout")),
    Metric("device_total_bytes", "Memory of a device.", _bytes("total"), _ON_DEVICE),
    Metric("device_margin_bytes", "Memory that is left alone.", _bytes("margin"), _ON_DEVICE),
    Metric("device_external_bytes", "Memory used by others.", _bytes("external"), _ON_DEVICE),
    Metric("device_free_bytes", "Memory that the ledger has left.", _bytes("free"), _ON_DEVICE),
    Metric("device_debt_bytes", "Memory promised beyond what there is.", _bytes("debt"), _ON_DEVICE),
    Metric("device_shown_free_bytes", "What the device itself says is free.", _bytes("shows"), _ON_DEVICE),
    Metric(
        "device_held_bytes",
        "Memory booked for a model that runs.",
        _bytes_by_model("held"),
        (*_ON_DEVICE, "model"),
    ),
    Metric(
        "device_releasing_bytes",
        "Memory of a model that has ended, not free yet.",
        _bytes_by_model("releasing"),
        (*_ON_DEVICE, "model"),
    ),
    Metric(
        "device_measuring_bytes",
        "Memory set aside while a model is measured.",
        _bytes_by_model("measuring"),
        (*_ON_DEVICE, "model"),
    ),
    Metric("gateways", "Gateway processes that are registered.", lambda h: _one(len(h.gateways))),
    Metric(
        "gateway_requests_in_flight",
        "Requests a gateway has at instances, as of its last heartbeat.",
        _of_gateways("in_flight"),
        ("gateway",),
    ),
    Metric(
        "gateway_requests_waiting",
        "Requests that wait in a gateway, as of its last heartbeat.",
        _of_gateways("waiting"),
        ("gateway",),
    ),
    Metric("workers", "Measure workers that live.", lambda h: _one(h.workers)),
)

PROCESS: tuple[Metric[Process], ...] = (
    Metric(
        "process_requests_in_flight",
        "Requests this process has at instances.",
        lambda p: _one(p.in_flight),
    ),
    Metric("process_requests_waiting", "Requests that wait in this process.", lambda p: _one(p.waiting)),
    Metric("process_leases", "Leases this process holds.", lambda p: _one(p.leases)),
    Metric("process_redis", "1 while its heartbeats reach Redis.", lambda p: _one(p.redis)),
    Metric("process_draining", "1 once it was asked to leave.", lambda p: _one(p.draining)),
)
