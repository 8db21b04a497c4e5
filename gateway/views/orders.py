"""POST /models/load and /models/unload: passed to the supervisor, answered once it has decided."""

import json
from typing import Any

from llamastead.gateway.catalog import Catalog, CatalogModel
from llamastead.gateway.commands import Commands
from llamastead.shared.errors import ApiError

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
    """Have a model unloaded once it is idle, or with `"force": true` at once. Unknown names are a 400."""
    order = _json_object(body)
    name, force = _model_name(order), order.get("force", False)
    if not isinstance(force, bool):
        raise ApiError(400, f"force must be true or false, not {force!r}", {"param": "force"})
    model = await _find(catalog, name)
    if model is None:
        raise ApiError(400, f"model '{name}' not found", {"param": "model"})
    await commands.ask("unload", {"model": model.name, "force": "1" if force else "0"})
    return SUCCESS


async def _find(catalog: Catalog, name: str) -> CatalogModel | None:
    return catalog.resolve(name) or await catalog.look_again(name)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        order = json.loads(body)
    except ValueError as problem:
        raise ApiError(400, f"the body is not valid JSON: {problem}") from None
    if not isinstance(order, dict):
        raise ApiError(400, "the body must be a JSON object")
    return order


def _model_name(order: dict[str, Any]) -> str:
    name = order.get("model")
    if not isinstance(name, str) or not name:
        raise ApiError(400, f"model must be a non-empty string, not {name!r}", {"param": "model"})
    return name
