"""How much is measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Sizes of a run. `limit_s` ends it whatever happens."""

    rounds: int
    seconds: float
    connections: tuple[int, ...]
    streams: tuple[int, ...]
    tokens: int
    upload_mib: int
    uploads: int
    loads: int
    crowd: int
    models: int
    idle_s: float
    limit_s: float


FULL = Plan(
    rounds=3,
    seconds=2.0,
    connections=(1, 16, 64),
    streams=(1, 8, 32),
    tokens=100,
    upload_mib=10,
    uploads=5,
    loads=7,
    crowd=64,
    models=1000,
    idle_s=10.0,
    limit_s=600.0,
)
QUICK = Plan(
    rounds=1,
    seconds=0.4,
    connections=(1, 16, 64),
    streams=(1, 8, 32),
    tokens=30,
    upload_mib=10,
    uploads=2,
    loads=2,
    crowd=64,
    models=1000,
    idle_s=1.0,
    limit_s=120.0,
)
