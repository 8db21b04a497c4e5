"""`llamastead redis` with redis-cli and without one, the ten commands of docs/redis.md among others."""

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from llamastead.cli.main import main
from llamastead.cli.redis_shell import client_words, raw_lines, shown_lines

DOCS = Path(__file__).parents[2] / "docs/redis.md"
COMMANDS = re.findall(r"^llamastead redis (.+?) +# ", DOCS.read_text(), re.MULTILINE)
REDIS_CLI = shutil.which("redis-cli")

pytestmark = pytest.mark.usefixtures("own_run_dir")


@pytest.fixture
async def filled(redis: Redis) -> None:
    """A Redis in which each of the commands finds something, awkward text included."""
    prefix = "llamastead:"
    await redis.zadd(f"{prefix}queue", {"tiny": 1_795_969_308_372})
    await redis.hset(
        f"{prefix}model:tiny", mapping={"status": "unloaded", "reason": 'said "no"\nütwice', "wait": ""}
    )
    await redis.hset(f"{prefix}tickets:tiny", "t1", '{"gateway": "g1"}')
    await redis.zadd(f"{prefix}instances", {f"box-1-{k}": k for k in range(1, 12)})
    await redis.hset(f"{prefix}instance:box-1-1", mapping={"state": "ready", "pid": "42"})
    await redis.hset(f"{prefix}leases:box-1-1", "g1", "l1:7")
    for k in range(11):
        await redis.xadd(f"{prefix}events", {"kind": "status", "state": f"s{k}"})
    await redis.hset(f"{prefix}leadership", mapping={"number": "3", "heartbeat": "9"})
    await redis.zadd(f"{prefix}gateways", {"g1": 17.0})


def test_there_are_ten() -> None:
    """Count what the page lists."""
    assert len(COMMANDS) == 10


@pytest.fixture
def without_redis_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on PATH."""
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.mark.parametrize("command", COMMANDS)
async def test_each_finds_something_without_redis_cli(
    filled: None, redis_url: str, without_redis_cli: None, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Run it with no redis-cli on PATH: it succeeds and prints something."""
    assert main(["redis", "--redis-url", redis_url, *shlex.split(command)]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(REDIS_CLI is None, reason="needs redis-cli (Debian's redis-tools)")
@pytest.mark.parametrize("form", ["--raw", "--no-raw"])
@pytest.mark.parametrize("command", COMMANDS)
async def test_our_own_mode_prints_what_redis_cli_prints(
    filled: None,
    redis_url: str,
    without_redis_cli: None,
    capsys: pytest.CaptureFixture[str],
    command: str,
    form: str,
) -> None:
    """Run it in our own mode and with redis-cli, in both forms: not a byte differs."""
    words = [form, *shlex.split(command)]
    assert main(["redis", "--redis-url", redis_url, *words]) == 0
    ours = capsys.readouterr().out
    address, _ = client_words(redis_url)
    theirs = await asyncio.create_subprocess_exec(
        str(REDIS_CLI), *address, *words, stdout=asyncio.subprocess.PIPE
    )
    assert ours.encode() == (await theirs.communicate())[0]


async def test_redis_runs_a_command_where_no_redis_cli_is(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With nothing on PATH: raw lines on a pipe, numbered ones with --no-raw, refusals with exit code 1."""
    monkeypatch.setenv("PATH", "/nowhere")
    await redis.zadd("z", {"a b": 1, "c": 2})
    address = ["redis", "--redis-url", redis_url]
    assert main([*address, "ZRANGE", "z", "0", "-1", "WITHSCORES"]) == 0
    assert capsys.readouterr().out == "a b\n1\nc\n2\n"
    assert main([*address, "--no-raw", "ZRANGE", "z", "0", "-1"]) == 0
    assert capsys.readouterr().out == '1) "a b"\n2) "c"\n'
    assert main([*address, "GET", "z"]) == 1
    assert capsys.readouterr().out.startswith("WRONGTYPE")
    assert main(address) == 1
    assert "no redis-cli on PATH to open" in capsys.readouterr().err


def test_redis_becomes_redis_cli_where_there_is_one(
    redis_url: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put a stand-in on PATH that prints its words: it is given the address, then all words as they came."""
    stand_in = short_tmp / "redis-cli"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    env = {**os.environ, "PATH": str(short_tmp)}
    words = [
        sys.executable,
        "-m",
        "llamastead",
        "redis",
        "--redis-url",
        redis_url,
        "-n",
        "1",
        "GET",
        "--run-dir",
    ]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.stdout == f"-s {redis_url.removeprefix('unix://')} -n 1 GET --run-dir\n"


def test_redis_cli_gets_no_password_on_its_command_line() -> None:
    """Translate URLs of all kinds into redis-cli's words."""
    assert client_words("rediss://u:p%40ss@r:6380/2") == (
        ["-h", "r", "-p", "6380", "--tls", "--user", "u", "-n", "2"],
        {"REDISCLI_AUTH": "p@ss"},
    )
    assert client_words("redis://r") == (["-h", "r", "-p", "6379"], {})
    assert client_words("unix:///a%20b/v.sock?db=3") == (["-s", "/a b/v.sock", "-n", "3"], {})


def test_answers_look_as_redis_cli_shows_them() -> None:
    """Compare nested, empty, binary and absent answers with redis-cli's forms."""
    reply = [b"1-0", [b'say "hi"\n\xff', 7], None, []]
    assert shown_lines(reply) == [
        '1) "1-0"',
        '2) 1) "say \\"hi\\"\\n\\xff"',
        "   2) (integer) 7",
        "3) (nil)",
        "4) (empty array)",
    ]
    assert list(raw_lines([b"a", [b"b", 7], None])) == ["a", "b", "7", ""]
    assert shown_lines(b"PONG", status=True) == ["PONG"]
