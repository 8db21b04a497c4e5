"""An instance started from its spec by hand: the real engine does what the spec means."""

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from looks import listening_tcp_ports
from tiny import tiny_model
from waiting import until_blocking

from llamastead.shared.words import EndClass
from llamastead.supervisor.ends import classify_exit, is_doomed
from llamastead.supervisor.engine import find_engine
from llamastead.supervisor.holder_link import HolderExit
from llamastead.supervisor.launch import InstanceSpec, build_spec
from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import Sources


@dataclass(frozen=True)
class Times:
    """The settings that a launch reads."""

    stop_timeout: float = 10.0
    orphan_grace: float = 60.0


HOSTILE = {
    "LLAMA_ARG_PORT": "18765",
    "LLAMA_ARG_HOST": "0.0.0.0",
    "LLAMA_ARG_SSL_KEY_FILE": "/no/key.pem",
    "LLAMA_ARG_SSL_CERT_FILE": "/no/cert.pem",
    "LLAMA_ARG_API_PREFIX": "/elsewhere",
    "LLAMA_ARG_MODELS_PRESET": "/no/preset.ini",
    "LLAMA_ARG_MODELS_MAX": "1",
    "LLAMA_API_KEY": "a-key-of-the-gateway",
}


def make_spec(folder: Path, section: str, environ: dict[str, str]) -> InstanceSpec:
    """Return the spec of the model `a` of a preset with this section."""
    engine = find_engine(None)
    preset = folder / "m.ini"
    preset.write_text(f"[a]\n{section}\n")
    registry = load_registry(Sources(models_preset=preset), engine.options)
    instance_folder = folder / "i" / "h-1-1"
    instance_folder.mkdir(parents=True)
    return build_spec(
        registry.entries["a"], engine, "h-1-1", "0" * 32, folder, b"s" * 64, Times(), os.environ | environ
    )


def start(spec: InstanceSpec) -> subprocess.Popen[bytes]:
    """Start what the spec says, stderr to a file in the instance's folder."""
    with (spec.folder / "stderr").open("wb") as log:
        return subprocess.Popen(
            spec.argv,
            env=dict(spec.env),
            cwd=spec.cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )


@pytest.fixture
def instance(short_tmp: Path) -> Iterator[tuple[InstanceSpec, int]]:
    """A ready instance started in the worst environment: its spec and pid."""
    model = tiny_model(short_tmp / "m.gguf", 1)
    reserved = "host = 0.0.0.0\nport = 18765\napi-key = x\nssl-key-file = y"
    section = f"model = {model}\nctx-size = 256\nparallel = 1\n{reserved}"
    spec = make_spec(short_tmp, section, HOSTILE)
    with start(spec) as process:
        assert process.stdout is not None
        states = iter(process.stdout.readline, b"")
        assert any(b'"state":"ready"' in line for line in states), (spec.folder / "stderr").read_text()
        yield spec, process.pid
        process.kill()


def client(spec: InstanceSpec) -> httpx.Client:
    """Return a client on the instance's socket, without a key."""
    return httpx.Client(transport=httpx.HTTPTransport(uds=spec.socket), base_url="http://instance")


def test_c96_c97_c156_an_instance_listens_only_on_its_socket_and_wants_its_own_key(instance):
    """Start with reserved keys in the preset and router variables around, then look who gets in where."""
    spec, pid = instance
    assert listening_tcp_ports(pid) == []
    with client(spec) as http:
        key = {"Authorization": f"Bearer {spec.env['LLAMA_API_KEY']}"}
        assert http.get("/health").status_code == 200
        assert http.get("/props").status_code == 401
        for foreign in ("x", HOSTILE["LLAMA_API_KEY"]):
            assert http.get("/props", headers={"Authorization": f"Bearer {foreign}"}).status_code == 401
        assert http.get("/metrics", headers=key).status_code == 200
        models = http.get("/v1/models", headers=key).json()["data"]
        assert [model["id"] for model in models] == ["a"]
        answer = http.get("/props", headers={**key, "Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_a_burst_of_connections_does_not_hold_up_the_next(instance):
    """Open more connections at once than the engine has processors or slots: it still answers another."""
    spec, _ = instance
    with contextlib.ExitStack() as kept:
        for _ in range(60):
            kept.enter_context(socket.socket(socket.AF_UNIX)).connect(spec.socket)
        with client(spec) as http:
            assert http.get("/health", timeout=3).status_code == 200  # silent ones are closed after 5 s


def test_the_log_tells_what_memory_the_instance_took(instance):
    """Read the buffer sizes from the log of a started instance."""
    spec, _ = instance
    log = spec.folder / "stderr"
    # A thread of the engine writes it, which may be behind the state line.
    until_blocking(lambda: "KV buffer size" in log.read_text(), "the sizes")
    text = log.read_text()
    assert "model buffer size" in text
    assert "\x1b[" not in text


@pytest.mark.parametrize(
    ("section", "phase", "reason"),
    [
        ("model = /no/such.gguf", "loading", "failed to open GGUF file '/no/such.gguf' .*"),
        ("model = {model}\nctx-size = abc", "starting", 'error while handling argument "--ctx-size".*'),
        (
            "model = {folder}/broken.gguf",
            "loading",
            "failed to read key-value pairs.*|failed to load model.*",
        ),
    ],
)
def test_the_end_of_a_real_start_is_explained(short_tmp, section, phase, reason):
    """Start models that can't load and classify how the engine ended."""
    model = tiny_model(short_tmp / "m.gguf", 1)
    (short_tmp / "broken.gguf").write_bytes(model.read_bytes()[:1000])
    spec = make_spec(short_tmp, section.format(model=model, folder=short_tmp), {})
    said = ""
    while not re.search("exiting due to|error while", said):
        # One that fails within milliseconds may lose its own last lines: one is looked at that lost none.
        Path(spec.socket).unlink(missing_ok=True)
        with start(spec) as process:
            states, _ = process.communicate(timeout=60)
        assert bool(states) == (phase == "loading")
        said = (spec.folder / "stderr").read_text()
    tail = tuple(said.splitlines()[-50:])
    ended = HolderExit(process.returncode, None, tail, phase, False, False, False)
    end_class, told = classify_exit(ended)
    assert (end_class, is_doomed(ended)) == (EndClass.FAILED_TO_START, True), told
    assert re.fullmatch(rf"(?:{reason}) \(exit code 1\)", told), told
