"""From a model to a start order for its holder: command line, environment, files."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class LaunchError(Exception):
    """This model can't be started as configured; the message says why and what to do."""


@dataclass(frozen=True)
class InstanceSpec:
    """Everything a holder needs to start one instance; `message` is the `spec` of its `start` order.

    `spec_hash` tells two specs of the same instance apart without holding its key. Times are seconds.
    """

    instance: str
    model: str
    nonce: str
    revision: str
    spec_hash: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    socket: str
    stop_timeout_s: float
    orphan_grace_s: float
    log_path: str
    log_bytes: int

    @property
    def address(self) -> str:
        """Where gateways reach the instance."""
        return f"unix:{self.socket}"

    @property
    def folder(self) -> Path:
        """The instance's folder in the run folder."""
        return Path(self.socket).parent

    def message(self) -> dict[str, Any]:
        """Return the spec as JSON-ready values."""
        return {**asdict(self), "argv": list(self.argv), "env": dict(self.env)}
