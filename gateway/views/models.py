"""GET /models, /v1/models and /v1/models/{id}, in the shape of llama-server's router plus our own words."""

from collections.abc import Mapping
from typing import Any

from llamastead.gateway.catalog import Catalog, CatalogDownload, CatalogModel
from llamastead.shared.clock import wall_s
from llamastead.shared.errors import ApiError
from llamastead.shared.words import InstanceState, Source, WireStatus


def list_models(catalog: Catalog, *, hidden: bool = False) -> dict[str, Any]:
    """Return the answer of GET /models: every model, those that are hidden only with `hidden`, in the
    registry's order, then what is on its way from the hub.
    """
    shown = [describe(catalog.with_download(m)) for m in catalog.models.values() if hidden or not m.hidden]
    coming = [d for d in catalog.downloads.values() if not d.models and catalog.resolve(d.name) is None]
    return {"data": shown + [describe(_not_yet(each)) for each in coming], "object": "list"}


def show_model(catalog: Catalog, name: str) -> dict[str, Any]:
    """Return one entry of that list by name or alias, hidden ones too; ApiError 404 for an unknown name."""
    model = catalog.resolve(name)
    if model is None:
        download = catalog.downloads.get(name)
        if download is None:
            raise ApiError(404, f"model '{name}' not found")
        model = _not_yet(download)
    return describe(model)


def _not_yet(download: CatalogDownload) -> CatalogModel:
    """Return what a download will be as an entry that is not in the registry yet."""
    return CatalogModel(
        download.name,
        source=Source.CACHE,
        status=WireStatus.DOWNLOADING,
        state=str(WireStatus.DOWNLOADING),
        download=download,
    )


def _modalities(model: CatalogModel) -> dict[str, list[str]]:
    """Return what a model takes and gives, in the router's words."""
    known = model.metadata
    return {
        "input_modalities": list(known.get("input_modalities") or ("text",)),
        "output_modalities": list(known.get("output_modalities") or ("text",)),
    }


def describe(model: CatalogModel) -> dict[str, Any]:
    """Return a model's entry: the router's fields, then ours: `revision`, `path`, `in_cache`, `metadata`."""
    known = model.metadata
    entry: dict[str, Any] = {
        "id": model.name,
        "aliases": list(model.aliases),
        "tags": list(model.tags),
        "object": "model",
        "owned_by": "llamacpp",
        "created": wall_s(),
        "status": _status(model),
        "architecture": _modalities(model),
        "source": model.source,
        "can_remove": model.source == Source.CACHE,
        "in_cache": model.source == Source.CACHE,
    }
    if model.hidden:
        entry["hidden"] = True
    if model.revision:
        entry["revision"] = model.revision
    if model.path:
        entry["path"] = model.path
    if model.meta and model.running:
        entry["meta"] = dict(model.meta)
    names = ("architecture", "n_ctx_train", "size_bytes", "shards", "mmproj")
    if metadata := {name: known[name] for name in names if name in known}:
        entry["metadata"] = metadata
    if model.memory:
        entry["memory"] = _memory(model.memory)
    return entry


def _memory(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's memory with the age of what was measured and of what a load took, in seconds."""
    ages = {"measured_ms": "age_s", "effective_ms": "effective_age_s"}
    now = wall_s()
    return {**memory, **{age: max(0, now - memory[at] // 1000) for at, age in ages.items() if at in memory}}


def _status(model: CatalogModel) -> dict[str, Any]:
    status: dict[str, Any] = {
        "value": model.status,
        "args": list(model.args),
        "preset": model.preset,
        "state": model.state,
    }
    status |= _standing(model)
    if model.failed:
        status |= {"exit_code": model.exit_code, "failed": True}
    if model.status is WireStatus.UNLOADED:
        ended = {"end_class": model.end_class, "reason": model.reason}
        status |= {name: word for name, word in ended.items() if word}
    if model.download:
        status["progress"] = {**model.download.progress}
        status["download"] = {
            "state": model.download.state,
            "bytes": model.download.bytes,
            "total": model.download.total,
            "askers": model.download.askers,
        }
    if model.progress and model.status is WireStatus.LOADING:
        status["progress"] = dict(model.progress)
    return status


def _standing(model: CatalogModel) -> dict[str, Any]:
    """Return four things that are easily taken for one another, and who may go when room is wanted.

    `resident`: weights are in memory. `asleep`: the process lives and has given them back. `ready`: a request
    is let in at once. `changed`: its preset is another now, and holds from the next load on. `evictable`: it
    may go for another model; if not, `spared` is what keeps it, as the supervisor saw it last. `place` is the
    one GPU it is whole on, `warning` says that it was started although it is too big for its devices.
    """
    asleep = model.state == InstanceState.SLEEPING
    standing: dict[str, Any] = {
        "configured": True,
        "resident": model.running and not asleep and model.state not in _STARTS,
        "asleep": asleep,
        "ready": model.state == InstanceState.READY,
    }
    if model.running:
        standing |= {"evictable": model.evictable} | ({"spared": model.spared} if model.spared else {})
        told = {"pid": model.pid, "place": model.place, "warning": model.warning}
        standing |= {name: value for name, value in told.items() if value}
        standing |= {"changed": True} if model.changed else {}
    return standing


_STARTS = frozenset({InstanceState.STARTING, InstanceState.LOADING, InstanceState.WAKING})


def model_info(model: CatalogModel) -> dict[str, Any]:
    """Return the `info` of a loaded model as the router's event stream has it."""
    return {
        "id": model.name,
        "aliases": [model.name],
        "tags": list(model.tags),
        "object": "model",
        "architecture": _modalities(model),
        "created": wall_s(),
        "owned_by": "llamacpp",
        "meta": dict(model.meta),
    }
