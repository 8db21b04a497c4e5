"""What a model takes per device, as llama-server's own log lines tell it at verbosity 4.

All figures are bytes. The engine rounds its table down to whole MiB; here each part is rounded up again, so
that a sum never comes out too small.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llamastead.shared.devices.device import HOST, MIB

PROCESS_OVERHEAD = 64 * MIB
"""What an engine's process needs on the host beside its buffers: libraries, vocabulary, HTTP server."""

_CONTEXT_OVERHEAD = {"CUDA": 512 * MIB, "ROCm": 512 * MIB}
_OTHER_OVERHEAD = 128 * MIB

_ROW = re.compile(r"memory_breakdown_print: \|\s+- (?P<name>[^\s|(]+)[^|]*\|(?P<figures>[^|]*)\|")
_HEAD = re.compile(r"memory_breakdown_print: \| memory breakdown")
_PARTS = re.compile(r"(\d+)\s*=\s*(\d+)\s*\+\s*(\d+)\s*\+\s*(\d+)")
_BUFFER = re.compile(
    r"^(?:\S+ [A-Z] )?\s*(?P<by>\w+):\s+(?P<name>\S+)\s+(?P<kind>model|LoRA|KV|RS|compute|output)"
    r" buffer size =\s+(?P<mib>[\d.]+) MiB"
)
_PROJECTOR = re.compile(r"worst-case memory usage of mmproj is ([\d.]+) MiB")
_PROJECTOR_WEIGHTS = re.compile(r"load_hparams: model size:\s+([\d.]+) MiB")
_NEW_LOAD = re.compile(r"load_model: loading model '")
_MAIN_TABLE = re.compile(r"device memory data for initial parameters")
_DRAFT_TABLE = re.compile(r"device memory data for the extra model")
_DRAFT_LOAD = re.compile(r"loading draft model '")
_FITTED = re.compile(r"fitting params to (?:free|device) memory took|failed to fit params")
_NOT_GIVEN = (
    re.compile(r"failed to allocate (?P<name>\S+) buffer of size (?P<bytes>\d+)"),
    re.compile(r"allocating (?P<mib>[\d.]+) MiB on device (?P<index>\d+): cudaMalloc failed"),
    re.compile(r"insufficient memory \(attempted to allocate\s+(?P<mib>[\d.]+) MB\)"),
)
_DEVICE = re.compile(r"([A-Za-z]+\d+)(?:_|$)")


@dataclass(frozen=True)
class Parts:
    """What one device gives to one model. `mapped` is the part of `model` that file pages hold, which the
    system may drop and read again.
    """

    model: int = 0
    mapped: int = 0
    context: int = 0
    compute: int = 0
    projector: int = 0
    draft: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return self.model + self.context + self.compute + self.projector + self.draft

    def __add__(self, other: "Parts") -> "Parts":
        mine, theirs = asdict(self), asdict(other)
        return Parts(**{name: mine[name] + theirs[name] for name in mine})

    def as_draft(self) -> "Parts":
        """Return the same bytes as those of a draft model."""
        return Parts(mapped=self.mapped, draft=self.total)


Figures = Mapping[str, Parts]
"""Parts by the engine's name of a device (CUDA0, …), the host's under `host`."""


def totals(figures: Figures) -> dict[str, int]:
    """Return bytes by device."""
    return {name: parts.total for name, parts in figures.items() if parts.total}


def to_json(figures: Figures) -> dict[str, dict[str, int]]:
    """Return the figures as JSON-ready values, without parts that are nothing."""
    return {n: {part: size for part, size in asdict(p).items() if size} for n, p in figures.items()}


def from_json(value: Mapping[str, Mapping[str, Any]]) -> dict[str, Parts]:
    """Return the figures that `to_json` wrote; raises TypeError or ValueError for anything else."""
    return {name: Parts(**{part: int(size) for part, size in parts.items()}) for name, parts in value.items()}


class Breakdown:
    """Reads the tables that `-fit on` prints before anything is loaded: the model's, and a draft's.

    The model's is the first one for its initial parameters: later ones are what fitting tries. A draft's
    comes before that, or where the engine says that it looks at an extra model.
    """

    def __init__(self) -> None:
        self._model: dict[str, Parts] | None = None
        self._draft: dict[str, Parts] | None = None
        self._table: dict[str, Parts] = {}
        self._is_draft = True
        self._projector = 0
        self.over = False

    def take(self, line: str) -> None:
        """Take one line of the engine's log. `over` is set when no more can come."""
        if _HEAD.search(line):
            self._table = {}
            if self._is_draft and self._draft is None:
                self._draft = self._table
            elif not self._is_draft and self._model is None:
                self._model = self._table
        elif row := _ROW.search(line):
            self._take_row(row["name"], row["figures"])
        elif projector := _PROJECTOR.search(line):
            self._projector = _bytes(projector[1])
        elif _MAIN_TABLE.search(line):
            self._is_draft = False
        elif _DRAFT_TABLE.search(line):
            self._is_draft = True
        elif _FITTED.search(line):
            self.over = True

    def _take_row(self, name: str, figures: str) -> None:
        parts = _PARTS.search(figures)
        if parts is None:
            return
        model, context, compute = (_rounded_up(parts[group]) for group in (2, 3, 4))
        _add(self._table, place(name), Parts(model=model, context=context, compute=compute))

    @property
    def figures(self) -> dict[str, Parts] | None:
        """Return what was told, None when the model's table did not come."""
        if not self._model:
            return None
        found = dict(self._model)
        for name, parts in (self._draft or {}).items():
            _add(found, name, parts.as_draft())
        if self._projector:
            _add(found, _first_gpu(found), Parts(projector=self._projector))
        return found


class Effective:
    """Sums the buffers that an instance says it allocated, anew with each load (and each wake).

    Who comes in the middle of a load hears too little: it counts from its beginning only.
    """

    def __init__(self) -> None:
        self._whole = False
        self._begin()

    def _begin(self) -> None:
        self._found: dict[str, Parts] = {}
        self._compute: dict[tuple[str, bool], int] = {}
        self._projector = 0
        self._weights = 0
        self._image: dict[str, int] = {}
        self._draft = False
        self._not_given: dict[str, int] = {}

    def take(self, line: str) -> None:
        """Take one line of the engine's log."""
        if not any(word in line for word in ("buffer", "loading", "mmproj", "alloca", "model size")):
            return
        if _NEW_LOAD.search(line):
            self._whole = True
            self._begin()
        elif _DRAFT_LOAD.search(line):
            self._draft = True
        elif projector := _PROJECTOR.search(line):
            self._projector = _bytes(projector[1])
        elif weights := _PROJECTOR_WEIGHTS.search(line):
            self._weights += _bytes(weights[1])
        elif (buffer := _BUFFER.search(line)) and buffer["by"] == "reserve_compute_meta":
            self._image[buffer["name"]] = _bytes(buffer["mib"])
        elif buffer:
            self._take_buffer(buffer["name"], buffer["kind"], _bytes(buffer["mib"]))
        elif refused := next(filter(None, (pattern.search(line) for pattern in _NOT_GIVEN)), None):
            self._take_refusal(refused.groupdict())

    def _take_refusal(self, told: Mapping[str, str]) -> None:
        own = f"CUDA{told['index']}" if "index" in told else HOST
        name = place(told["name"]) if "name" in told else own
        size = int(told["bytes"]) if "bytes" in told else _bytes(told["mib"])
        self._not_given[name] = max(size, self._not_given.get(name, 0))

    @property
    def wanted(self) -> dict[str, int]:
        """Return bytes by device that a load wanted at least, where it was refused some: what it had got by
        then, and the biggest piece it did not get.
        """
        got = totals(self.figures or {})
        return {name: size + got.get(name, 0) for name, size in self._not_given.items()}

    def _take_buffer(self, name: str, kind: str, size: int) -> None:
        if kind == "compute":
            # Reserved anew when the engine changes its mind: the last word counts.
            self._compute[name, self._draft] = size
            return
        parts = _buffer_parts(name, kind, size)
        _add(self._found, place(name), parts.as_draft() if self._draft else parts)

    @property
    def figures(self) -> dict[str, Parts] | None:
        """Return what was told of the last load, None when it told nothing or not all of it was heard."""
        if not self._found or not self._whole:
            return None
        found = dict(self._found)
        for (name, draft), size in self._compute.items():
            parts = Parts(compute=size)
            _add(found, place(name), parts.as_draft() if draft else parts)
        # The worst case is told only where the engine fits; what was allocated is told always.
        if projector := max(self._projector, self._weights + sum(self._image.values())):
            _add(found, _first_gpu(found), Parts(projector=projector))
        return found


def place(buffer: str) -> str:
    """Return the device a buffer lies on: `CUDA0` for CUDA0, `host` for CPU_Mapped, CUDA_Host, Host."""
    device = _DEVICE.match(buffer)
    return device[1] if device and not buffer.startswith("CPU") else HOST


def with_host_needs(figures: Figures, cache_ram: int) -> dict[str, Parts]:
    """Return figures with what the process itself and its prompt cache may take of the host."""
    found = dict(figures)
    _add(found, HOST, Parts(context=max(0, cache_ram), compute=PROCESS_OVERHEAD))
    return found


def with_contexts(figures: Figures, known: Mapping[str, int]) -> dict[str, Parts]:
    """Return figures with what the driver takes for a process on each GPU that it uses: no engine tells that.
    It is what is `known` of the device by its name, else reckoned: some hundred MiB on CUDA and ROCm.
    """
    found = dict(figures)
    for name, parts in figures.items():
        if name != HOST and parts.total:
            reckoned = _CONTEXT_OVERHEAD.get(name.rstrip("0123456789"), _OTHER_OVERHEAD)
            _add(found, name, Parts(compute=known.get(name, reckoned)))
    return found


def added(figures: Figures, more: Figures) -> dict[str, Parts]:
    """Return the sum of both, device by device."""
    found = dict(figures)
    for name, parts in more.items():
        _add(found, name, parts)
    return found


def renamed(figures: Figures, name_of: Callable[[str], str]) -> dict[str, Parts]:
    """Return figures by other names of devices; those of one name are added up."""
    found: dict[str, Parts] = {}
    for name, parts in figures.items():
        _add(found, name_of(name), parts)
    return found


def spread(figures: Figures, sizes: Mapping[str, int]) -> dict[str, Parts]:
    """Return figures of a model whole on one device as if it were split over these, in proportion to their
    sizes, as the engine does it by layers. Each gets compute buffers of its own; a projector stays on the
    first, the host's share where it is.
    """
    found = {HOST: figures[HOST]} if HOST in figures else {}
    alone = sum((parts for name, parts in figures.items() if name != HOST), Parts())
    whole = max(1, sum(sizes.values()))
    for name, size in sizes.items():
        parts = {key: -(-getattr(alone, key) * size // whole) for key in ("model", "context", "draft")}
        _add(found, name, Parts(**parts, compute=alone.compute))
    if alone.projector:
        _add(found, next(iter(sizes)), Parts(projector=alone.projector))
    return found


def between(smallest: Figures, largest: Figures, share: float) -> dict[str, Parts]:
    """Return the figures `share` (0..1) of the way between two contexts; all parts grow linearly."""
    found = {}
    for name in {*smallest, *largest}:
        low, high = asdict(smallest.get(name, Parts())), asdict(largest.get(name, Parts()))
        found[name] = Parts(**{part: round(low[part] + (high[part] - low[part]) * share) for part in low})
    return found


def _buffer_parts(name: str, kind: str, size: int) -> Parts:
    if kind == "model":
        return Parts(model=size, mapped=size if name.endswith("_Mapped") and place(name) == HOST else 0)
    if kind == "LoRA":
        return Parts(model=size)
    return Parts(context=size) if kind in ("KV", "RS") else Parts(compute=size)


def _first_gpu(figures: Figures) -> str:
    return min((name for name in figures if name != HOST), default=HOST)


def _add(figures: dict[str, Parts], name: str, parts: Parts) -> None:
    figures[name] = figures.get(name, Parts()) + parts


def _bytes(mib: str) -> int:
    return round(float(mib) * MIB)


def _rounded_up(mib: str) -> int:
    return (int(mib) + 1) * MIB
