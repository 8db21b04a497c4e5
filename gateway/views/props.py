"""GET /props without a model: what llama-server's router says of itself, and our own settings."""

import json
from collections.abc import Mapping
from typing import Any

from llamastead.shared.settings import Settings

LIMITS = ("max_wait", "min_residence", "queue_limit", "queue_limit_total", "queue_timeout", "stop_timeout")


def router_props(
    settings: Settings, herd: Mapping[str, str], devices: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the answer; limits are those the supervisor enforces, so far as they are known here; `devices`
    are the accounts of its host's memory.
    """
    return {
        "role": "router",
        "max_instances": int(herd.get("models_max") or settings.models_max),
        "models_autoload": settings.models_autoload,
        "model_alias": "llama-server",
        "model_path": "none",
        "default_generation_settings": {"params": None, "n_ctx": 0},
        "ui_settings": settings.ui_settings(),
        "build_info": herd.get("engine_version", ""),
        "cors_proxy_enabled": False,
        "llamastead": {
            "version": herd.get("version", ""),
            "host": herd.get("host", ""),
            "registry_revision": herd.get("registry_revision", ""),
            **{name: json.loads(herd[name]) for name in LIMITS if herd.get(name)},
            "devices": {name: dict(account) for name, account in devices.items()},
        },
    }
