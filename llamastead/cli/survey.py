"""What a drill and a report write down of a herd: presets, engine, limits, memory. Never secrets."""

import contextlib
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from redis.exceptions import RedisError

from llamastead.cli.client import checked, json_of
from llamastead.shared.addresses import TcpAddress, UnixAddress, parse_address
from llamastead.shared.settings import Settings
from llamastead.shared.store.connect import connect
from llamastead.shared.store.errors import StoreError
from llamastead.shared.store.keys import Keys

HIDDEN = "***"
_SECRET_WORDS = frozenset({"key", "token", "secret", "password"})
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# Set anew for each instance, so that the preset's say nothing.
_LISTENING = ("--host", "--port", "--alias")


async def read_models(http: httpx.AsyncClient, also: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Return all models by name, with the entries of `also`, which may be aliases. Raises ClientError."""
    listed = json_of(checked(await http.get("/models", params={"hidden": "true"})))["data"]
    models = {entry["id"]: entry for entry in listed}
    for name in also:
        if name not in models:
            entry = json_of(checked(await http.get(f"/v1/models/{quote(name, safe='')}")))
            models[entry["id"]] = entry
    return models


async def read_herd(http: httpx.AsyncClient) -> dict[str, Any]:
    """Return the herd's engine, versions and limits in force. Raises ClientError."""
    props = json_of(checked(await http.get("/props")))
    own = dict(props.get("llamastead", {}))
    own.pop("devices", None)
    return {
        "host": own.pop("host", ""),
        "version": own.pop("version", ""),
        "registry_revision": own.pop("registry_revision", ""),
        "engine": props["build_info"],
        "limits": {"models_max": props["max_instances"], "models_autoload": props["models_autoload"], **own},
    }


def running(models: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the models that have a process, each with the state of it."""
    return {
        name: entry["status"].get("state") or entry["status"]["value"]
        for name, entry in models.items()
        if entry["status"]["value"] not in ("unloaded", "downloading", "downloaded")
    }


def kind_of(entry: dict[str, Any]) -> str:
    """Return what a model is asked for, by its options: completion, embedding or rerank."""
    words = entry["status"]["args"]
    embeds = "--embeddings" in words
    ranks = ("--pooling", "rank") in itertools.pairwise(words)
    if "--reranking" in words or (embeds and ranks):
        return "rerank"
    return "embedding" if embeds else "completion"


def preset(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be known of a configured model."""
    return {
        "model": entry["id"],
        "revision": entry.get("revision", ""),
        "source": entry["source"],
        "kind": kind_of(entry),
        "aliases": entry["aliases"],
        "path": entry.get("path", ""),
        "size_bytes": entry.get("metadata", {}).get("size_bytes"),
        "args": _without(_LISTENING, without_secrets(entry["status"]["args"][1:])),
    }


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return command-line words with the values of keys and tokens, and users in URLs, made unreadable."""
    shown = [_URL_USER.sub(HIDDEN, word) for word in words]
    for place, word in enumerate(words[:-1]):
        if word.startswith("--") and _SECRET_WORDS & set(word.lstrip("-").split("-")):
            shown[place + 1] = HIDDEN
    return shown


def _without(names: Sequence[str], words: list[str]) -> list[str]:
    """Return command-line words without some options and the one value of each."""
    dropped = {at for place, word in enumerate(words) if word in names for at in (place, place + 1)}
    return [word for place, word in enumerate(words) if place not in dropped]


class Machine:
    """What this machine tells of a herd that runs on it, beyond what any gateway tells."""

    def __init__(self, settings: Settings) -> None:
        self._redis = connect(settings.redis_url)
        self._keys = Keys(settings.redis_prefix)

    async def process(self, instance: str) -> dict[str, Any] | None:
        """Return an instance's process: pid, and where it can be seen from here the memory it takes in bytes
        and the words it was started with. None where that isn't known."""
        fields: Any = {}
        with contextlib.suppress(RedisError, StoreError, OSError):
            fields = await self._redis.hgetall(self._keys.instance(instance))
        if not fields.get("pid", "").isdigit():
            return None
        found: dict[str, Any] = {"model": fields["model"], "pid": int(fields["pid"])}
        with contextlib.suppress(OSError):
            words = _text(found["pid"], "cmdline").rstrip("\0").split("\0")
            # A pid means something only where it was given: the address in its command line is the proof.
            if _listens_at(words, fields["address"]):
                found["args"] = without_secrets(words)
                found["rss_bytes"] = _kibibytes(_text(found["pid"], "status"), "VmRSS")
        return found

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()


def _listens_at(words: Sequence[str], address: str) -> bool:
    match parse_address(address):
        case UnixAddress(path):
            return path in words
        case TcpAddress(host, port):
            return host in words and str(port) in words


def host_memory() -> dict[str, int | None]:
    """Return this machine's memory in bytes: all, available now, and our control group's limit if any."""
    text = Path("/proc/meminfo").read_text()
    total = _kibibytes(text, "MemTotal")
    return {"total": total, "available": _kibibytes(text, "MemAvailable"), "limit": _group_limit(total)}


def _group_limit(total: int) -> int | None:
    """Return the smallest limit of our control group and those above it, of version 2 or 1."""
    limits = []
    for line in _text("self", "cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        group = root / place.lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return min((limit for limit in limits if limit < total), default=None)


def _text(process: int | str, name: str) -> str:
    return Path(f"/proc/{process}/{name}").read_text(errors="replace")


def _kibibytes(text: str, name: str) -> int:
    """Return the bytes that a line `name: N kB` says, 0 without one."""
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
