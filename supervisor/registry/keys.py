"""Preset keys that no instance sees: llama-server's router's own three, and ours."""

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llamastead.shared.files import absolute_path
from llamastead.supervisor.registry.options import FALSE, TRUE

DEFAULT_STOP_TIMEOUT = 10.0  # seconds, what llama-server takes for a value that it can't read
_UNITS = {"": 1, "m": 1, "mb": 1, "mib": 1, "g": 1024, "gb": 1024, "gib": 1024}
_SIZE = re.compile(r"(\d+)\s*([a-z]*)", re.IGNORECASE)
_INTEGER = re.compile(r"\s*([+-]?\d+)")


def _flag(value: str) -> bool:
    word = value.lower()
    if word in TRUE | {"yes"}:
        return True
    if word in FALSE | {"no"}:
        return False
    raise ValueError("expected true or false")


def _integer(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError("expected a whole number") from None


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        raise ValueError("expected seconds, such as 30 or 0.5") from None
    if not 0 <= seconds < float("inf"):
        raise ValueError("expected seconds, 0 or more")
    return seconds


def _seconds_or_never(value: str) -> float:
    """Read seconds, 0 for never; -1 says so too."""
    return 0.0 if value == "-1" else _seconds(value)


def _mebibytes(value: str) -> int:
    match = _SIZE.fullmatch(value)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError("expected a size such as 6144, 6144M or 6G")
    return int(match[1]) * _UNITS[match[2].lower()]


def _path(value: str) -> Path:
    if not value:
        raise ValueError("expected a path")
    return absolute_path(value)


def _variables(value: str) -> Mapping[str, str]:
    """Read `NAME=value NAME="value with blanks"`."""
    pairs = [word.partition("=") for word in shlex.split(value)]
    if any(not name.isidentifier() or not equals for name, equals, _ in pairs):
        raise ValueError('expected NAME=value pairs, blanks between them, as in A=1 B="two words"')
    return {name: text for name, _, text in pairs}


OWN_KEYS: Mapping[str, Callable[[str], Any]] = {
    "hidden": _flag,
    "pin": _flag,
    "priority": _integer,
    "unload-after": _seconds_or_never,
    "max-wait": _seconds,
    "first-byte-timeout": _seconds_or_never,
    "idle-timeout": _seconds_or_never,
    "total-timeout": _seconds_or_never,
    "memory-max": _mebibytes,
    "env": _variables,
    "engine": _path,
}
LOCAL_KEYS = frozenset({"engine", "env"})
"""Keys that only the owner of this machine may set."""
ROUTER_KEYS = ("dedup-cache-models", "load-on-startup", "stop-timeout")

FOREIGN_KEYS: Mapping[str, str] = {
    "ttl": "unload-after",
    "unlisted": "hidden",
    "keep-alive": "unload-after",
    "num-ctx": "ctx-size",
    "num-gpu": "n-gpu-layers",
    "num-predict": "n-predict",
    "num-thread": "threads",
}
"""What llama-swap and Ollama call what has another name here."""


def hint_of_foreign_key(key: str) -> str:
    """Say what a word of llama-swap's or Ollama's files is here, as the end of a sentence; "" for others."""
    word = key.lower().replace("_", "-")
    if word == "cmd":
        return "; write each option of the command as a key of its own, as in `ctx-size = 4096`"
    return f"; did you mean '{FOREIGN_KEYS[word]}'?" if word in FOREIGN_KEYS else ""


def own_field(key: str, value: str) -> dict[str, Any]:
    """Return the ModelEntry field that one of our keys sets. Raises ValueError saying what is expected."""
    return {key.replace("-", "_"): OWN_KEYS[key](value)}


def odd_router_value(key: str, value: str) -> str:
    """Say how llama-server reads a value that it can't take for one of its own keys; "" for a good one."""
    if key == "stop-timeout":
        return "" if _INTEGER.match(value) else f"expected seconds, {DEFAULT_STOP_TIMEOUT:.0f} are taken"
    return "" if value in TRUE | FALSE else "neither true nor false, read as false"


def stop_timeout(value: str | None) -> float | None:
    """Return the whole seconds at the start of `value`, as llama-server does; None if nothing was said."""
    if value is None:
        return None
    match = _INTEGER.match(value)
    return max(0.0, float(match[1])) if match else DEFAULT_STOP_TIMEOUT
