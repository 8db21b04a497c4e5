"""Which llama-server is used, what it can do, and whether it runs on this processor."""

from dataclasses import dataclass
from pathlib import Path

from llamastead.supervisor.registry.options import OptionTable


class EngineError(Exception):
    """There is no usable engine; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Engine:
    """A llama-server binary: `version` as it words it, `options` as its --help lists them."""

    path: Path
    version: str
    options: OptionTable
