"""Health of this gateway: /health as llama-server has it, /healthz for liveness, /readyz for balancers."""

from typing import Any

from llamastead.gateway.runtime import Gateway

ALIVE: dict[str, Any] = {"status": "ok"}


def readiness(gateway: Gateway) -> tuple[int, dict[str, Any]]:
    """Return status and body of /readyz.

    503 only for this gateway's own reasons: it is leaving, or never reached Redis. Trouble of the herd stands
    in the body, or one outage of Redis would take every gateway out of its balancer at once. `trouble` says
    that no supervisor leads or that it is not ready, as of the last heartbeat, or why the registry was not
    read again: no answer waits for Redis. `herd` says that a supervisor has opened it and that this gateway
    knows its models.
    """
    heartbeat = gateway.heartbeat
    body = {
        "gateway": gateway.id,
        "redis": not heartbeat.failing,
        "herd": heartbeat.herd_open and bool(gateway.catalog.herd),
        "trouble": heartbeat.trouble or gateway.catalog.herd.get("registry_error", ""),
        "in_flight": gateway.admission.leases.in_flight(),
        "waiting": gateway.admission.waiting(),
    }
    if gateway.draining.is_set():
        return 503, {"status": "draining", **body}
    if not heartbeat.reached_redis:
        return 503, {"status": "redis was not reached yet", **body}
    return 200, {"status": "ok", **body}
