"""GET /queue: who waits, for what, how long and why, from the facts in Redis."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.records import Demand, Ticket, Wait
from llamastead.shared.waiting import sentence

NOBODY = Demand(0, ())
NOT_SEEN = "the supervisor has not looked at it yet"


async def show_queue(store: GatewayStore, gateway: str, busy: Mapping[str, int]) -> dict[str, Any]:
    """Return the queue in the order it is served, each entry with the one reason why it waits.

    Loads that were ordered and that nobody waits for stand in it too. `busy` is instance → requests that this
    `gateway` answers; what the others answer is as of their last heartbeats.
    """
    queue, (now_ms, waits) = await store.read_queue(), await store.read_waits()
    in_flight = await _in_flight(store, gateway, busy)
    entries = [
        _entry(model, queue.get(model, NOBODY), waits.get(model), in_flight, now_ms)
        for model in sorted(queue.keys() | waits.keys(), key=lambda model: _rank(model, queue, waits))
        if model in queue or waits[model].ordered
    ]
    for position, entry in enumerate(entries, start=1):
        entry["position"] = position
    return {"queue": entries, "waiting": sum(len(demand.tickets) for demand in queue.values())}


async def _in_flight(store: GatewayStore, gateway: str, busy: Mapping[str, int]) -> Mapping[str, int]:
    """Return instance → requests it answers, over all gateways."""
    found = Counter(busy)
    for name, about in (await store.read_gateways()).items():
        if name != gateway:
            found.update(json.loads(about.get("busy") or "{}"))
    return found


def _rank(model: str, queue: Mapping[str, Demand], waits: Mapping[str, Wait]) -> tuple[float, int, str]:
    """Return what orders the queue. An entry that the supervisor has not looked at yet came last."""
    if model in waits:
        return waits[model].rank_ms, waits[model].since_ms, model
    return float("inf"), queue[model].first_ms, model


def _entry(
    model: str, demand: Demand, wait: Wait | None, in_flight: Mapping[str, int], now_ms: int
) -> dict[str, Any]:
    since_ms = min(filter(None, (demand.first_ms, wait.since_ms if wait else 0)), default=now_ms)
    entry: dict[str, Any] = {
        "model": model,
        "position": 0,
        "waiting_ms": max(0, now_ms - since_ms),
        "ordered": wait is not None and wait.ordered,
        "reason": None,
        "wait": NOT_SEEN,
        "blockers": [],
    }
    if wait is not None:
        blockers = [
            {"model": name, "instance": instance, "in_flight": in_flight.get(instance, 0)}
            for instance, name in wait.blockers.items()
        ]
        left_ms = None if wait.until_ms is None else max(0, wait.until_ms - now_ms)
        text = sentence(
            wait.reason,
            wait.blockers.values(),
            sum(in_flight.get(instance, 0) for instance in wait.blockers),
            None if left_ms is None else left_ms / 1000,
        )
        entry |= {"reason": wait.reason, "wait": text, "blockers": blockers}
        entry |= {} if left_ms is None else {"left_ms": left_ms}
    return entry | {"requests": [_request(ticket, now_ms) for ticket in demand.tickets]}


def _request(ticket: Ticket, now_ms: int) -> dict[str, Any]:
    return {
        "request_id": ticket.request_id,
        "kind": ticket.kind,
        "gateway": ticket.gateway,
        "waiting_ms": max(0, now_ms - ticket.enqueued_ms),
    }
