"""The ten commands of docs/redis.md through `llamastead redis`: with redis-cli, and without one."""

import asyncio
import re
import shlex
import shutil
from pathlib import Path

import pytest
from redis.asyncio import Redis

from llamastead.cli.main import main
from llamastead.cli.redis_shell import client_words

DOCS = Path(__file__).parents[2] / "docs/redis.md"
COMMANDS = re.findall(r"^llamastead redis (.+?) +# ", DOCS.read_text(), re.MULTILINE)
REDIS_CLI = shutil.which("redis-cli")


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
