"""The functions that jobs may name: this table is all a job can reach."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from redis import Redis

from llamastead.measure_worker.measuring import MeasureError, measure
from llamastead.shared.clock import wall_ms
from llamastead.shared.figures import Figures, to_json
from llamastead.shared.gguf import GgufError, read_metadata
from llamastead.shared.jobs import MEASURE_MODEL, READ_METADATA
from llamastead.shared.secret import read_herd_secret, same_key, seal
from llamastead.shared.store.keys import Keys

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Desk:
    """What a job works with: the herd's Redis, and the run folder, where the herd secret is."""

    redis: Redis
    keys: Keys
    run_dir: Path


def on_read_metadata(desk: Desk, model: str, path: str, mmproj: str | None, identity: str) -> None:
    """Read a GGUF's header, keep the outcome under its identity and tell the supervisor.

    A file that can't be read is an outcome too: `error` says why, so that nobody asks again and again.
    """
    try:
        found = asdict(read_metadata(Path(path), Path(mmproj) if mmproj else None))
        fields = {name: _text(value) for name, value in found.items() if value is not None}
    except GgufError as error:
        log.warning("metadata not read: %s", error, extra={"model": model})
        fields = {"error": str(error)}
    place = desk.keys.metadata(identity)
    with desk.redis.pipeline() as change:
        change.delete(place)
        change.hset(place, items=[part for pair in fields.items() for part in pair])
        change.xadd(desk.keys.commands, {"verb": "metadata", "identity": identity, "model": model})
        change.execute()


def on_measure_model(desk: Desk, model: str, identity: str, preset: str, order: str, sealed: str) -> None:
    """Measure what a model takes at its smallest and its largest context, and tell the supervisor.

    A failure is an outcome too. What a real load showed before stays in the hash.
    """
    fields: dict[str, str | int] = {"model": model, "measured_ms": wall_ms(), "error": ""}
    try:
        smallest, largest = _measure(desk, order, sealed)
        fields |= {
            "state": "measured",
            "min": json.dumps(to_json(smallest)),
            "max": json.dumps(to_json(largest)),
        }
    except (MeasureError, OSError, ValueError) as error:
        log.warning("not measured: %s", error, extra={"model": model})
        fields |= {"state": "failed", "error": str(error)}
    place = desk.keys.measurement(identity, preset)
    with desk.redis.pipeline() as change:
        change.hset(place, items=[part for pair in fields.items() for part in pair])
        if fields["state"] == "failed":
            change.hincrby(place, "failures", 1)
        told = {"verb": "measured", "identity": identity, "preset": preset, "model": model}
        change.xadd(desk.keys.commands, told)  # type: ignore[arg-type]
        change.execute()


def _measure(desk: Desk, order: str, sealed: str) -> tuple[Figures, Figures]:
    secret = read_herd_secret(desk.run_dir / "secret")
    if not same_key(sealed, seal(secret, order)):
        raise MeasureError("the order does not come from this herd's supervisor")
    asked = json.loads(order)
    found = [measure(argv, asked["variables"]) for argv in asked["commands"]]
    return found[0], found[-1]


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return json.dumps(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


FUNCTIONS: Mapping[str, Callable[..., None]] = {
    READ_METADATA: on_read_metadata,
    MEASURE_MODEL: on_measure_model,
}
