"""What can be wrong with a request, a model, an engine or a start: a clear answer, nothing counted."""

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from herd import KEYS, PATIENCE_S, QUICK, Herd, free_port, herd, processes_naming, until
from tiny import stub_engine

from llamastead.supervisor.engine import find_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PRESET = """\
[good]
model = {models}/good.gguf
ctx-size = 512
[no-file]
model = {models}/gone.gguf
[cut]
model = {models}/cut.gguf
[bad-option]
model = {models}/good.gguf
ctx-size = many
[no-model]
ctx-size = 512
[newer]
model = {models}/newer.gguf
[no-projector]
model = {models}/good.gguf
mmproj = {models}/mmproj-gone.gguf
[dies]
model = {models}/dies.gguf
engine = {stub}
[illegal]
model = {models}/good.gguf
engine = {illegal}
"""


def engine_that_dies_of_sigill(folder: Path) -> Path:
    """Write an engine that answers questions as the real one does and dies when it is to load a model."""
    path = folder / "illegal-llama-server"
    real = find_engine(None).path
    path.write_text(
        f'#!/bin/sh\ncase "$1" in --help|--version) exec {real} "$1";; esac\n'
        "echo 'load_tensors: AMX is not ready to be used!' >&2\nkill -ILL $$\n"
    )
    path.chmod(0o755)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd with one model that works and one of each kind that does not."""
    async with herd(QUICK) as made:
        made.add_models("good", "dies")
        (made.models / "cut.gguf").write_bytes((made.models / "good.gguf").read_bytes()[:1000])
        newer = (made.models / "good.gguf").read_bytes().replace(b"llama", b"zzzzz")
        (made.models / "newer.gguf").write_bytes(newer)
        knobs = {"crash": "loading", "crash_code": 3, "crash_text": "E srv  the dog ate the weights"}
        knobs |= {"load_gate": str(made.models / "dies-gate")}
        (made.models / "dies.gguf.json").write_text(json.dumps(knobs))
        folder = made.models.parent
        texts = {"stub": stub_engine(folder), "illegal": engine_that_dies_of_sigill(folder)}
        preset = folder / "models.ini"
        preset.write_text(PRESET.format(models=made.models, **texts))
        await made.up("--models-preset", str(preset), "-t", "1", "--no-warmup")
        yield made


def refusal(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error object of a refused request in llama-server's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert error["code"] == status
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    return error


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/completion", "/v1/embeddings", "/tokenize", "/props"]
)
async def test_a_request_without_a_usable_model_is_refused_at_once(stead: Herd, path: str) -> None:
    """Name no model, an unknown one, and values that are no name: 400 that says which, nothing is counted."""
    messages = {
        None: "model name is missing from the request",
        '"nope"': "model 'nope' not found",
        '"good "': "model 'good ' not found",
        '""': "model name is missing from the request",
        "null": "model name is missing from the request",
        "7": "`model` must be a string, not 7",
        '["good"]': "`model` must be a string, not ",
        '{"id": "good"}': "`model` must be a string, not ",
    }
    async with stead.client(timeout=5.0) as client:
        for value, message in messages.items():
            body = '{"content": "x"}' if value is None else f'{{"content": "x", "model": {value}}}'
            error = refusal(await client.post(path, content=body), 400)
            assert error["message"].startswith(message)
            assert (error["type"], error["param"]) == ("invalid_request_error", "model")
    assert await stead.counted() == {}


@pytest.mark.parametrize(
    "body", ["{", '{"model": "good",', '{"model": "good"} x', "[1,", "nonsense", '{"model": "go\nod"}', ""]
)
async def test_broken_json_is_refused_at_once(stead: Herd, body: str) -> None:
    """Send what is no JSON: 400 in the shape of llama-server's errors, nothing is counted."""
    async with stead.client(timeout=5.0) as client:
        error = refusal(await client.post("/v1/chat/completions", content=body), 400)
    assert error["type"] == "invalid_request_error"
    assert await stead.counted() == {}


async def test_reads_and_forms_without_a_usable_model_are_refused_too(stead: Herd) -> None:
    """Read an instance and send a form without a model, with an unknown one, and with autoload off."""
    async with stead.client(timeout=5.0) as client:
        assert refusal(await client.get("/slots"), 400)["message"] == "model name is missing from the request"
        unknown = await client.get("/metrics", params={"model": "nope"})
        assert refusal(unknown, 400)["message"] == "model 'nope' not found"
        files = {"file": ("a.wav", b"RIFF")}
        form = await client.post("/v1/audio/transcriptions", files=files, data={"model": "nope"})
        assert refusal(form, 400)["message"] == "model 'nope' not found"
        off = await client.post("/tokenize", params={"autoload": "false"}, json={"model": "illegal"})
        assert refusal(off, 400)["message"] == "model is not loaded"
        assert refusal(await client.get("/no/such/path"), 404)["type"] == "not_found_error"
        assert refusal(await client.get("/v1/models/nope"), 404)["type"] == "not_found_error"
    assert await stead.counted() == {}


async def listed_as_failed(stead: Herd, model: str) -> dict[str, Any]:
    """Wait until a model is listed as failed, which may be an event later than its waiters are told."""

    async def look() -> dict[str, Any]:
        status = await stead.status(model)
        return status if status.get("failed") else {}

    return dict(await until(look, f"{model} to be listed as failed"))


FAULTS = {
    "no-file": r"failed to open GGUF file '.*gone\.gguf'.*\(exit code 1\)",
    "cut": r"failed to (?:read key-value pairs|load model).*\(exit code 1\)",
    "bad-option": r'error while handling argument "--ctx-size".*\(exit code 1\)',
    "no-model": r"names no model",
    "newer": r"unknown model architecture: 'zzzzz': this engine is older than the model; give a newer",
    "no-projector": r"mmproj-gone\.gguf not found",
    "illegal": r"illegal instruction \(SIGILL\)",
}


@pytest.mark.parametrize("model", FAULTS)
async def test_a_model_that_can_not_load_says_why(stead: Herd, model: str) -> None:
    """Ask for it, plainly and streaming: 500 with the reason, listed as failed; others are served."""
    reason = FAULTS[model]
    async with stead.client() as client:
        for stream in (False, True):
            answer = await client.post(
                "/v1/chat/completions", json={"model": model, "stream": stream, **CHAT}
            )
            error = refusal(answer, 500)
            assert re.search(reason, error["message"]), error
            assert model in error["message"]
        await stead.nothing_counted()
        status = await listed_as_failed(stead, model)
        assert status["value"] == "unloaded"
        assert re.search(reason, status["reason"]), status
        good = await client.post("/v1/chat/completions", json={"model": "good", **CHAT})
        assert good.status_code == 200
    await stead.nothing_counted()


async def test_c118_a_missing_projector_is_one_clear_error_and_no_start(stead: Herd) -> None:
    """Ask three times for a model whose projector is missing: the same words, nothing started (C118)."""
    async with stead.client() as client:
        request = {"model": "no-projector", **CHAT}
        answers = [await client.post("/v1/chat/completions", json=request) for _ in range(3)]
        messages = {refusal(answer, 500)["message"] for answer in answers}
        assert len(messages) == 1
        assert "mmproj-gone.gguf not found" in messages.pop()
        assert (await client.get("/logs/no-projector")).status_code == 404  # its engine never ran
        good = await client.post("/v1/chat/completions", json={"model": "good", **CHAT})
        assert good.status_code == 200
    await stead.nothing_counted()


async def test_a_child_that_dies_at_start_is_told_to_all_who_wait_with_its_last_words(stead: Herd) -> None:
    """Ask five times at once: one retry, then five answers with the child's last lines, nothing counted."""
    async with stead.client() as client:
        request = {"model": "dies", **CHAT}
        asked = asyncio.gather(*(client.post("/v1/chat/completions", json=request) for _ in range(5)))

        async def all_wait() -> bool:
            async with stead.redis() as redis:
                return int(await redis.hlen(KEYS.tickets("dies"))) == 5

        # Who comes after the retry would have it start once more.
        await until(all_wait, "five to wait for it")
        (stead.models / "dies-gate").touch()
        errors = [refusal(answer, 500) for answer in await asked]
        page = (await client.get("/logs/dies")).text
    for error in errors:
        assert "dies" in error["message"]
        assert error["end_class"] == "failed_to_start"
        assert any("the dog ate the weights" in line for line in error["log"])
    starts = (stead.models / "dies.gguf.journal").read_text().count('"event": "start"')
    assert starts == 2
    assert "the dog ate the weights" in page
    assert (await listed_as_failed(stead, "dies"))["exit_code"] == 3
    await stead.nothing_counted()


@pytest.mark.parametrize("role", ["up", "gateway", "supervisor", "worker"])
async def test_a_redis_that_is_not_there_is_told_at_start(role: str) -> None:
    """Start each role where nobody is: it names the URL less its password; all but the gateway end."""
    async with herd() as made:
        url = "redis://someone:s3cret@127.0.0.1:1/0"
        port = ("--port", str(free_port())) if role in ("up", "gateway") else ()
        started = await made.role(role, role, "--redis-url", url, *port)
        told = "redis://someone:***@127.0.0.1:1/0 can't be reached"
        await until(lambda: told in started.output(), "what is wrong with Redis")
        assert started.process is not None
        if role == "gateway":
            # It may come up before its Redis does: it says that it is not ready and goes on trying.
            address = f"http://127.0.0.1:{port[1]}"
            async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S) as client:

                async def lives() -> bool:
                    return (await client.get("/healthz")).status_code == 200

                await until(lives, "the gateway")
                assert (await client.get("/readyz")).status_code == 503
                refused = await client.post("/v1/chat/completions", json={"model": "good", **CHAT})
                assert refusal(refused, 503)["type"] == "unavailable_error"
                assert int(refused.headers["retry-after"]) > 0
        else:
            assert await asyncio.wait_for(started.process.wait(), PATIENCE_S) == 1
        said = started.output()
    assert "s3cret" not in said
    assert "Traceback" not in said


async def test_an_engine_that_this_processor_can_not_run_is_told_at_start() -> None:
    """Start `up` and ask the doctor with an engine that dies of SIGILL at its load: both say so."""
    async with herd() as made:
        engine = str(engine_that_dies_of_sigill(made.models.parent))
        code, out, err = await made.command("up", "--engine", engine, "--port", "0")
        assert code == os.EX_CONFIG
        assert re.search(r"illegal instruction \(SIGILL\).*--engine", out + err)
        assert "Traceback" not in out + err
        code, out, err = await made.command("doctor", "--engine", engine)
        assert code == 1
        assert "SIGILL" in out + err


async def test_a_taken_port_and_a_taken_run_folder_are_told_with_who_has_them(stead: Herd) -> None:
    """Start a second `up` on the same folder and on the same port: each ends naming the first's pid."""
    first, port = stead.roles["up"].pid, stead.ports[0]
    code, out, err = await stead.command("up", "--port", "0")
    assert code == 1
    assert re.search(rf"run folder \S+ is in use by pid {first} ", out + err)
    async with herd() as other:
        code, out, err = await other.command("up", "--port", str(port))
        assert code == 1
        assert re.search(rf"port {port} on 127\.0\.0\.1 is taken by pid \d+ \(.*llamastead", out + err)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            held = taken.getsockname()[1]
            url = ("--redis-url", stead.redis_url)
            code, out, err = await other.command("gateway", "--port", str(held), *url)
        assert code != 0
        assert f"port {held} on 127.0.0.1 is taken by pid {os.getpid()} " in out + err
    async with stead.client() as client:
        assert (await client.get("/readyz")).status_code == 200


async def test_a_broken_preset_or_option_is_told_at_start() -> None:
    """Start `up` with an unknown option and with a broken preset: it names option, file and line."""
    async with herd() as made:
        code, _, err = await made.command("up", "--frobnicate")
        assert code != 0
        assert "--frobnicate" in err
        preset = made.models.parent / "broken.ini"
        preset.write_text("[a]\nfrobnicate = 1\n")
        process = await made.role("up", "up", "--port", "0", "--models-preset", str(preset))
        assert process.process is not None
        assert await asyncio.wait_for(process.process.wait(), PATIENCE_S) == os.EX_CONFIG
        assert re.search(r"broken\.ini:2: .*frobnicate", process.output())
        assert "Traceback" not in process.output()


async def test_after_all_of_it_the_herd_stops_clean(stead: Herd) -> None:
    """Stop the herd with SIGTERM: code 0, nothing counted before, no socket left behind."""
    await stead.nothing_counted()
    assert await stead.roles["up"].signal(signal.SIGTERM) == 0
    # A holder that is told to leave is nobody's child: it goes at once, and nobody waits for that.
    await until(lambda: not processes_naming(stead.run_dir), "the last holder to leave")
    assert [path for path in stead.run_dir.rglob("*") if path.is_socket()] == []
