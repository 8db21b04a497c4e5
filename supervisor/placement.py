"""Where instances of a model may lie: which devices they are shown, and what the ledger calls those.

An instance is kept to its device by showing it no other, since an engine opens a context on every GPU it sees
and puts a projector on the first: CUDA_VISIBLE_DEVICES by UUID, HIP_VISIBLE_DEVICES by number. Vulkan and the
rest have no such variable that counts as the engine's own list does; they open nothing unasked, and take
`--device`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llamastead.shared.devices.device import HOST
from llamastead.shared.devices.gpus import visible_devices
from llamastead.supervisor.registry.options import OptionTable

CUDA, ROCM = "CUDA", "ROCm"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES")
# With one of these said, who configured it has decided how the model lies.
_DECIDES = ("tensor-split", "main-gpu")


class PlacementError(Exception):
    """A device is named that is not there; the message says which there are."""


@dataclass(frozen=True)
class Seen:
    """A device as one engine names it and as the ledger does; `uuid` is "" where NVML does not know it,
    `alone` says that no process can use another beside it (a MIG slice).
    """

    engine: str
    ledger: str
    uuid: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Spot:
    """One way to start a model: `place` is the one device it is whole on, "" where the engine or the preset
    decides.

    `names` leads from the engine's names, as an instance started so uses them, to the ledger's; it is given
    `variables` and `options` for that (None: the option is left out).
    """

    place: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str | None] = field(default_factory=dict)

    def ledger_name(self, engine_name: str) -> str:
        """Return the ledger's name of a device; the engine's own where nothing is known of it."""
        return self.names.get(engine_name, engine_name)

    def placed(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return a model's options with those that put it here."""
        return {name: value for name, value in {**options, **self.options}.items() if value is not None}

    def environment(self, variables: Mapping[str, str], table: OptionTable) -> dict[str, str]:
        """Return an instance's variables with those that put it here, without what says otherwise."""
        decided = {table[name].env for name in self.options if name in table}
        return {name: value for name, value in variables.items() if name not in decided} | dict(
            self.variables
        )


ANYWHERE = Spot()


@dataclass(frozen=True)
class Spots:
    """All ways to start a model: whole on one of several devices, or the `other` one.

    `lies_on` are the ledger's devices that the other way uses, in the engine's order; `problem` says why
    there is no way at all.
    """

    other: Spot
    lies_on: tuple[str, ...]
    whole: tuple[Spot, ...] = ()
    problem: str = ""

    def of(self, place: str) -> Spot:
        """Return the way that is whole on this device, the other one if there is none such."""
        return next((spot for spot in self.whole if spot.place == place), self.other)


def find_spots(
    options: Mapping[str, str],
    env: Mapping[str, str],
    seen: Sequence[Seen],
    table: OptionTable,
    environ: Mapping[str, str],
) -> Spots:
    """Return where a model may lie: `options` are those in force, `env` its own variables, `seen` the devices
    of its engine, `environ` the supervisor's environment. Raises PlacementError.
    """
    shown = {device.engine: device.ledger for device in seen}
    # An engine takes what shares the host's memory only where there is nothing else.
    usual = [device for device in seen if device.ledger != HOST] or list(seen)
    if not seen or options.get("n-gpu-layers") == "0" or options.get("device") == "none":
        return Spots(Spot(names=shown), (HOST,))
    if any(name in env for name in VISIBLE):
        kept = _shown_by(env, seen)
        return Spots(Spot(names=_numbered(kept)), _ledger_names(kept) or (HOST,))
    if asked := options.get("device"):
        kept = [_named(word.strip(), seen) for word in asked.split(",")]
        return Spots(_kept_to(kept, seen, table, environ), _ledger_names(kept))
    is_one, main = options.get("split-mode") == "none", options.get("main-gpu", "0")
    if (
        len(usual) == 1
        or any(name in options for name in _DECIDES)
        or (not is_one and "split-mode" in options)
    ):
        kept = usual
        if is_one and main.isdecimal() and int(main) < len(usual):
            kept = [usual[int(main)]]
        return Spots(_configured(usual, seen, table, environ), _ledger_names(kept))
    together = [device for device in usual if not device.alone and not is_one] or [usual[0]]
    return Spots(
        _configured(together, seen, table, environ),
        _ledger_names(together),
        tuple(_kept_to([device], seen, table, environ, device.ledger) for device in usual),
    )


def _configured(
    kept: Sequence[Seen], seen: Sequence[Seen], table: OptionTable, environ: Mapping[str, str]
) -> Spot:
    """Return the way that shows an engine all of these; CUDA's in the ledger's order, whatever CUDA's is."""
    if all(device.engine.startswith(CUDA) and device.uuid for device in kept):
        return _kept_to(kept, seen, table, environ)
    return Spot(names={device.engine: device.ledger for device in seen})


def _kept_to(
    kept: Sequence[Seen],
    seen: Sequence[Seen],
    table: OptionTable,
    environ: Mapping[str, str],
    place: str = "",
) -> Spot:
    if all(device.engine.startswith(CUDA) and device.uuid for device in kept):
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in kept)}
        return Spot(place, _numbered(kept), variables, {"device": None})
    if all(device.engine.startswith(ROCM) for device in kept):
        own = [word.strip() for word in environ.get("HIP_VISIBLE_DEVICES", "").split(",") if word.strip()]
        indices = [int(device.engine.removeprefix(ROCM)) for device in kept]
        numbers = [own[index] if index < len(own) else str(index) for index in indices]
        variables = {"HIP_VISIBLE_DEVICES": ",".join(numbers)}
        return Spot(place, _numbered(kept), variables, {"device": None})
    options = {"device": ",".join(device.engine for device in kept)}
    if "mmproj-device" in table:
        options["mmproj-device"] = kept[0].engine
    # The others are seen all the same, and something may land there.
    return Spot(place, {device.engine: device.ledger for device in (*kept, *seen)}, {}, options)


def _numbered(kept: Sequence[Seen]) -> dict[str, str]:
    """Return names as an engine gives them when it is shown only these: each kind counts from 0."""
    names: dict[str, str] = {}
    for device in kept:
        kind = device.engine.rstrip("0123456789")
        count = sum(name.rstrip("0123456789") == kind for name in names)
        names[f"{kind}{count}"] = device.ledger
    return names


def _named(word: str, seen: Sequence[Seen]) -> Seen:
    """Return the device of this name: the ledger's, the engine's, or the beginning of a UUID."""
    for device in seen:
        if word in (device.ledger, device.engine):
            return device
    matching = [d for d in seen if re.match(r"(GPU|MIG)-", word) and d.uuid.startswith(word)]
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(f"{device.ledger} ({device.engine})" for device in seen)
    raise PlacementError(f"device = {word}: there is no such device; there are {known}, or none")


def _shown_by(env: Mapping[str, str], seen: Sequence[Seen]) -> list[Seen]:
    """Return the devices that a model's own variables leave visible."""
    if "CUDA_VISIBLE_DEVICES" in env and all(device.uuid for device in seen):
        # Numbers count all GPUs, those too that the supervisor was not shown: as the ledger's names do.
        uuids = {device.ledger: device.uuid for device in seen}
        words = [word.strip() for word in env["CUDA_VISIBLE_DEVICES"].split(",")]
        named = [uuids.get(f"gpu{word}", "-1") if word.isdecimal() else word for word in words]
        order = visible_devices(",".join(named), [device.uuid for device in seen])
        return [next(device for device in seen if device.uuid == uuid) for uuid in order]
    value = next(env[name] for name in VISIBLE if name in env)
    numbers = [int(word) for word in value.split(",") if word.strip().isdecimal()]
    return [seen[number] for number in numbers if number < len(seen)]


def _ledger_names(devices: Sequence[Seen]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(device.ledger for device in devices))
