"""GET /queue: who waits, for what and how long, from the facts in Redis."""

from typing import Any

from llamastead.shared.clock import wall_ms
from llamastead.shared.store.gateway import GatewayStore


async def show_queue(store: GatewayStore) -> dict[str, Any]:
    """Return the queue, the entry that came first standing first, with each request's id, kind and wait."""
    now_ms, queue = wall_ms(), await store.read_queue()
    waiting = sum(len(demand.tickets) for demand in queue.values())
    entries = [
        {
            "model": model,
            "position": position,
            "waiting_ms": max(0, now_ms - demand.first_ms),
            "requests": [
                {
                    "request_id": ticket.request_id,
                    "kind": ticket.kind,
                    "gateway": ticket.gateway,
                    "waiting_ms": max(0, now_ms - ticket.enqueued_ms),
                }
                for ticket in demand.tickets
            ],
        }
        for position, (model, demand) in enumerate(queue.items(), start=1)
    ]
    return {"queue": entries, "waiting": waiting}
