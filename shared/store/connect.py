"""Connections to Redis: time-outs that end, retries that are few, errors that say what to do."""

import asyncio
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.driver_info import DriverInfo
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from llamastead.shared.disk import is_shortage
from llamastead.shared.store.errors import StoreUnreachable

BLOCK_MS = 4000
"""How long a blocking read waits; well below SOCKET_TIMEOUT_S, or an idle stream looks like a dead server."""

SOCKET_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
OLDEST = (7, 0)

# What connections say of themselves. Left to each, it is read from a file each time.
_DRIVER = DriverInfo()

# A connection that died since its last use, or whose server is a replica by now: once more on a new one.
_FRESH_CONNECTION = (RedisConnectionError, ReadOnlyError)


class SavingFailsError(ResponseError):
    """Redis could not save its data and takes no writes until it can: its disk is full, for example."""

    def __init__(self, message: str, status_code: str | None = None) -> None:
        super().__init__(f"{status_code} {message}", status_code=status_code)


class DemotedError(ReadOnlyError):
    """Redis became a replica, which takes no writes, while a call waited in it."""


class _Parser(DefaultParser):  # type: ignore[misc, valid-type]  # which one depends on what is installed
    """Tells a Redis that can't save, or is a replica by now, from one that refuses a call for good."""

    EXCEPTION_CLASSES = DefaultParser.EXCEPTION_CLASSES | {
        "MISCONF": SavingFailsError,
        "UNBLOCKED": DemotedError,
    }


class _CancellableSend(AbstractConnection):
    """A connection whose sends can be cancelled at any time.

    redis-py sends under `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes in
    the instant the send is done: a loop that is cancelled right then would run on for ever.
    """

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()  # type: ignore[no-untyped-call]
        limit, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                await super().send_packed_command(command, check_health=False)
        except TimeoutError:
            raise RedisTimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = limit


def connect(
    url: str, *, socket_timeout: float = SOCKET_TIMEOUT_S, connect_timeout: float = CONNECT_TIMEOUT_S
) -> Redis:
    """Return a client for redis://, rediss:// (TLS) or unix:// URLs, user and password in them.

    It connects at first use. At most 64 connections are open; who needs one more waits up to
    `connect_timeout` for it. Times in seconds. Raises StoreUnreachable for a URL that is none.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=64,
            timeout=connect_timeout,
            decode_responses=True,
            protocol=2,
            driver_info=_DRIVER,
            retry=AsyncRetry(NoBackoff(), 1, supported_errors=_FRESH_CONNECTION),
            **_timeouts(url, socket_timeout, connect_timeout),
        )
    except ValueError as error:
        raise StoreUnreachable(f"{redact(url)} is no Redis address: {error}") from error
    kind = pool.connection_class
    pool.connection_class = type(kind.__name__, (_CancellableSend, kind), {})
    return Redis.from_pool(pool)


def connect_sync(
    url: str, *, socket_timeout: float = SOCKET_TIMEOUT_S, connect_timeout: float = CONNECT_TIMEOUT_S
) -> redis.Redis:
    """Return a blocking client of bytes, as RQ wants it; otherwise like `connect`."""
    try:
        return redis.Redis.from_url(
            url,
            protocol=2,
            driver_info=_DRIVER,
            parser_class=_Parser,
            retry=Retry(NoBackoff(), 1, supported_errors=_FRESH_CONNECTION),
            **_timeouts(url, socket_timeout, connect_timeout),
        )
    except ValueError as error:
        raise StoreUnreachable(f"{redact(url)} is no Redis address: {error}") from error


def _timeouts(url: str, socket_timeout: float, connect_timeout: float) -> dict[str, float | bool]:
    common: dict[str, float | bool] = {"socket_timeout": socket_timeout, "health_check_interval": 15}
    if url.startswith("unix:"):
        return common
    return common | {"socket_connect_timeout": connect_timeout, "socket_keepalive": True}


async def check(client: Redis, url: str) -> list[str]:
    """Make sure that this Redis is there and fit for use; return warnings about how it is set up.

    Raises StoreUnreachable naming the URL without its password and what to do.
    """
    try:
        await client.ping()
    except RedisError as error:
        raise StoreUnreachable(explain(url, error)) from error
    try:
        info = await client.info()
    except NoPermissionError:  # an account without INFO: nothing to check, nothing known to be wrong
        return []
    version = str(info.get("redis_version", ""))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
        raise StoreUnreachable(
            f"Redis at {redact(url)} is version {version}; use Redis 7.0 or newer, or Valkey"
        )
    if info.get("redis_mode") == "cluster" or info.get("cluster_enabled"):
        raise StoreUnreachable(
            f"Redis at {redact(url)} is a cluster, which is not supported; use a single Redis"
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        warning = (
            f"Redis at {redact(url)} has maxmemory-policy {policy}: when memory is short it deletes parts of "
            f"the herd's state. Set `maxmemory-policy noeviction`, or use a Redis of its own for Llamastead."
        )
        return [warning]
    return []


def refuses_writes(error: BaseException) -> str:
    """Return the word with which Redis refuses to write (MISCONF, OOM, READONLY, …); "" for other errors."""
    match error:
        case ReadOnlyError():
            return "READONLY"
        case OutOfMemoryError():
            return "OOM"
        case ResponseError():
            word = str(error).partition(" ")[0]
            return word if word.isupper() else ""
    return ""


def explain(url: str, error: RedisError) -> str:
    """Return what is wrong in a sentence, the URL without its password, and what to do about it."""
    where = redact(url)
    if isinstance(error.__cause__, RedisError):  # the client wraps what went wrong while it logged in
        error = error.__cause__
    if is_shortage(error):
        return f"Redis at {where} can't be reached ({error}): no more files may be open, raise `ulimit -n`"
    if isinstance(error, AuthenticationError):
        return f"Redis at {where} refuses the login ({error}): check user and password in --redis-url"
    if isinstance(error, NoPermissionError):
        return (
            f"Redis at {where} does not allow this user enough ({error}): docs/redis.md has the ACL it needs"
        )
    if isinstance(error, RedisTimeoutError):
        return (
            f"Redis at {where} does not answer in time: is it up, or does a firewall drop packets on the way?"
        )
    if isinstance(error, SavingFailsError):
        return f"Redis at {where} takes no writes ({error}): make room on its disk"
    if isinstance(error, ResponseError):  # a full disk, no such database
        return f"Redis at {where} refuses: {error}"
    return (
        f"Redis at {where} can't be reached ({error}): start it, or give the right address with --redis-url"
    )


def redact(url: str) -> str:
    """Return a URL without its password and query, fit for logs."""
    parts = urlsplit(url)
    account, at, place = parts.netloc.rpartition("@")
    user = account.partition(":")[0]
    netloc = f"{user}{':***' if ':' in account else ''}{at}{place}"
    return urlunsplit((parts.scheme, netloc, parts.path, "", ""))
