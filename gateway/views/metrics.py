"""GET /metrics and /metrics/gateway: the herd as Redis has it, and this process, as pages for Prometheus.

docs/metrics.md has the same tables; a test holds one against the other.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from llamastead.gateway.runtime import Gateway
from llamastead.gateway.tally import ANSWERS, CUT, WAITED_MS, WAITS
from llamastead.gateway.views import samples
from llamastead.gateway.views.samples import Herd, Samples
from llamastead.shared.store.errors import NoHerd
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.words import WireStatus

PREFIX = "llamastead_"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
F = TypeVar("F")


@dataclass(frozen=True)
class Process:
    """What this gateway process knows of itself."""

    in_flight: int
    waiting: int
    leases: int
    redis: bool
    draining: bool
    clients: int
    clients_limit: int
    resident_bytes: int


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
            clients=len(gateway.clients.connections),
            clients_limit=gateway.clients.limit,
            resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES,
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


_ON_DEVICE = ("host", "device")

HERD: tuple[Metric[Herd], ...] = (
    Metric(
        "herd_open",
        "1 once a supervisor has opened the herd in this Redis.",
        lambda h: samples.one(bool(h.about)),
    ),
    Metric("supervisor_leading", "1 while a supervisor leads.", lambda h: samples.one(h.leadership.leading)),
    Metric(
        "supervisor_ready",
        "1 while the supervisor that leads says that no request is overlooked or waits without a reason.",
        lambda h: samples.one(h.leadership.ready),
    ),
    Metric(
        "supervisor_leaderships",
        "Number of the present or last leadership; it grows by one whenever a supervisor takes the lead.",
        lambda h: samples.one(h.leadership.number),
        counter=True,
    ),
    Metric(
        "supervisor_heartbeat_age_seconds",
        "Time since the last heartbeat of a leading supervisor.",
        lambda h: (
            samples.one(samples.seconds(h, h.leadership.heartbeat_ms)) if h.leadership.heartbeat_ms else ()
        ),
    ),
    Metric(
        "supervisor_oldest_demand_seconds",
        "How long the oldest request has waited that the supervisor has not looked at, as it said last.",
        lambda h: samples.one(h.leadership.oldest_demand_ms / 1000),
    ),
    Metric(
        "queue_entries",
        "1 for each entry of the queue, by the one reason why it waits.",
        lambda h: [((model, reason), 1) for model, reason, _ in samples.entries(h)],
        ("model", "reason"),
    ),
    Metric(
        "waiting_requests",
        "Requests that wait for a model, by the one reason why; 0 for a load that was ordered.",
        lambda h: [((model, reason), requests) for model, reason, requests in samples.entries(h)],
        ("model", "reason"),
    ),
    Metric(
        "oldest_waiting_seconds",
        "How long the oldest waiting request of a model has waited; 0 when none waits.",
        samples.oldest,
        ("model",),
    ),
    Metric(
        "model_loaded",
        "1 while the model is loaded, as in GET /models.",
        samples.has_status(WireStatus.LOADED),
        ("model",),
    ),
    Metric("model_asleep", "1 while its engine sleeps.", samples.has_status(WireStatus.SLEEPING), ("model",)),
    Metric(
        "model_failed",
        "1 when its last instance ended in a failure.",
        samples.of_models(lambda fields: float(fields.get("failed") == "1")),
        ("model",),
    ),
    Metric(
        "model_loads",
        "Loads that came to be ready, since the model is in this Redis.",
        samples.total_of("loads"),
        ("model",),
        counter=True,
    ),
    Metric(
        "model_ends",
        "Ends of a model's instances, by why: evicted for another model, idle, stopped, crashed …",
        samples.by_suffix("ends:"),
        ("model", "end_class"),
        counter=True,
    ),
    Metric(
        "model_requests",
        "Inference requests for a model, by the status with which they were answered or refused.",
        samples.by_suffix(ANSWERS),
        ("model", "status"),
        counter=True,
    ),
    Metric(
        "model_answers_cut",
        "Answers that broke off after their status had been sent.",
        samples.total_of(CUT),
        ("model",),
        counter=True,
    ),
    Metric(
        "model_waits",
        "Inference requests that waited for their model, to be loaded, woken or given room, and got it.",
        samples.total_of(WAITS),
        ("model",),
        counter=True,
    ),
    Metric(
        "model_wait_seconds",
        "How long these requests waited in all.",
        samples.total_of(WAITED_MS, 1000),
        ("model",),
        counter=True,
    ),
    Metric("model_last_end", "1 for how its last instance ended.", samples.last_ends, ("model", "end_class")),
    Metric(
        "model_memory_bytes",
        "What a model takes of a device, by figure (min, max, effective, peak); gpu: whichever it goes to.",
        samples.figures,
        ("model", "device", "figure"),
    ),
    Metric(
        "model_figures",
        "1 for where a model's min and max come from: measured, estimate, rough or file size.",
        lambda h: [((model, known["source"]), 1) for model, known in samples.memory(h)],
        ("model", "source"),
    ),
    Metric("model_context_tokens", "The context a loaded model got.", samples.contexts, ("model",)),
    Metric(
        "model_prompt_tokens",
        "Prompt tokens that all instances of a model have processed.",
        samples.counted("prompt_tokens"),
        ("model",),
        counter=True,
    ),
    Metric(
        "model_predicted_tokens",
        "Tokens that all instances of a model have generated.",
        samples.counted("predicted_tokens"),
        ("model",),
        counter=True,
    ),
    Metric(
        "model_prompt_seconds",
        "Time that all instances of a model have spent on prompts.",
        samples.counted("prompt_seconds"),
        ("model",),
        counter=True,
    ),
    Metric(
        "model_predicted_seconds",
        "Time that all instances of a model have spent on generating.",
        samples.counted("predicted_seconds"),
        ("model",),
        counter=True,
    ),
    Metric(
        "model_decodes",
        "Calls of llama_decode() of all instances of a model.",
        samples.counted("decodes"),
        ("model",),
        counter=True,
    ),
    Metric(
        "model_slots_busy",
        "Slots of a model's instance that process a request; 0 asleep or unloaded.",
        samples.at_work("slots_busy"),
        ("model",),
    ),
    Metric(
        "model_requests_deferred",
        "Requests that wait inside a model's instance for a slot; 0 asleep or unloaded.",
        samples.at_work("requests_deferred"),
        ("model",),
    ),
    Metric(
        "model_prompt_tokens_per_second",
        "Prompt tokens per second, as the working instance said last; 0 at rest.",
        samples.at_work("prompt_tokens_per_second"),
        ("model",),
    ),
    Metric(
        "model_predicted_tokens_per_second",
        "Generated tokens per second, as the working instance said last; 0 at rest.",
        samples.at_work("predicted_tokens_per_second"),
        ("model",),
    ),
    Metric("instances", "Instances by state.", samples.states, ("state",)),
    Metric(
        "instance_leases",
        "Gateways that hold a lease on the instance; with any it is not stopped.",
        samples.leases,
        ("model", "instance"),
    ),
    Metric(
        "instance_errors",
        "Errors an instance answered since its load while no answer was right; 0 after a right one.",
        samples.errors,
        ("model", "instance"),
    ),
    Metric("models_max", "Most instances at once; 0: no limit.", samples.limit("models_max")),
    Metric(
        "queue_limit",
        "Most requests that may wait, by scope: for one model, in the whole herd.",
        samples.queue_limits,
        ("scope",),
    ),
    Metric("max_wait_seconds", "The limit --max-wait.", samples.limit("max_wait")),
    Metric("min_residence_seconds", "The limit --min-residence.", samples.limit("min_residence")),
    Metric("queue_timeout_seconds", "The limit --queue-timeout.", samples.limit("queue_timeout")),
    Metric("stop_timeout_seconds", "The limit --stop-timeout.", samples.limit("stop_timeout")),
    Metric("device_total_bytes", "Memory of a device.", samples.amounts("total"), _ON_DEVICE),
    Metric(
        "device_read_well",
        "1 while a device's figures are fresh readings; 0 while they are older, or only an engine's word.",
        samples.read_well,
        _ON_DEVICE,
    ),
    Metric("device_margin_bytes", "Memory that is left alone.", samples.amounts("margin"), _ON_DEVICE),
    Metric("device_external_bytes", "Memory used by others.", samples.amounts("external"), _ON_DEVICE),
    Metric("device_free_bytes", "Memory that the ledger has left.", samples.amounts("free"), _ON_DEVICE),
    Metric("device_debt_bytes", "Memory promised beyond what there is.", samples.amounts("debt"), _ON_DEVICE),
    Metric(
        "device_shown_free_bytes",
        "What the device itself says is free.",
        samples.amounts("shows"),
        _ON_DEVICE,
    ),
    Metric(
        "device_held_bytes",
        "Memory booked for a model that runs.",
        samples.amounts_by_model("held"),
        (*_ON_DEVICE, "model"),
    ),
    Metric(
        "device_releasing_bytes",
        "Memory of a model that has ended, not free yet.",
        samples.amounts_by_model("releasing"),
        (*_ON_DEVICE, "model"),
    ),
    Metric(
        "device_measuring_bytes",
        "Memory set aside while a model is measured.",
        samples.amounts_by_model("measuring"),
        (*_ON_DEVICE, "model"),
    ),
    Metric("gateways", "Gateway processes that are registered.", lambda h: samples.one(len(h.gateways))),
    Metric(
        "gateway_requests_in_flight",
        "Requests a gateway has at instances, as of its last heartbeat.",
        samples.of_gateways("in_flight"),
        ("gateway",),
    ),
    Metric(
        "gateway_requests_waiting",
        "Requests that wait in a gateway, as of its last heartbeat.",
        samples.of_gateways("waiting"),
        ("gateway",),
    ),
    Metric("workers", "Measure workers that live.", lambda h: samples.one(h.workers)),
)

PROCESS: tuple[Metric[Process], ...] = (
    Metric(
        "process_requests_in_flight",
        "Requests this process has at instances.",
        lambda p: samples.one(p.in_flight),
    ),
    Metric(
        "process_requests_waiting", "Requests that wait in this process.", lambda p: samples.one(p.waiting)
    ),
    Metric("process_leases", "Leases this process holds.", lambda p: samples.one(p.leases)),
    Metric("process_redis", "1 while its heartbeats reach Redis.", lambda p: samples.one(p.redis)),
    Metric("process_draining", "1 once it was asked to leave.", lambda p: samples.one(p.draining)),
    Metric("process_clients", "Connections of clients.", lambda p: samples.one(p.clients)),
    Metric(
        "process_clients_limit",
        "So many there may be, for its open files: who comes beyond that gets a 503.",
        lambda p: samples.one(p.clients_limit),
    ),
    Metric("process_resident_bytes", "Memory of this process.", lambda p: samples.one(p.resident_bytes)),
)
