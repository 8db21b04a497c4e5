"""Loads and runs the Lua scripts of shared/lua: one verb a file, its interface in the header.

A header is the comment block a file begins with. `KEYS:` and `ARGV:` name what a call passes, in order, and
may be repeated; the loader makes locals of these names, so that what the header says is what the body uses.
`@include NAME` puts include/NAME.lua in, each once, in the order written. The names of `Code` are locals as
well. The first argument of every script is the prefix of all keys.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import redis as blocking
from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.commands.core import Script as BlockingScript

from llamastead.shared.faults import fault_point
from llamastead.shared.store.errors import Code, refusal

FOLDER = Path(__file__).parent.parent / "lua"


class ScriptError(Exception):
    """A script file is not as it must be, or is called with other names than its header has."""


@dataclass(frozen=True)
class Script:
    """A script ready to load: `keys` and `argv` are the names of its header, `body` the whole Lua text."""

    name: str
    keys: tuple[str, ...]
    argv: tuple[str, ...]
    includes: tuple[str, ...]
    body: str


@cache
def load(name: str, folder: Path = FOLDER) -> Script:
    """Read a script by its verb; raises ScriptError naming the file for a missing part or a bare header."""
    path = folder / f"{name}.lua"
    if not path.exists():
        raise ScriptError(f"no script {path}")
    text = path.read_text()
    header = list(_header(text))
    keys = _names(header, "KEYS")
    argv = _names(header, "ARGV")
    includes = tuple(re.findall(r"^-- @include (\w+)$", text, re.MULTILINE))
    if not keys or argv[:1] != ("prefix",):
        raise ScriptError(f"{path}: the header must name KEYS, and ARGV beginning with prefix")
    if len(set(includes)) != len(includes):
        raise ScriptError(f"{path}: includes the same part twice")
    parts = [_binding(keys, "KEYS"), _binding(argv, "ARGV")]
    parts += [
        f"local {code.name} = {code.value}" for code in Code if code.name in text or code.name == _FENCED
    ]
    for include in includes:
        part = folder / "include" / f"{include}.lua"
        if not part.exists():
            raise ScriptError(f"{path}: includes {include}, but there is no {part}")
        parts.append(part.read_text())
    return Script(name, keys, argv, includes, "\n".join([*parts, text]))


@cache
def load_all() -> None:
    """Read all scripts, once: a process that may open no more files still has them."""
    for path in FOLDER.glob("*.lua"):
        load(path.stem)


_FENCED = Code.STALE_LEADER.name


def _header(text: str) -> list[str]:
    lines = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line)
    return lines


def _names(header: list[str], label: str) -> tuple[str, ...]:
    marker = f"-- {label}: "
    return tuple(
        name for line in header if line.startswith(marker) for name in line.removeprefix(marker).split()
    )


def _binding(names: tuple[str, ...], table: str) -> str:
    return f"local {', '.join(names)} = {', '.join(f'{table}[{i}]' for i in range(1, len(names) + 1))}"


class Scripts:
    """Runs scripts on one client: EVALSHA, loading a script that Redis does not know (yet, or any more)."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        load_all()
        self._redis = redis
        self._prefix = prefix
        self._registered: dict[str, tuple[Script, AsyncScript]] = {}

    async def call(self, name: str, keys: Mapping[str, str], argv: Mapping[str, str | int]) -> Any:
        """Run a script with the keys and arguments of its header, named and in order; the prefix is added.

        Returns what the script returns; raises the StoreRefusal of a negative code, ScriptError for other
        names.
        """
        script, run = self._registered.get(name) or self._register(name)
        _compare(script, keys, argv)
        fault_point(f"{name}.before")
        reply = await run(keys=list(keys.values()), args=[self._prefix, *argv.values()])
        fault_point(f"{name}.after")
        if isinstance(reply, list) and reply and isinstance(reply[0], int) and reply[0] < 0:
            raise refusal(reply[0], reply[1:])
        return reply

    def _register(self, name: str) -> tuple[Script, AsyncScript]:
        script = load(name)
        self._registered[name] = script, self._redis.register_script(script.body)
        return self._registered[name]


class BlockingScripts:
    """The same on a blocking client, for scripts that refuse nothing."""

    def __init__(self, redis: blocking.Redis, prefix: str) -> None:
        load_all()
        self._redis = redis
        self._prefix = prefix
        self._registered: dict[str, tuple[Script, BlockingScript]] = {}

    def call(self, name: str, keys: Mapping[str, str], argv: Mapping[str, str | int]) -> Any:
        """Run a script as `Scripts.call` does and return what it returns."""
        if name not in self._registered:
            script = load(name)
            self._registered[name] = script, self._redis.register_script(script.body)
        script, run = self._registered[name]
        _compare(script, keys, argv)
        fault_point(f"{name}.before")
        reply = run(keys=list(keys.values()), args=[self._prefix, *argv.values()])
        fault_point(f"{name}.after")
        return reply


def _compare(script: Script, keys: Mapping[str, str], argv: Mapping[str, str | int]) -> None:
    if tuple(keys) != script.keys or tuple(argv) != script.argv[1:]:
        given, wanted = [*keys, *argv], [*script.keys, *script.argv]
        raise ScriptError(f"{script.name}: {given} given, the header says {wanted}")
