"""What the supervisor notes of an instance beside the core's view: where it is and what it said last."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamastead.shared.figures import Effective
from llamastead.supervisor.holder_link import HolderView
from llamastead.supervisor.launch import InstanceSpec


@dataclass
class Running:
    """Facts of one instance, kept from its start or adoption until its end.

    `meta` is the payload of its first ready, `progress` that of its last loading line; `spawned_at` is
    monotonic seconds, None for an adopted one; `loading` lasts until ready, and again while it wakes;
    `effective` sums what it says it allocated.
    """

    model: str
    address: str
    nonce: str
    pid: int = 0
    loading: bool = True
    spawned_at: float | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    effective: Effective = field(default_factory=Effective)
    progress: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def started(cls, spec: InstanceSpec) -> "Running":
        """Return the note of an instance that is being started now."""
        return cls(spec.model, spec.address, spec.nonce, spawned_at=time.monotonic())

    @classmethod
    def adopted(cls, view: HolderView) -> "Running":
        """Return the note of an instance that was found running."""
        return cls(
            view.model or "",
            view.address or "",
            view.nonce or "",
            view.pid or 0,
            view.phase in ("starting", "loading"),
            meta=view.ready_payload or {},
        )

    @property
    def socket(self) -> Path | None:
        """The unix socket it listens on, None when its address is of another kind."""
        kind, _, path = self.address.partition(":")
        return Path(path) if kind == "unix" else None

    def take_load_ms(self) -> int | None:
        """Return the measured load time once, at the first ready."""
        if self.spawned_at is None:
            return None
        load_ms, self.spawned_at = round((time.monotonic() - self.spawned_at) * 1000), None
        return load_ms
