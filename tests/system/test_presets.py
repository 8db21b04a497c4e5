"""A preset as guides show it, served word for word; what reaches its engines is read from their processes."""

import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from herd import QUICK, Herd, herd, instance_pids, processes_naming
from looks import environment_of, listening_tcp_ports, words_of
from openai import AsyncOpenAI

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The file that guides tell users to write; only the folder of the models is ours.
FROM_GUIDES = """\
[llama3]
model = /opt/models/llama-3-8b-instruct.Q5_K_M.gguf
ctx-size = 8192
ngl = 35
threads = 8

[mistral]
model = /opt/models/mistral-7b-instruct-v0.3.Q4_K_M.gguf
ctx-size = 4096
ngl = 20
threads = 8

[qwen]
model = /opt/models/qwen2.5-coder-7b-instruct.Q5_K_M.gguf
ctx-size = 16384
ngl = 35
threads = 8
"""
FILES = ("llama-3-8b-instruct.Q5_K_M", "mistral-7b-instruct-v0.3.Q4_K_M", "qwen2.5-coder-7b-instruct.Q5_K_M")
OURS = """
[*]
ubatch-size = 64
batch-size = 128
[embed]
model = /opt/models/embed.gguf
embeddings = true
pooling = mean
batch-size = 256
[rank]
model = /opt/models/rank.gguf
reranking = true
[hostile]
model = /opt/models/embed.gguf
ctx-size = 512
host = 0.0.0.0
port = 18766
api-key = a-known-key
ssl-key-file = /no/key.pem
ssl-cert-file = /no/cert.pem
api-prefix = /elsewhere
"""
# What a container or a shell may have set for llama-server; the gateway heeds what is a setting of its own.
SURROUNDINGS = {
    "LLAMA_ARG_HOST": "127.0.0.1",
    "LLAMA_ARG_PORT": "18765",
    "LLAMA_ARG_MODELS_MAX": "5",
    "LLAMA_ARG_MODEL": "/no/such.gguf",
    "LLAMA_ARG_ALIAS": "everybody",
    "LLAMA_API_KEY": "a-key-of-the-gateway",
    "LLAMA_ARG_N_PARALLEL": "2",
    "LLAMA_ARG_BATCH": "32",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd on that preset, which it finds by llama-server's variable, with options on its command line."""
    async with herd({**QUICK, **SURROUNDINGS}) as made:
        made.headers = {"Authorization": "Bearer a-key-of-the-gateway"}
        made.add_models(*FILES, "embed", "rank")
        preset = made.models.parent / "models.ini"
        preset.write_text((FROM_GUIDES + OURS).replace("/opt/models", str(made.models)))
        made.env["LLAMA_ARG_MODELS_PRESET"] = str(preset)
        await made.up("--threads", "1", "--no-warmup")
        yield made


async def pid_of(stead: Herd, model: str) -> int:
    """Return the pid of a model's engine, loaded for the purpose."""
    async with stead.client() as client:
        answer = await client.post("/tokenize", json={"model": model, "content": "load"})
        assert answer.status_code == 200, answer.text
    pid = int((await stead.instance(model))["pid"])
    assert pid in instance_pids(stead.run_dir)
    return pid


def value_of(words: list[str], option: str) -> str:
    """Return what follows an option on a command line, where it must stand once."""
    assert words.count(option) == 1, words
    return words[words.index(option) + 1]


async def test_the_models_ini_of_guides_is_served_with_chat_embeddings_and_reranking(stead: Herd) -> None:
    """Let the OpenAI client list the sections, chat with each of the three and embed; rerank by hand."""
    url, key = f"http://127.0.0.1:{stead.ports[0]}/v1", "a-key-of-the-gateway"
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        names = [model.id async for model in client.models.list()]
        assert names == sorted(["llama3", "mistral", "qwen", "embed", "rank", "hostile"])
        for name in ("llama3", "mistral", "qwen"):
            answer = await client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
            assert answer.model == name
            assert answer.choices[0].message.content
        rows = await client.embeddings.create(model="embed", input="once", encoding_format="float")
        assert len(rows.data[0].embedding) == 64
    async with stead.client() as http:
        ranked = await http.post("/v1/rerank", json={"model": "rank", "query": "a", "documents": ["b", "a"]})
        assert {row["index"] for row in ranked.json()["results"]} == {0, 1}


async def test_options_reach_the_engine_by_rank(stead: Herd) -> None:
    """Read command lines of engines: the section beats [*], the command line beats both, all are there."""
    words = words_of(await pid_of(stead, "qwen"))
    assert value_of(words, "--model") == f"{stead.models}/{FILES[2]}.gguf"
    assert value_of(words, "--ctx-size") == "16384"
    assert value_of(words, "--n-gpu-layers") == "35"
    assert value_of(words, "--threads") == "1"
    assert "--no-warmup" in words
    assert value_of(words, "--batch-size") == "128"
    assert value_of(words, "--ubatch-size") == "64"
    words = words_of(await pid_of(stead, "embed"))
    assert value_of(words, "--batch-size") == "256"
    assert value_of(words, "--pooling") == "mean"
    assert "--embeddings" in words or "--embedding" in words
    async with stead.client() as client:
        props = (await client.get("/props", params={"model": "qwen"})).json()
    assert (props["total_slots"], props["model_alias"]) == (2, "qwen")


async def test_c96_c97_router_variables_do_not_reach_the_engine(stead: Herd) -> None:
    """Read the environment of two engines: none of the router's variables, keys of their own, no port."""
    keys = set()
    for model in ("llama3", "mistral"):
        pid = await pid_of(stead, model)
        found = environment_of(pid)
        told = {name: value for name, value in found.items() if name.startswith(("LLAMA_", "RQ_"))}
        keys.add(told.pop("LLAMA_API_KEY"))
        assert told == {
            "LLAMA_SERVER_ROUTER_PORT": "0",
            "LLAMA_ARG_N_PARALLEL": "2",
            "LLAMA_ARG_BATCH": "32",
        }
        assert found["XDG_CONFIG_HOME"].startswith(str(stead.run_dir))
        words = words_of(pid)
        assert (
            value_of(words, "--host") == f"{(await stead.instance(model))['address'].removeprefix('unix:')}"
        )
        assert "--port" not in words
        assert listening_tcp_ports(pid) == []
    assert len(keys) == 2
    assert "a-key-of-the-gateway" not in keys
    for pid in processes_naming(stead.run_dir):
        with contextlib.suppress(OSError):  # a job's, which was over
            assert not any(key in word for key in keys for word in words_of(pid))


async def test_c156_a_section_does_not_open_its_engine_to_others(stead: Herd) -> None:
    """Serve a section that asks for a public address, a port and a known key: ignored, and told."""
    pid = await pid_of(stead, "hostile")
    words = words_of(pid)
    assert value_of(words, "--host").startswith(str(stead.run_dir))
    for option in ("--port", "--api-key", "--ssl-key-file", "--ssl-cert-file", "--api-prefix"):
        assert option not in words
    assert listening_tcp_ports(pid) == []
    async with await stead.direct("hostile") as engine:
        assert (await engine.get("/props")).status_code == 200
        for key in ("a-known-key", "a-key-of-the-gateway", "no-key"):
            refused = await engine.get("/props", headers={"Authorization": f"Bearer {key}"})
            assert refused.status_code == 401
    said = stead.roles["up"].output()
    for key in ("host", "port", "api-key", "ssl-key-file"):
        assert any(
            f" {key}" in line or f"'{key}'" in line for line in said.splitlines() if "registry:" in line
        )
    assert "a-known-key" not in said
