"""The ten commands of docs/redis.md, as they stand there, on a herd at work: by redis-cli and without one."""

import asyncio
import json
import os
import re
import shlex
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from herd import QUICK, Herd, herd, until
from tiny import stub_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENT = Path(__file__).parents[2] / "docs" / "redis.md"
REDIS_CLI = shutil.which("redis-cli") or shutil.which("valkey-cli")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 4}


def documented() -> list[list[str]]:
    """Return the commands of the document as shell words, without comments."""
    lines = re.findall(r"^llamastead redis .*$", DOCUMENT.read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True)[2:] for line in lines]


# First words of a command → what its answer must hold while `tiny` streams, `waiting` waits, `broken` failed.
EXPECTED = {
    "ZRANGE llamastead:queue": ["waiting"],
    "HMGET llamastead:model:tiny status": ["unloaded", "busy", "waits for tiny"],
    "HGETALL llamastead:tickets:tiny": ["gateway", "request_id"],
    "ZRANGE llamastead:instances": ["{instance}"],
    "HGETALL llamastead:instance:box-1-1": ["state", "ready", "pid", "address"],
    "HGETALL llamastead:leases:box-1-1": ["{gateway}"],
    "XREVRANGE llamastead:events": ["kind", "status", "queued"],
    "HMGET llamastead:model:tiny failed": ["1", "failed_to_start", "failed to open GGUF file"],
    "HGETALL llamastead:leadership": ["number", "host", "pid", "heartbeat"],
    "ZRANGE llamastead:gateways": ["{gateway}"],
}


class Scene:
    """A herd with a stream that is held open, a request that waits, and a model that failed."""

    def __init__(self, stead: Herd) -> None:
        self.stead = stead
        self.known: dict[str, str] = {}

    def adapt(self, words: list[str]) -> list[str]:
        """Put this herd's names where the document has its own."""
        about = next(key for key in EXPECTED if " ".join(words).startswith(key))
        model = "broken" if about.endswith(" failed") else "waiting"
        put = {"box-1-1": self.known["instance"], ":tiny": f":{model}"}
        return [re.sub("|".join(put), lambda found: put[found[0]], word) for word in words]

    def expected(self, words: list[str]) -> list[str]:
        """Return what the answer to a command of the document must hold."""
        about = next(key for key in EXPECTED if " ".join(words).startswith(key))
        return [part.format(**self.known) for part in EXPECTED[about]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    """Set the scene on stub engines with room for one."""
    # As long as all commands take, the stream keeps its place and the request waits: both have a limit.
    async with herd(QUICK | {"LLAMASTEAD_MAX_WAIT": "600"}) as made:
        made.add_models("tiny", "waiting", "broken")
        gate = made.models / "gate"
        (made.models / "tiny.gguf.json").write_text(f'{{"token_gate": "{gate}"}}')
        fault = {"crash": "loading", "crash_text": "gguf_init_from_file: failed to open GGUF file 'x' (gone)"}
        (made.models / "broken.gguf.json").write_text(json.dumps(fault))
        engine = str(stub_engine(made.models.parent))
        await made.up("--models-dir", str(made.models), "--models-max", "1", "--engine", engine)
        set_up = Scene(made)
        async with made.client(timeout=600) as client:
            failed = await client.post("/v1/chat/completions", json={"model": "broken", **CHAT})
            assert failed.status_code == 500
            async with client.stream("POST", "/v1/chat/completions", json={"model": "tiny", **CHAT}) as held:
                pieces = held.aiter_raw()
                await anext(pieces)
                waiting = asyncio.create_task(
                    client.post("/v1/chat/completions", json={"model": "waiting", **CHAT})
                )

                async def busy() -> bool:
                    async with made.redis() as redis:  # before that, it may wait for its measurement
                        return bool(await redis.hget("llamastead:model:waiting", "wait_reason") == "busy")

                await until(busy, "it to wait for tiny")
                set_up.known["instance"] = (await made.instance("tiny"))["id"]
                set_up.known["gateway"] = (await client.get("/readyz")).json()["gateway"]
                yield set_up
                gate.touch()
                assert b"".join([piece async for piece in pieces]).endswith(b"data: [DONE]\n\n")
            assert (await waiting).status_code == 200
        await made.nothing_counted()


async def test_the_document_has_ten_commands_and_an_expectation_for_each() -> None:
    """Parse the document and compare with what is looked for below."""
    assert len(documented()) == 10
    for words in documented():
        assert sum(" ".join(words).startswith(key) for key in EXPECTED) == 1, words


@pytest.mark.parametrize("words", documented(), ids=lambda words: " ".join(words[:2]))
async def test_llamastead_redis_answers_it_without_redis_cli(scene: Scene, words: list[str]) -> None:
    """Run the command through `llamastead redis` with nothing on PATH: the answer holds what the scene is."""
    code, out, err = await scene.stead.command("redis", *scene.adapt(words), env={"PATH": "/nowhere"})
    assert (code, err) == (0, "")
    for part in scene.expected(words):
        assert part in out, out


@pytest.mark.root
@pytest.mark.skipif(
    REDIS_CLI is None, reason="redis-cli is not installed: `apt-get install redis-tools` has it"
)
@pytest.mark.parametrize("words", documented(), ids=lambda words: " ".join(words[:2]))
async def test_redis_cli_answers_it(scene: Scene, words: list[str]) -> None:
    """Run the command through `llamastead redis` as redis-cli, and by redis-cli alone: both answer alike."""
    adapted = scene.adapt(words)
    code, out, err = await scene.stead.command("redis", *adapted)
    assert (code, err) == (0, "")
    for part in scene.expected(words):
        assert part in out, out
    socket = scene.stead.redis_url.removeprefix("unix://")
    alone = await asyncio.create_subprocess_exec(
        str(REDIS_CLI), "-s", socket, *adapted, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    by_itself, _ = await alone.communicate()
    assert alone.returncode == 0
    for part in scene.expected(words):
        assert part in by_itself.decode()
