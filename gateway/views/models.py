"""GET /models, /v1/models and /v1/models/{id}, in the shape of llama-server's router plus our own words."""

from typing import Any

from llamastead.gateway.catalog import Catalog, CatalogModel
from llamastead.shared.clock import wall_s
from llamastead.shared.errors import ApiError
from llamastead.shared.words import InstanceState, Source, WireStatus


def list_models(catalog: Catalog) -> dict[str, Any]:
    """Return the answer of GET /models: every model that is not hidden, in the registry's order."""
    shown = [describe(model) for model in catalog.models.values() if not model.hidden]
    return {"data": shown, "object": "list"}


def show_model(catalog: Catalog, name: str) -> dict[str, Any]:
    """Return one entry of that list by name or alias, hidden ones too; ApiError 404 for an unknown name."""
    model = catalog.resolve(name)
    if model is None:
        raise ApiError(404, f"model '{name}' not found")
    return describe(model)


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
        "architecture": {
            "input_modalities": list(known.get("input_modalities") or ("text",)),
            "output_modalities": list(known.get("output_modalities") or ("text",)),
        },
        "source": model.source,
        "can_remove": False,
        "in_cache": model.source == Source.CACHE,
    }
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
        entry["memory"] = dict(model.memory)
    return entry


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
    if model.progress and model.status is WireStatus.LOADING:
        status["progress"] = dict(model.progress)
    return status


def _standing(model: CatalogModel) -> dict[str, Any]:
    """Return four things that are easily taken for one another, and who may go when room is wanted.

    `resident`: weights are in memory. `asleep`: the process lives and has given them back. `ready`: a request
    is let in at once. `evictable`: it may go for another model; if not, `spared` is what keeps it, as the
    supervisor saw it last.
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
        standing |= {"pid": model.pid} if model.pid else {}
    return standing


_STARTS = frozenset({InstanceState.STARTING, InstanceState.LOADING, InstanceState.WAKING})


def model_info(model: CatalogModel) -> dict[str, Any]:
    """Return the `info` of a loaded model as the router's event stream has it."""
    return {
        "id": model.name,
        "aliases": [model.name],
        "tags": list(model.tags),
        "object": "model",
        "created": wall_s(),
        "owned_by": "llamacpp",
        "meta": dict(model.meta),
    }
