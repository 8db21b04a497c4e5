"""What the supervisor notes of an instance beside the core's view: where it is and what it said last."""

import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from llamastead.shared.addresses import Address, TcpAddress, UnixAddress, parse_address
from llamastead.shared.devices.host import read_oom_kills
from llamastead.shared.figures import Effective
from llamastead.shared.secret import instance_key
from llamastead.supervisor.holder_link import HolderView
from llamastead.supervisor.launch import InstanceSpec


@dataclass
class Running:
    """Facts of one instance, kept from its start or adoption until its end.

    `place` is the device it was put on whole, "" for none such; `meta` is the payload of its first ready,
    `progress` that of its last loading line; `spawned_at` is monotonic seconds, None for an adopted one;
    `loading` lasts until ready, and again while it wakes;
    `effective` sums what it says it allocated; `oom_kills` is how many processes the kernel had ended for
    lack of memory when the note was begun.
    """

    model: str
    address: str
    nonce: str
    place: str = ""
    pid: int = 0
    loading: bool = True
    spawned_at: float | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    effective: Effective = field(default_factory=Effective)
    progress: dict[str, Any] = field(default_factory=dict)
    oom_kills: int = field(default_factory=read_oom_kills)

    @classmethod
    def started(cls, spec: InstanceSpec, place: str) -> "Running":
        """Return the note of an instance that is being started now."""
        return cls(spec.model, spec.address, spec.nonce, place, spawned_at=time.monotonic())

    @classmethod
    def adopted(cls, view: HolderView, place: str) -> "Running":
        """Return the note of an instance that was found running."""
        return cls(
            view.model or "",
            view.address or "",
            view.nonce or "",
            place,
            view.pid or 0,
            view.phase in ("starting", "loading"),
            meta=view.ready_payload or {},
        )

    @property
    def where(self) -> Address | None:
        """Where it listens, None while that isn't known."""
        return parse_address(self.address) if self.address else None

    def take_load_ms(self) -> int | None:
        """Return the measured load time once, at the first ready."""
        if self.spawned_at is None:
            return None
        load_ms, self.spawned_at = round((time.monotonic() - self.spawned_at) * 1000), None
        return load_ms


def engine_client(secret: bytes, instance: str, note: Running, timeout_s: float) -> httpx.AsyncClient:
    """Return a client of an instance's engine itself; `secret` is the herd's."""
    where = note.where
    uds = where.path if isinstance(where, UnixAddress) else None
    authority = where.authority if isinstance(where, TcpAddress) else "instance"
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=uds, verify=False),
        base_url=f"http://{authority}",
        timeout=timeout_s,
        headers={"Authorization": f"Bearer {instance_key(secret, instance, note.nonce)}"},
    )
