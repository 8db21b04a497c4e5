"""How a setting is declared: its help, flag and variable of llama-server stand at its field."""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

ENV_PREFIX = "LLAMASTEAD_"


def setting(
    default: Any,
    text: str,
    *,
    flag: str | None = "",
    env: str | None = None,
    metavar: str | None = None,
    **rules: Any,
) -> Any:
    """Declare a field: help `text`, `flag` ("" = the name itself, None = none) and llama-server's `env`."""
    extra: JsonDict = {"flag": flag, "env": env, "metavar": metavar}
    if callable(default):
        return Field(default_factory=default, description=text, json_schema_extra=extra, **rules)
    return Field(default, description=text, json_schema_extra=extra, **rules)


def field_extra(info: FieldInfo) -> Mapping[str, Any]:
    """Return what `setting` noted about a field: flag, env, metavar."""
    extra = info.json_schema_extra
    if not isinstance(extra, dict):
        raise TypeError("a field of Settings is declared with setting()")
    return extra


class LlamaServerEnv(PydanticBaseSettingsSource):
    """The variables that llama-server's router reads itself (LLAMA_ARG_MODELS_MAX, LLAMA_API_KEY, …)."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return the variable's text or None."""
        name = field_extra(field)["env"]
        value = os.environ.get(name) if name else None
        if name and not value and os.environ.get(name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")):
            value = "false"  # llama-server: the negated variable's presence says off, whatever its value
        return value or None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return the fields that have a value."""
        found = {
            name: self.get_field_value(info, name)[0] for name, info in self.settings_cls.model_fields.items()
        }
        return {name: value for name, value in found.items() if value is not None}
