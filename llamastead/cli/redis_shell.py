"""`llamastead redis`: redis-cli on the herd's Redis, or its common output where none is installed."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis.exceptions import RedisError, ResponseError

from llamastead.cli.client import ClientError, require_local_redis
from llamastead.shared.settings import Settings
from llamastead.shared.store.connect import connect_sync, explain

CLIENTS = ("redis-cli", "valkey-cli")
# Commands whose answer is a status, which redis-cli prints without quotes.
STATUS_COMMANDS = frozenset(
    {"PING", "TYPE", "SET", "HMSET", "RENAME", "SELECT", "FLUSHDB", "FLUSHALL", "BGSAVE"}
)


def redis_shell(settings: Settings, words: Sequence[str]) -> int:
    """Become redis-cli with `words`; without one installed run `words` as a command and print the answer."""
    require_local_redis(settings)
    program = next(filter(None, map(shutil.which, CLIENTS)), None)
    if program:
        address, secrets = client_words(settings.redis_url)
        os.execve(program, [program, *address, *words], {**os.environ, **secrets})  # noqa: S606 - we become it
    raw = "--raw" in words or not ("--no-raw" in words or sys.stdout.isatty())
    command = [word for word in words if word not in ("--raw", "--no-raw")]
    if not command:
        raise ClientError(
            "no redis-cli on PATH to open: give a command, as in `llamastead redis HGETALL llamastead:herd`"
        )
    if command[0].startswith("-"):
        raise ClientError(f"{command[0]} is redis-cli's, and none is on PATH: install redis-tools for it")
    reply = _ask(settings.redis_url, command)
    lines = raw_lines(reply) if raw else shown_lines(reply, command[0].upper() in STATUS_COMMANDS)
    for line in lines:
        print(line)
    return int(isinstance(reply, ResponseError))


def client_words(url: str) -> tuple[list[str], dict[str, str]]:
    """Return redis-cli's words for a URL, and the variables for what `ps` must not show."""
    parts = urlsplit(url)
    words: list[str] = []
    if parts.scheme == "unix":
        words += ["-s", unquote(parts.path)]
        database = parse_qs(parts.query).get("db", [""])[0]
    else:
        words += ["-h", parts.hostname or "localhost", "-p", str(parts.port or 6379)]
        words += ["--tls"] if parts.scheme == "rediss" else []
        database = parts.path.strip("/")
    words += ["--user", unquote(parts.username)] if parts.username else []
    words += ["-n", database] if database else []
    return words, {"REDISCLI_AUTH": unquote(parts.password)} if parts.password else {}


def raw_lines(reply: Any) -> Iterator[str]:
    """Yield an answer as `redis-cli --raw` prints it: each string as it is, members one a line."""
    if isinstance(reply, list):
        for member in reply:
            yield from raw_lines(member)
    else:
        yield _text(reply)


def shown_lines(reply: Any, status: bool = False) -> list[str]:
    """Return an answer as redis-cli shows it to people: numbered, quoted, nested."""
    if isinstance(reply, ResponseError):
        return [f"(error) {reply}"]
    if reply is None:
        return ["(nil)"]
    if isinstance(reply, int):
        return [f"(integer) {reply}"]
    if not isinstance(reply, list):
        return [_text(reply) if status or reply == b"OK" else _quoted(reply)]
    if not reply:
        return ["(empty array)"]
    lines = []
    width = len(str(len(reply)))
    for number, member in enumerate(reply, start=1):
        first, *further = shown_lines(member)
        lines.append(f"{number:>{width}}) {first}")
        lines += [" " * (width + 2) + line for line in further]
    return lines


def _ask(url: str, command: Sequence[str]) -> Any:
    client = connect_sync(url)
    connection = None
    try:
        connection = client.connection_pool.get_connection()
        connection.send_command(*command)  # type: ignore[no-untyped-call]
        return connection.read_response(disable_decoding=True)
    except ResponseError as refusal:
        return refusal
    except RedisError as error:
        raise ClientError(explain(url, error)) from None
    finally:
        if connection is not None:
            client.connection_pool.release(connection)
        client.close()


def _text(reply: Any) -> str:
    if isinstance(reply, bytes):
        return reply.decode(errors="replace")
    return "" if reply is None else str(reply)


def _quoted(text: bytes) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\a": "\\a", "\b": "\\b"}
    shown = (escapes.get(chr(b)) or (chr(b) if 32 <= b < 127 else f"\\x{b:02x}") for b in text)
    return f'"{"".join(shown)}"'
