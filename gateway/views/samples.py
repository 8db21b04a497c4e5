"""What the herd's page shows: facts as Redis has them, and the samples that are made of them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llamastead.shared.store.records import Demand, Leadership, Wait
from llamastead.shared.words import InstanceState, WireStatus

UNSEEN = "unseen"
UNEXPLAINED = "unexplained"

Samples = Iterable[tuple[tuple[str, ...], float]]


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


def one(value: float) -> Samples:
    return (((), value),)


def seconds(herd: Herd, since_ms: int) -> float:
    """Return how long ago a time of Redis is; pieces are read one after the other, so never less than 0."""
    return max(0, herd.now_ms - since_ms) / 1000


def limit(field: str) -> Callable[[Herd], Samples]:
    return lambda herd: one(float(herd.about[field])) if herd.about.get(field) else ()


def queue_limits(herd: Herd) -> Samples:
    for scope, field in (("model", "queue_limit"), ("herd", "queue_limit_total")):
        if herd.about.get(field):
            yield (scope,), float(herd.about[field])


def entries(herd: Herd) -> Iterator[tuple[str, str, int]]:
    """Yield model, reason and requests of each entry that GET /queue shows."""
    for model in sorted(herd.queue.keys() | herd.waits.keys()):
        wait = herd.waits.get(model)
        if model in herd.queue or (wait is not None and wait.ordered):
            reason = UNSEEN if wait is None else wait.reason or UNEXPLAINED
            yield model, reason, len(herd.queue[model].tickets) if model in herd.queue else 0


def oldest(herd: Herd) -> Samples:
    for model in sorted(herd.models.keys() | herd.queue.keys()):
        tickets = herd.queue[model].tickets if model in herd.queue else ()
        yield (model,), max((seconds(herd, ticket.enqueued_ms) for ticket in tickets), default=0.0)


def of_models(value: Callable[[Mapping[str, str]], float]) -> Callable[[Herd], Samples]:
    return lambda herd: [((model,), value(fields)) for model, fields in herd.models.items()]


def has_status(status: WireStatus) -> Callable[[Herd], Samples]:
    return of_models(lambda fields: float(fields.get("status") == status))


def last_ends(herd: Herd) -> Samples:
    for model, fields in herd.models.items():
        if fields.get("end_class"):
            yield (model, fields["end_class"]), 1


def by_suffix(prefix: str) -> Callable[[Herd], Samples]:
    """Return what yields each of a model's totals whose name begins so, by the rest of its name."""
    return lambda herd: [
        ((model, name.removeprefix(prefix)), float(value))
        for model, fields in herd.models.items()
        for name, value in sorted(fields.items())
        if name.startswith(prefix)
    ]


def total_of(field: str, unit: int = 1) -> Callable[[Herd], Samples]:
    return of_models(lambda fields: int(fields.get(field) or 0) / unit)


def states(herd: Herd) -> Samples:
    states = [fields.get("state") for fields in herd.instances.values()]
    return [((state,), states.count(state)) for state in InstanceState]


def leases(herd: Herd) -> Samples:
    for instance, fields in herd.instances.items():
        yield (fields.get("model", ""), instance), herd.claims.get(instance, 0)


def errors(herd: Herd) -> Samples:
    for instance, fields in herd.instances.items():
        yield (fields.get("model", ""), instance), int(fields.get("errors") or 0)


def amounts(part: str) -> Callable[[Herd], Samples]:
    """Return what yields one amount of each device that says it."""
    return lambda herd: [
        ((herd.about["host"], device), account[part])
        for device, account in herd.devices.items()
        if account.get(part) is not None
    ]


def amounts_by_model(part: str) -> Callable[[Herd], Samples]:
    return lambda herd: [
        ((herd.about["host"], device, model), amount)
        for device, account in herd.devices.items()
        for model, amount in account[part].items()
    ]


def read_well(herd: Herd) -> Samples:
    for device, account in herd.devices.items():
        yield (herd.about["host"], device), not account.get("problem")


def memory(herd: Herd) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield model and what is known of its memory, of models that anything is known of."""
    for model, fields in herd.models.items():
        if fields.get("memory") and (known := json.loads(fields["memory"])):
            yield model, known


def figures(herd: Herd) -> Samples:
    for model, known in memory(herd):
        for figure in ("min", "max", "effective"):
            for device, parts in known.get(figure, {}).items():
                yield (model, device, figure), sum(parts.values()) - parts.get("mapped", 0)
        for device, amount in known.get("peak", {}).items():
            yield (model, device, "peak"), amount


def contexts(herd: Herd) -> Samples:
    for model, fields in herd.models.items():
        meta = json.loads(fields.get("meta") or "{}")
        if fields.get("status") in (WireStatus.LOADED, WireStatus.SLEEPING) and meta.get("n_ctx"):
            yield (model,), int(meta["n_ctx"])


def of_gateways(field: str) -> Callable[[Herd], Samples]:
    return lambda herd: [((gateway,), int(about.get(field) or 0)) for gateway, about in herd.gateways.items()]


def counted(field: str) -> Callable[[Herd], Samples]:
    """Return what yields a total of each model that has ever served."""
    return lambda herd: [
        ((model,), float(fields.get(field) or 0))
        for model, fields in herd.models.items()
        if fields.get("counted")
    ]


def at_work(field: str) -> Callable[[Herd], Samples]:
    """Return what yields a figure of each model's instance, 0 for one that sleeps or is not the one asked."""
    return lambda herd: [
        ((model,), float(fields.get(field) or 0) if is_awake(fields) else 0)
        for model, fields in herd.models.items()
        if fields.get("counted")
    ]


def is_awake(fields: Mapping[str, str]) -> bool:
    same = fields.get("counted_of") == fields.get("instance")
    return same and fields.get("status") == WireStatus.LOADED
