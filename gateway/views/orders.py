"""Orders about models: load, unload, reload, download, remove: answered once the supervisor has decided."""

from typing import Any

from llamastead.gateway.answers import parse_json
from llamastead.gateway.catalog import Catalog, CatalogModel
from llamastead.gateway.commands import Commands
from llamastead.shared.errors import ApiError
from llamastead.shared.hub_cache import is_quant, is_repository, split_name

REMOVAL_PATIENCE_S = 60.0  # the model may have to stop first
BAD_REPOSITORY = "error: invalid HF repo format, expected <user>/<model>[:quant]\n"  # llama-server's words

SUCCESS: dict[str, Any] = {"success": True}


async def load_model(catalog: Catalog, commands: Commands, body: bytes) -> dict[str, Any]:
    """Have a model loaded; success means that its load is under way. Unknown names are a 404."""
    name = _model_name(_json_object(body))
    model = await _find(catalog, name)
    if model is None:
        raise ApiError(404, f"model '{name}' not found", {"param": "model"})
    await commands.ask("load", {"model": model.name})
    return SUCCESS


async def unload_model(catalog: Catalog, commands: Commands, body: bytes) -> dict[str, Any]:
    """Have a model unloaded once it is idle, or with `"force": true` at once; unknown names are a 400.

    A download loses one asker, with `force` all: the last one's leaving ends it.
    """
    order = _json_object(body)
    name, force = _model_name(order), order.get("force", False)
    if not isinstance(force, bool):
        raise ApiError(400, f"force must be true or false, not {force!r}", {"param": "force"})
    model = None if name in catalog.downloads else await _find(catalog, name)
    if model is None and not is_repository(split_name(name)[0]):
        raise ApiError(400, f"model '{name}' not found", {"param": "model"})
    # What comes from the hub has a name before this gateway knows it.
    named = model.name if model else name
    return SUCCESS | await commands.ask("unload", {"model": named, "force": "1" if force else "0"})


async def download_model(commands: Commands, body: bytes) -> dict[str, Any]:
    """Have `owner/name[:quant]` brought from the hub; success means that it is under way.

    Our own beside `success`: `download` (its name), `askers`, `bytes` and `total` once they are known, a
    `warning` while no worker runs. What
    the hub refuses within three seconds is refused here with its status.
    """
    name = _model_name(_json_object(body))
    repo, quant = split_name(name)
    if not is_repository(repo) or not is_quant(quant):
        raise ApiError(400, BAD_REPOSITORY, {"param": "model"})
    return await commands.ask("download", {"model": name})


async def remove_model(catalog: Catalog, commands: Commands, name: str) -> dict[str, Any]:
    """Have a model's files removed from the cache, once it is stopped; 409 while it is in use."""
    if not name:
        raise ApiError(400, "model must be a non-empty string", {"param": "model"})
    model = None if name in catalog.downloads else await _find(catalog, name)
    named = model.name if model else name
    return await commands.ask("remove", {"model": named}, REMOVAL_PATIENCE_S)


async def reload_models(catalog: Catalog, commands: Commands, body: bytes = b"") -> dict[str, Any]:
    """Have the registry read again and return what changed; this gateway's copy has it then.

    With `"apply": true` models that run with old settings start anew, busy ones once they are idle.
    """
    apply = _json_object(body).get("apply", False) if body else False
    if not isinstance(apply, bool):
        raise ApiError(400, f"apply must be true or false, not {apply!r}", {"param": "apply"})
    changes = await commands.ask("reload", {"apply": "1" if apply else "0"})
    await catalog.read_now()
    return {"success": True, **changes}


async def _find(catalog: Catalog, name: str) -> CatalogModel | None:
    return catalog.resolve(name) or await catalog.look_again(name)


def _json_object(body: bytes) -> dict[str, Any]:
    order = parse_json(body)
    if not isinstance(order, dict):
        raise ApiError(400, "the body must be a JSON object")
    return order


def _model_name(order: dict[str, Any]) -> str:
    name = order.get("model")
    if not isinstance(name, str) or not name:
        raise ApiError(400, f"model must be a non-empty string, not {name!r}", {"param": "model"})
    return name
