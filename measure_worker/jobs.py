"""The functions that jobs may name: this table is all a job can reach."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from llamastead.measure_worker.attempt import Desk, Function, JobError, patiently
from llamastead.measure_worker.downloads import (
    leave_to_record,
    on_fetch_file,
    on_place_download,
    on_plan_download,
    on_remove_model,
)
from llamastead.measure_worker.leftovers import work_folder
from llamastead.measure_worker.measuring import MeasureError, measure
from llamastead.shared.clock import wall_ms
from llamastead.shared.figures import Figures, to_json
from llamastead.shared.gguf import GgufError, read_metadata
from llamastead.shared.jobs import (
    FETCH_FILE,
    MEASURE_MODEL,
    PLACE_DOWNLOAD,
    PLAN_DOWNLOAD,
    READ_METADATA,
    REMOVE_MODEL,
)
from llamastead.shared.secret import read_herd_secret, same_key, seal


def on_read_metadata(desk: Desk, model: str, path: str, mmproj: str | None, identity: str) -> None:
    """Read a GGUF's header, keep what it says under its identity and tell the supervisor.

    A file that can't be read is an outcome too: `error` says why, so that nobody asks again and again.
    """
    try:
        found = asdict(read_metadata(Path(path), Path(mmproj) if mmproj else None))
    except GgufError as error:
        _keep_metadata(desk, identity, model, {"error": str(error)})
        raise JobError(str(error)) from None
    fields = {name: _text(value) for name, value in found.items() if value is not None}
    _keep_metadata(desk, identity, model, fields)


def on_metadata_failed(desk: Desk, why: str, **_: str | None) -> None:
    """Keep nothing: that a process died says nothing of the file."""


def _keep_metadata(desk: Desk, identity: str, model: str, fields: Mapping[str, str]) -> None:
    place = desk.keys.metadata(identity)

    def keep() -> None:
        with desk.redis.pipeline() as change:
            change.delete(place)
            change.hset(place, items=[part for pair in fields.items() for part in pair])
            change.xadd(desk.keys.commands, {"verb": "metadata", "identity": identity, "model": model})
            change.execute()

    patiently(keep)


def on_measure_model(desk: Desk, model: str, identity: str, preset: str, order: str, sealed: str) -> None:
    """Measure what a model takes at its smallest and its largest context, and tell the supervisor.

    What a real load showed before stays in the hash.
    """
    try:
        smallest, largest = _measure(desk, order, sealed)
    except (MeasureError, OSError, ValueError) as error:
        raise JobError(str(error)) from None
    figures = {"min": json.dumps(to_json(smallest)), "max": json.dumps(to_json(largest))}
    _keep_measurement(desk, model, (identity, preset), {"state": "measured", "error": "", **figures})


def on_measurement_failed(desk: Desk, why: str, *, model: str, identity: str, preset: str, **_: str) -> None:
    """Keep why a measurement told nothing, and how often that was so."""
    _keep_measurement(desk, model, (identity, preset), {"state": "failed", "error": why})


def _keep_measurement(desk: Desk, model: str, key: tuple[str, str], outcome: Mapping[str, str]) -> None:
    identity, preset = key
    place = desk.keys.measurement(identity, preset)
    fields: dict[str, str | int] = {"model": model, "measured_ms": wall_ms(), **outcome}

    def keep() -> None:
        with desk.redis.pipeline() as change:
            change.hset(place, items=[part for pair in fields.items() for part in pair])
            if outcome["state"] == "failed":
                change.hincrby(place, "failures", 1)
            told = {"verb": "measured", "identity": identity, "preset": preset, "model": model}
            change.xadd(desk.keys.commands, told)  # type: ignore[arg-type]
            change.execute()

    patiently(keep)


def _measure(desk: Desk, order: str, sealed: str) -> tuple[Figures, Figures]:
    secret = read_herd_secret(desk.run_dir / "secret")
    if not same_key(sealed, seal(secret, order)):
        raise MeasureError("the order does not come from this herd's supervisor")
    asked = json.loads(order)
    commands, found = asked["commands"], []
    for number, argv in enumerate(commands, 1):
        desk.attempt.check(f"{number} of {len(commands)}")
        with work_folder(desk.run_dir) as folder:
            found.append(measure(argv, asked["variables"], folder, desk.attempt.beat))
    return found[0], found[-1]


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return json.dumps(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


FUNCTIONS: Mapping[str, Function] = {
    READ_METADATA: Function(on_read_metadata, on_metadata_failed),
    MEASURE_MODEL: Function(on_measure_model, on_measurement_failed),
    PLAN_DOWNLOAD: Function(on_plan_download, leave_to_record),
    FETCH_FILE: Function(on_fetch_file, leave_to_record),
    PLACE_DOWNLOAD: Function(on_place_download, leave_to_record),
    REMOVE_MODEL: Function(on_remove_model, leave_to_record),
}
