"""The main job: every inference route answers as the engine itself does, from a model that did not run."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from herd import QUICK, Herd, herd, until
from openai import AsyncOpenAI, BadRequestError, InternalServerError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from llamastead.gateway.routes import ROUTES, WITH_MODEL_PROXIED, Serves

pytestmark = pytest.mark.asyncio(loop_scope="module")

PRESET = """\
[*]
ctx-size = 2048
threads = 1
warmup = off
[chat]
model = {models}/chat.gguf
alias = chatty
[fim]
model = {models}/fim.gguf
override-kv = {fim}
[embed]
model = {models}/embed.gguf
embeddings = true
pooling = mean
[rank]
model = {models}/rank.gguf
reranking = true
"""
FIM = ",".join(
    f"tokenizer.ggml.fim_{part}_token_id=int:{token}"
    for part, token in (("pre", 280), ("suf", 281), ("mid", 282))
)
SAY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "say something"}]
SAME: dict[str, Any] = {"temperature": 0, "seed": 1, "cache_prompt": False}
CHAT = {"messages": SAY, "max_tokens": 6, **SAME}
TEXT = {"prompt": "once upon", "max_tokens": 6, **SAME}
# With fifty alternatives to each token, so that the engine is at it for seconds.
LONG = {"model": "chat", "prompt": "once", "stream": True, "ignore_eos": True, "logprobs": 50}
RERANK = {"query": "once", "documents": ["upon a time", "once"]}
# Path → the model to ask and what to ask it. A path of the table that is missing here fails its own test.
ASKED: dict[str, tuple[str, Any]] = {
    "/completion": ("chat", {"prompt": "once upon", "n_predict": 6, **SAME}),
    "/completions": ("chat", TEXT),
    "/v1/completions": ("chat", TEXT),
    "/chat/completions": ("chat", CHAT),
    "/v1/chat/completions": ("chat", CHAT),
    "/infill": ("fim", {"input_prefix": "once", "input_suffix": "time", "n_predict": 6, **SAME}),
    "/responses": ("chat", {"input": "say something", "max_output_tokens": 6, **SAME}),
    "/v1/responses": ("chat", {"input": "say something", "max_output_tokens": 6, **SAME}),
    "/v1/messages": ("chat", CHAT),
    "/audio/transcriptions": ("chat", {"file": ""}),
    "/v1/audio/transcriptions": ("chat", {"file": ""}),
    "/embedding": ("embed", {"content": "once"}),
    "/embeddings": ("embed", {"input": "once"}),
    "/v1/embeddings": ("embed", {"input": ["once", "upon"]}),
    "/rerank": ("rank", RERANK),
    "/reranking": ("rank", RERANK),
    "/v1/rerank": ("rank", RERANK),
    "/v1/reranking": ("rank", RERANK),
    "/v1/systemone": ("chat", {"state": "once", "questions": {"a": {"type": "noul", "instructions": "so?"}}}),
    "/tokenize": ("chat", {"content": "once upon a time", "with_pieces": True}),
    "/detokenize": ("chat", {"tokens": [266, 279, 280]}),
    "/apply-template": ("chat", {"messages": SAY}),
    "/chat/completions/input_tokens": ("chat", CHAT),
    "/v1/chat/completions/input_tokens": ("chat", CHAT),
    "/responses/input_tokens": ("chat", {"input": "say something"}),
    "/v1/responses/input_tokens": ("chat", {"input": "say something"}),
    "/v1/messages/count_tokens": ("chat", {"messages": SAY}),
    "/v1/chat/completions/control": ("chat", {"id": "nobody"}),
    "/props": ("chat", {}),
    "/lora-adapters": ("chat", []),
    "/slots/*": ("chat", {}),
}
# What this engine can't do with a tiny model, or wants an option for: its refusal comes through as it is.
REFUSED = {
    "/audio/transcriptions": 501,
    "/v1/audio/transcriptions": 501,
    "/v1/systemone": 404,
    "/v1/chat/completions/control": 400,
    "/props": 501,
    "/slots/*": 501,
}
# Differ from answer to answer.
PASSING = {
    "created",
    "created_at",
    "completed_at",
    "id",
    "timings",
    "id_slot",
    "tokens_cached",
    "encrypted_content",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd with a chat model and one each for infill, embeddings and reranking."""
    async with herd(QUICK) as made:
        made.add_models("chat", "fim", "embed", "rank")
        preset = made.models.parent / "models.ini"
        preset.write_text(PRESET.format(models=made.models, fim=FIM))
        await made.up("--models-preset", str(preset))
        yield made


def lasting(value: Any) -> Any:
    """Return an answer without what differs from one to the next."""
    if isinstance(value, list):
        return [lasting(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "cache_read_input_tokens" in value:
        # /v1/messages has no way to switch the engine's prompt cache off: the second asker is told of it.
        value = {"input_tokens": value["input_tokens"] + value["cache_read_input_tokens"]}
    return {k: lasting(v) for k, v in value.items() if k not in PASSING and not k.endswith("_id")}


def example(path: str) -> tuple[str, str, Any, dict[str, str]]:
    """Return the model for a route, the path to call, the JSON body and the query."""
    model, body = ASKED[path]
    query = {"action": "erase"} if path == "/slots/*" else {}
    if isinstance(body, list):
        return model, path, body, {**query, "model": model}
    return model, path.replace("*", "0"), {"model": model, **body}, query


@pytest.mark.parametrize(
    "path", [route.path for route in ROUTES if route.method == "POST" and route.serves is Serves.PROXY]
)
async def test_a_cold_model_answers_every_route_as_its_engine_does(stead: Herd, path: str) -> None:
    """Stop the model, call the route, then ask the engine itself the same and compare status and body."""
    model, target, body, query = example(path)
    await stead.unload(model)
    async with stead.client() as client:
        answer = await client.post(target, json=body, params=query)
    assert answer.headers["x-llamastead-path"] == "cold"
    assert int(answer.headers["x-llamastead-load-ms"]) > 0
    async with await stead.direct(model) as engine:
        expected = await engine.post(target, json=body, params=query)
    assert answer.status_code == expected.status_code == REFUSED.get(path, 200), answer.text
    assert answer.headers["content-type"] == expected.headers["content-type"]
    assert lasting(answer.json()) == lasting(expected.json())


@pytest.mark.parametrize(
    "path",
    [
        route.path
        for route in ROUTES
        if route.method == "GET" and (route.serves is Serves.PROXY or route.serves in WITH_MODEL_PROXIED)
    ],
)
async def test_reads_of_an_instance(stead: Herd, path: str) -> None:
    """Read it from a model that is not loaded, told to load it, and loaded: 400, a cold and a hot answer."""
    await stead.unload("chat")
    async with stead.client() as client:
        refused = await client.get(path, params={"model": "chat"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "model is not loaded")
        cold = await client.get(path, params={"model": "chat", "autoload": "true"})
        assert (cold.status_code, cold.headers["x-llamastead-path"]) == (200, "cold")
        hot = await client.get(path, params={"model": "chatty"})
        assert (hot.status_code, hot.headers["x-llamastead-path"]) == (200, "hot")
    async with await stead.direct("chat") as engine:
        expected = await engine.get(path)
    assert hot.headers["content-type"] == expected.headers["content-type"]
    if path == "/metrics":
        assert names_of_metrics(hot.text) == names_of_metrics(expected.text)
    else:
        assert hot.json() == expected.json()


def names_of_metrics(page: str) -> list[str]:
    """Return the names on a page of metrics, in order."""
    return [line.split()[0] for line in page.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/completion"]
)
async def test_a_stream_is_the_engines_stream(stead: Herd, path: str) -> None:
    """Stream from a cold model and from its engine: the same events in the same order."""
    model, target, body, _ = example(path)
    await stead.unload(model)
    async with stead.client() as client:
        mine = await events_of(client, target, {**body, "stream": True})
    async with await stead.direct(model) as engine:
        theirs = await events_of(engine, target, {**body, "stream": True})
    assert len(mine) > 3
    assert [kind for kind, _ in mine] == [kind for kind, _ in theirs]
    assert [lasting(data) for _, data in mine] == [lasting(data) for _, data in theirs]


async def events_of(client: httpx.AsyncClient, path: str, body: Any) -> list[tuple[str, Any]]:
    """Return the events of a stream, each with its name and data."""
    found, kind = [], ""
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                found.append((kind, value if value == "[DONE]" else json.loads(value)))
    return found


async def test_a_stream_passes_chunk_by_chunk(stead: Herd) -> None:
    """Take the first event of a long answer: the engine is still at work on the rest of it then."""
    body = {**LONG, "max_tokens": 1500}
    async with stead.client() as client, stead.client() as other:
        await client.post("/tokenize", json={"model": "chat", "content": "load"})
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_raw()
            first = await anext(pieces)
            page = (await other.get("/metrics", params={"model": "chat"})).text
            rest = [piece async for piece in pieces]
    assert first.startswith(b"data: ")
    assert "llamacpp:requests_processing 1" in page
    assert b"".join(rest).endswith(b"data: [DONE]\n\n")
    assert len(rest) > 50


async def test_the_openai_client_works_unchanged(stead: Herd) -> None:
    """Let the asynchronous client list models, chat, stream, complete and embed."""
    await stead.unload("chat")
    async with AsyncOpenAI(
        base_url=f"http://127.0.0.1:{stead.ports[0]}/v1", api_key="none", max_retries=0
    ) as client:
        assert {model.id async for model in client.models.list()} == {"chat", "fim", "embed", "rank"}
        chat = await client.chat.completions.create(model="chat", messages=SAY, max_tokens=5)
        assert chat.model == "chat"
        assert chat.choices[0].finish_reason == "length"
        assert chat.choices[0].message.content
        stream = await client.chat.completions.create(
            model="chatty", messages=SAY, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 5
        aliased = await client.chat.completions.create(model="chatty", messages=SAY, max_tokens=5)
        assert {aliased.model, *(chunk.model for chunk in chunks)} == {"chat"}
        text = await client.completions.create(model="chat", prompt="once", max_tokens=5)
        assert text.choices[0].text
        response = await client.responses.create(model="chat", input="once", max_output_tokens=5)
        assert response.output_text
        rows = await client.embeddings.create(model="embed", input=["once", "upon"], encoding_format="float")
        assert [len(row.embedding) for row in rows.data] == [64, 64]
        with pytest.raises(BadRequestError, match="model 'nope' not found") as refusal:
            await client.chat.completions.create(model="nope", messages=SAY)
        assert refusal.value.type == "invalid_request_error"
        with pytest.raises(InternalServerError, match="--embeddings"):
            await client.embeddings.create(model="chat", input="once")


async def test_the_blocking_openai_client_works_unchanged(stead: Herd) -> None:
    """Let the ordinary client stream from a cold model and use raw responses, in a thread."""
    await stead.unload("chat")

    def talk() -> tuple[str, str, list[str]]:
        with OpenAI(
            base_url=f"http://127.0.0.1:{stead.ports[0]}/v1", api_key="none", max_retries=0
        ) as client:
            with client.chat.completions.create(
                model="chat", messages=SAY, max_tokens=5, stream=True
            ) as stream:
                said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            raw = client.completions.with_raw_response.create(model="chat", prompt="once", max_tokens=3)
            return said, raw.headers["x-llamastead-path"], [model.id for model in client.models.list()]

    said, path, models = await asyncio.to_thread(talk)
    assert said
    assert path == "hot"
    assert models == ["chat", "embed", "fim", "rank"]


async def test_request_ids_go_from_the_edge_to_the_engine_and_back(stead: Herd) -> None:
    """Send an id: the answer carries it; send none: the answer carries a new one."""
    body = {"model": "chat", "content": "once"}
    async with stead.client() as client:
        named = await client.post("/tokenize", json=body, headers={"X-Request-Id": "mine-1"})
        unnamed = await client.post("/tokenize", json=body)
    assert named.headers["x-request-id"] == "mine-1"
    assert len(unnamed.headers["x-request-id"]) == 24


async def test_a_body_is_passed_on_unchanged_whatever_its_size(stead: Herd) -> None:
    """Tokenize a text of a megabyte with the model named last: the engine has counted all of it."""
    text = "a b " * 250_000
    async with stead.client() as client:
        answer = await client.post("/tokenize", content=json.dumps({"content": text, "model": "chat"}))
    assert len(answer.json()["tokens"]) > len(text)


async def test_hundreds_of_requests_pass_over_kept_connections(stead: Herd) -> None:
    """Send 250 requests one after the other: the engine closes its connections after 100, nobody notices."""
    async with stead.client() as client:
        for _ in range(250):
            answer = await client.post("/tokenize", json={"model": "chat", "content": "once"})
            assert answer.status_code == 200, answer.text


async def test_c28_a_client_that_leaves_stops_the_work(stead: Herd) -> None:
    """Leave after the first event of a long answer: the engine stops computing, the claim goes back."""
    body = {**LONG, "max_tokens": 2000}
    async with stead.client() as client:
        await client.post("/tokenize", json={"model": "chat", "content": "load"})
        async with await stead.direct("chat") as engine:

            async def metric(name: str) -> int:
                page = (await engine.get("/metrics")).text
                return int(next(line.split()[1] for line in page.splitlines() if line.startswith(name)))

            async def idle() -> bool:
                return await metric("llamacpp:requests_processing") == 0

            before = await metric("llamacpp:n_decode_total")
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                await anext(answer.aiter_raw())
            await until(idle, "an engine with nothing to do")
            assert await metric("llamacpp:n_decode_total") - before < 1500
    await stead.nothing_counted()


async def test_nothing_is_counted_when_all_is_answered(stead: Herd) -> None:
    """Look into Redis after everything above: no ticket, no lease, no queue entry."""
    await stead.nothing_counted()
