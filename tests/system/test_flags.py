"""Flags of llama-server that shape the gateway: TLS, prefix, pages, a model on the command line."""

import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from herd import QUICK, Herd, free_port, herd, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a key and a certificate for a name that is nobody's."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=box"]
    subprocess.run([*made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return key, cert


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd behind TLS and a prefix, with pages of its own and one model from the command line."""
    async with herd(QUICK) as made:
        folder = made.models.parent
        key, cert = certificate(folder)
        made.add_models("mine")
        (folder / "pages").mkdir()
        (folder / "pages" / "index.html").write_text("<p>ours</p>")
        (folder / "pages" / "a.css").write_text("p {}")
        port = free_port()
        # What is the gateway's in the environment must not reach the engine, which then would speak TLS, too.
        made.env["LLAMA_ARG_SSL_KEY_FILE"], made.env["LLAMA_ARG_SSL_CERT_FILE"] = str(key), str(cert)
        made.env["LLAMA_ARG_API_PREFIX"] = "/llm/"
        model = ("-m", made.models / "mine.gguf", "-a", "chat, talk", "-c", "256")
        more = ("--path", folder / "pages", "-to", "0", "--ui-config", '{"a": 1}')
        await made.role("up", "up", "--port", str(port), *map(str, (*model, *more)))
        made.ports.append(port)
        async with client(made) as tls:

            async def is_open() -> bool:
                answer = await tls.get("/readyz")
                return answer.status_code == 200 and bool(answer.json()["herd"])

            await until(is_open, "the herd to be open")
        yield made


def client(made: Herd) -> httpx.AsyncClient:
    """Return a client that trusts the herd's certificate, not its name."""
    trusted = ssl.create_default_context(cafile=made.models.parent / "cert.pem")
    trusted.check_hostname = False
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{made.ports[0]}", verify=trusted, timeout=60)


async def test_c96_the_model_of_the_command_line_is_loaded_behind_tls_and_prefix(stead: Herd) -> None:
    """Wait for the model by its two names, chat with it, and try paths without the prefix (C96)."""
    async with client(stead) as tls:

        async def loaded() -> bool:
            shown = (await tls.get("/llm/v1/models/talk")).json()
            return bool(shown.get("status", {}).get("value") == "loaded")

        await until(loaded, "the model of the command line")
        body = {"model": "chat", "prompt": "a", "max_tokens": 2}
        assert (await tls.post("/llm/v1/completions", json=body)).status_code == 200
        assert (await tls.post("/%6Clm/v1/completions", json=body)).status_code == 200
        missing = await tls.get("/health")
        assert (missing.status_code, missing.json()["error"]["message"]) == (404, "File Not Found")
        assert (await tls.get("/llmx/health")).status_code == 404
        assert (await tls.get("/llm/health")).json() == {"status": "ok"}
        assert (await tls.get("/readyz")).status_code == 200
        assert (await tls.get("/llm/props")).json()["ui_settings"] == {"a": 1}


async def test_pages_of_ones_own_take_the_place_of_the_web_ui(stead: Herd) -> None:
    """Get the start page, a file, and what lies outside the folder."""
    async with client(stead) as tls:
        assert (await tls.get("/llm/")).text == "<p>ours</p>"
        assert (await tls.get("/llm/a.css")).headers["content-type"].startswith("text/css")
        for path in ("/llm/none.css", "/llm/../cert.pem", "/llm/%2e%2e/cert.pem"):
            assert (await tls.get(path)).status_code == 404


async def test_client_commands_find_their_way(stead: Herd) -> None:
    """List the models and print the log by the command: it knows certificate and prefix."""
    code, out, err = await stead.command("ps")
    assert (code, err) == (0, "")
    assert "chat" in out
    assert "listening  https://127.0.0.1" in stead.roles["up"].output()


async def test_what_only_prints_is_answered(stead: Herd) -> None:
    """Ask for the cache, the devices and the version through `up`: each is printed, nothing starts."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = stead.models.parent / "hub" / "models--o--r"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "snapshots" / commit / "m-Q8_0.gguf").touch()
    env = {"HF_HUB_CACHE": str(stead.models.parent / "hub")}
    code, out, _ = await stead.command("up", "-cl", env=env)
    assert (code, out) == (0, "number of models in cache: 1\n   1. o/r:Q8_0\n")
    assert (await stead.command("up", "--list-devices"))[0] == 0
    assert (await stead.command("up", "--version"))[0] == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--ssl-key-file", "{key}"), "give --ssl-cert-file too"),
        (("--ssl-key-file", "{cert}", "--ssl-cert-file", "{cert}"), "--ssl-key-file"),
        (("-to", "soon"), "--timeout: input should be a valid number"),
        (("--queue-timeout", ""), "--queue-timeout: input should be a valid number"),
        (("--ui-config", "[1]"), "--ui-config: value error, expected a JSON object"),
        (("--docker-repo", "x"), "--docker-repo fetches a model by itself"),
        (("-c", "lots"), "--ctx-size lots: expected a number"),
        (("--draft", "5"), "refuses --draft: the argument has been removed"),
        (("--prio", "9"), "refuses --prio: invalid value"),
    ],
)
async def test_c139_what_makes_no_sense_is_refused_at_start(
    stead: Herd, words: tuple[str, ...], reason: str
) -> None:
    """Start with half of a certificate, and with values that are none: one line says which (C139)."""
    folder = stead.models.parent
    given = [word.format(key=folder / "key.pem", cert=folder / "cert.pem") for word in words]
    other = ("--run-dir", str(folder / "other"), "--port", str(free_port()))
    env = {"LLAMA_ARG_SSL_KEY_FILE": "", "LLAMA_ARG_SSL_CERT_FILE": ""}
    code, out, err = await stead.command("up", *other, *given, env=env)
    assert code in (1, 78)
    assert reason in out + err
