"""Connections: what is told when Redis is away, wrong or badly set up, and what a call costs."""

import asyncio
import errno
import importlib.metadata
import socket
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from small_herd import Herd
from valkey_server import start_valkey

from llamastead.shared.store.connect import (
    BLOCK_MS,
    SOCKET_TIMEOUT_S,
    check,
    connect,
    connect_sync,
    explain,
    redact,
)
from llamastead.shared.store.errors import StoreUnreachable
from llamastead.shared.store.keys import Keys


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@cache:6379/0", "redis://:***@cache:6379/0"),
        ("rediss://herd:secret@cache:6380/0?ssl_cert_reqs=none", "rediss://herd:***@cache:6380/0"),
        ("unix://herd:secret@/run/valkey.sock?db=1", "unix://herd:***@/run/valkey.sock"),
        ("redis://cache", "redis://cache"),
    ],
)
def test_redact_keeps_the_address_and_drops_the_password(url: str, shown: str) -> None:
    """Show URLs of each kind: the user stays, password and query go."""
    assert redact(url) == shown


async def test_nobody_listens(tmp_path: Path) -> None:
    """Ask at a port and at a socket where nobody is: the text names the address without the password."""
    with socket.socket() as bound:  # and does not listen: so nobody else does
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        for url, shown in [
            (f"redis://u:secret@127.0.0.1:{port}/0", f"redis://u:***@127.0.0.1:{port}/0"),
            (f"unix://:secret@{tmp_path}/none.sock", f"unix://:***@{tmp_path}/none.sock"),
        ]:
            client = connect(url)
            with pytest.raises(StoreUnreachable) as unreachable:
                await check(client, url)
            assert shown in str(unreachable.value)
            assert "--redis-url" in str(unreachable.value)
            assert "secret" not in str(unreachable.value)
            await client.aclose()


def test_an_address_that_is_none() -> None:
    """Give something that is no Redis URL: the refusal says so."""
    with pytest.raises(StoreUnreachable, match="no Redis address"):
        connect("cache:6379")


async def test_silent_server_times_out_in_words() -> None:
    """A server accepts and never answers: the call ends with the socket time-out and says what to look at."""
    silent = socket.create_server(("127.0.0.1", 0))
    url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
    client = connect(url, socket_timeout=0.05)
    with pytest.raises(StoreUnreachable, match="does not answer in time"):
        await check(client, url)
    await client.aclose()
    silent.close()


async def test_login_and_rights_are_told_apart(short_tmp: Path) -> None:
    """Against a Valkey with users: wrong password, too few rights, and the right account."""
    server = start_valkey(short_tmp, "--save", "")
    admin = Redis(unix_socket_path=str(short_tmp / "valkey.sock"))
    try:
        await admin.execute_command(
            "ACL", "SETUSER", "herd", "on", ">right", "~llamastead:*", "+@all", "-info"
        )
        await admin.execute_command("ACL", "SETUSER", "weak", "on", ">right", "~*", "-@all")
        base = f"{short_tmp}/valkey.sock"
        for account, words in [
            ("herd:wrong", "refuses the login"),
            ("weak:right", "does not allow this user enough"),
        ]:
            url = f"unix://{account}@{base}"
            client = connect(url)
            with pytest.raises(StoreUnreachable, match=words):
                await check(client, url)
            await client.aclose()
        url = f"unix://herd:right@{base}"
        client = connect(url)
        assert await check(client, url) == []
        await Herd(client, Keys("llamastead:")).open("a")
        await client.aclose()
    finally:
        await admin.aclose()
        server.terminate()
        server.wait(10)


async def test_c177_eviction_policies_are_warned_of(redis: Redis, redis_url: str) -> None:
    """Set a policy that deletes keys: the check warns and says what to set instead."""
    assert await check(redis, redis_url) == []
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        (warning,) = await check(redis, redis_url)
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
    assert "allkeys-lru" in warning
    assert "noeviction" in warning


async def test_a_server_that_refuses_is_not_told_to_be_away(redis: Redis, redis_url: str) -> None:
    """Name a database that isn't there: the text has the server's words and no advice to start it."""
    url = f"{redis_url}?db=999" if redis_url.startswith("unix") else f"{redis_url}/999"
    client = connect(url)
    with pytest.raises(StoreUnreachable, match=r"refuses: DB index is out of range$"):
        await check(client, url)
    await client.aclose()


def test_a_rule_the_server_gives_is_passed_on() -> None:
    """Any other error is shown with the address."""
    text = explain("redis://:secret@cache/0", RedisError("LOADING"))
    assert "LOADING" in text
    assert "secret" not in text


def test_c169_blocking_reads_end_well_before_the_socket_time_out() -> None:
    """The block time has to leave room, or an idle stream looks like a dead server."""
    assert 2 * BLOCK_MS <= SOCKET_TIMEOUT_S * 1000


async def test_a_connection_reads_no_file(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect when what is installed can't be looked up, as in a process that may open one more file only."""

    def refuse(_: str) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(importlib.metadata, "version", refuse)
    client, blocking = connect(redis_url), connect_sync(redis_url)
    assert await client.ping()
    assert blocking.ping()
    await client.aclose()
    blocking.close()


async def test_server_restart_costs_no_failed_call(short_tmp: Path) -> None:
    """Kill -9 the server between two calls and start it again: the next call gets a new connection."""
    server = start_valkey(short_tmp, "--appendonly", "yes", "--appendfsync", "always")
    client = connect(f"unix://{short_tmp}/valkey.sock")
    try:
        herd = await Herd(client, Keys("llamastead:")).open("a")
        await herd.ready("i1", "a")
        server.kill()
        server.wait(10)
        server = start_valkey(short_tmp, "--appendonly", "yes")
        await herd.acquire("a", "t1")
        assert await herd.gateway.read_leases("i1") == {"g1": "t1"}
    finally:
        await client.aclose()
        server.terminate()
        server.wait(10)


async def test_scripts_are_loaded_again_where_redis_forgot_them(redis: Redis, keys: Keys) -> None:
    """Flush the scripts in between: the next call loads its script and goes on."""
    herd = await Herd(redis, keys).open("a")
    await redis.script_flush()
    await herd.acquire("a", "t1")


async def test_acquire_and_release_are_one_call_each(redis: Redis, keys: Keys) -> None:
    """Count the commands Redis gets for a claim and its release: two scripts and nothing else."""
    herd = await Herd(redis, keys).open("a")
    await herd.ready("i1", "a")
    await herd.acquire("a", "warm")
    await herd.gateway.release("i1", "g1", "warm", used=True)
    await redis.config_resetstat()
    for n in range(10):
        await herd.acquire("a", f"t{n}")
        await herd.gateway.release("i1", "g1", f"t{n}", used=True)
    stats = await redis.info("commandstats")
    sent = {name: figures["calls"] for name, figures in stats.items() if name.startswith("cmdstat_eval")}
    assert sent == {"cmdstat_evalsha": 20}


async def test_many_callers_share_few_connections(redis: Redis, keys: Keys) -> None:
    """Three hundred claims at once wait for a connection instead of opening one each."""
    herd = await Herd(redis, keys).open("a")
    await herd.ready("i1", "a")
    await asyncio.gather(*(herd.acquire("a", f"t{n}") for n in range(300)))
    assert (await redis.info("clients"))["connected_clients"] <= 65
