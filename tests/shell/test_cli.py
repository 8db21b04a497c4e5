"""The command: what it prints, what it makes of words, and how it refuses."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from llamastead.cli import roles
from llamastead.cli.main import main
from llamastead.cli.redis_shell import client_words, raw_lines, shown_lines
from llamastead.shared.settings import Settings, flag_of

MODELS = [
    {
        "id": "qwen",
        "aliases": ["default", "q"],
        "status": {"value": "unloaded", "state": "stopped"},
        "source": "preset",
        "metadata": {"size_bytes": 1 << 30},
    },
    {
        "id": "gemma",
        "aliases": [],
        "status": {"value": "loaded", "state": "ready"},
        "source": "models_dir",
        "meta": {"n_ctx": 4096},
    },
    {
        "id": "broken",
        "aliases": [],
        "status": {"value": "unloaded", "state": "failed", "failed": True, "reason": "out of memory"},
        "source": "models_dir",
    },
    {
        "id": "slow",
        "aliases": [],
        "status": {"value": "loading", "state": "loading", "progress": {"value": 0.42}},
        "source": "models_dir",
    },
]
PS = """\
MODEL   STATE    CONTEXT  SIZE      SOURCE      NOTE
gemma   ready    4096     -         models_dir
slow    loading  -        -         models_dir  42%
qwen    stopped  -        1024 MiB  preset      default, q
broken  failed   -        -         models_dir  out of memory
"""
QUEUE = {
    "queue": [
        {
            "model": "qwen",
            "position": 1,
            "waiting_ms": 4200,
            "reason": "busy",
            "wait": "waits for tiny: 2 requests in flight, drains in 12 s",
            "requests": [{"request_id": "r1"}, {}],
        }
    ],
    "waiting": 2,
}
QUEUE_TABLE = """\
PLACE  MODEL  WAITING  REQUESTS  WHY
1      qwen   4.2s     2         waits for tiny: 2 requests in flight, drains in 12 s
"""


class FakeGateway(ThreadingHTTPServer):
    """Answers with what a test put into `answers`: (method, path) → (status, JSON or text)."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {("GET", "/models"): (200, {"data": MODELS})}
        self.asked: list[tuple[str, str, str | None, bytes]] = []
        super().__init__(("127.0.0.1", 0), Answerer)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answerer(BaseHTTPRequestHandler):
    server: FakeGateway

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization"), body))
        status, content = self.server.answers.get(
            (self.command, self.path), (404, {"error": {"message": "no"}})
        )
        sent = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_POST = answer  # noqa: N815 - names of the base class

    def log_message(self, *_: Any) -> None:
        """Stay quiet."""


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    """A gateway that client commands find through LLAMASTEAD_URL."""
    with FakeGateway() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("LLAMASTEAD_URL", server.url)
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, short_tmp: Path) -> None:
    """No settings from outside, a run folder of our own."""
    for name in os.environ:
        if name.startswith(("LLAMA_", "LLAMASTEAD_")) or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LLAMASTEAD_RUN_DIR", str(short_tmp / "run"))


def unpadded(text: str) -> str:
    """Strip what a table pads its last column with."""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def test_ps_shows_a_table(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare the whole table: those in memory first, with context, size and what there is to note."""
    assert main(["ps"]) == 0
    assert unpadded(capsys.readouterr().out) == PS


def test_names_are_shown_as_they_are(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Show a model whose name looks like rich's markup and emoji."""
    gateway.answers["GET", "/models"] = 200, {"data": [{**MODELS[0], "id": "brack[et] :smile:"}]}
    assert main(["ps"]) == 0
    assert "brack[et] :smile:  stopped" in capsys.readouterr().out


def test_a_narrow_screen_cuts_nothing(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show a long note where there is little room: it goes on in further lines, other columns are whole."""
    long = {**MODELS[2], "status": {**MODELS[2]["status"], "reason": "out of memory " * 9}}
    gateway.answers["GET", "/models"] = 200, {"data": [long]}
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["ps"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("MODEL   STATE   CONTEXT  SIZE  SOURCE      NOTE")
    assert shown.count("memory") == 9


def test_ps_as_json_is_what_the_api_says(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Parse what --json prints."""
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == MODELS


def test_queue_shows_a_table(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare the whole table."""
    gateway.answers["GET", "/queue"] = 200, QUEUE
    assert main(["queue"]) == 0
    assert unpadded(capsys.readouterr().out) == QUEUE_TABLE


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({}, False)],
)
def test_colours_are_obeyed(gateway: FakeGateway, variables: dict[str, str], coloured: bool) -> None:
    """Run it with and without the variables on a pipe: colour codes only when forced and not forbidden."""
    env = {**os.environ, "TERM": "xterm", **variables}
    done = subprocess.run([sys.executable, "-m", "llamastead", "ps"], env=env, capture_output=True, text=True)
    assert ("\x1b[32m" in done.stdout) is coloured
    assert "gemma" in done.stdout


def test_load_waits_until_it_is_loaded(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Load a model that is loaded at the second look; the key is shown to the gateway."""
    gateway.answers["POST", "/models/load"] = 200, {"success": True}
    gateway.answers["GET", "/v1/models/a%2Fb"] = 200, MODELS[1]
    assert main(["load", "a/b", "--api-key", "k"]) == 0
    assert re.fullmatch(r"a/b loaded after [\d.]+s\n", capsys.readouterr().out)
    assert gateway.asked[0] == ("POST", "/models/load", "Bearer k", b'{"model":"a/b"}')


def test_load_of_what_runs_is_no_error(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Load a model that is loaded already: it is said to be."""
    error = {"error": {"code": 400, "message": "model is already running"}}
    gateway.answers["POST", "/models/load"] = 400, error
    gateway.answers["GET", "/v1/models/gemma"] = 200, MODELS[1]
    assert main(["load", "gemma"]) == 0
    assert re.fullmatch(r"gemma loaded after [\d.]+s\n", capsys.readouterr().out)


def test_load_tells_why_it_failed(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Let the model stay failed: the reason is shown and the exit code is 1."""
    gateway.answers["POST", "/models/load"] = 200, {"success": True}
    gateway.answers["GET", "/v1/models/broken"] = 200, MODELS[2]
    assert main(["load", "broken"]) == 1
    assert capsys.readouterr().err == "llamastead: broken did not load: out of memory\n"


def test_unload_all_takes_what_is_in_memory(gateway: FakeGateway) -> None:
    """Unload all: only the loaded and the loading one are named."""
    gateway.answers["POST", "/models/unload"] = 200, {"success": True}
    assert main(["unload", "--all", "--no-wait"]) == 0
    assert [body for method, _, _, body in gateway.asked if method == "POST"] == [
        b'{"model":"gemma"}',
        b'{"model":"slow"}',
    ]


def test_logs_of_all_that_run_carry_names(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Name no model: the lines of both running ones come, each behind its model's name."""
    gateway.answers["GET", "/logs/gemma?lines=2"] = 200, "one\ntwo\n"
    gateway.answers["GET", "/logs/slow?lines=2"] = 200, "three\n"
    assert main(["logs", "-n", "2"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["gemma | one", "gemma | two", "slow | three"]


def test_the_local_up_is_found_by_its_note(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, short_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --url the note in the run folder gives address and key."""
    monkeypatch.delenv("LLAMASTEAD_URL")
    (short_tmp / "run").mkdir()
    (short_tmp / "run/gateway.json").write_text(json.dumps({"url": gateway.url, "key": "k"}))
    assert main(["ps"]) == 0
    assert gateway.asked[0][2] == "Bearer k"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["ps"],
            1,
            "no Llamastead runs with the run folder .*/run: start it with `llamastead up`, or give --url",
        ),
        (
            ["ps", "--url", "127.0.0.1:1"],
            1,
            "nothing answers at http://127.0.0.1:1: start it with `llamastead up`.*",
        ),
        (["redis", "PING"], 1, "no Llamastead runs with the run folder .*or give --redis-url"),
        (["events"], 1, "no Llamastead runs with the run folder .*or give --redis-url"),
        (["frobnicate"], 2, ".*invalid choice: 'frobnicate'.*--help.*"),
        (["up", "--max-wiat", "3"], 78, "argument --max-wiat not recognized; did you mean '--max-wait'\\?"),
        (["up", "--ctx-sice", "3"], 78, "argument --ctx-sice not recognized.*did you mean '?--ctx-size.*"),
        (["up", "-c"], 78, "argument -c lacks its value"),
        (["up", "models"], 78, "argument models not recognized.*"),
        (["up", "--models-max", "many"], 78, "--models-max: input should be a valid integer.*not 'many'"),
        (["up", "--max-wait"], 2, ".*--max-wait: expected one argument.*"),
        (["gateway", "-c", "512"], 2, "`llamastead gateway` has no option -c .*"),
        (["up", "--engine", "/nowhere"], 78, "there is no llama-server at /nowhere.*--engine"),
    ],
)
def test_refusals_are_one_line_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    """Give words that can't work and compare exit code and message."""
    assert main(words) == code
    said = capsys.readouterr().err
    assert re.fullmatch(f"llamastead: {message}\n", said), said


def test_a_refusal_of_the_gateway_is_passed_on(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let it want a key, and let something else answer there."""
    gateway.answers["GET", "/models"] = 401, {"error": {"message": "Invalid API Key"}}
    assert main(["ps"]) == 1
    assert capsys.readouterr().err == (
        "llamastead: Invalid API Key: give --api-key or set LLAMASTEAD_API_KEY\n"
    )
    gateway.answers["GET", "/models"] = 200, "<html>"
    assert main(["ps"]) == 1
    assert "not as Llamastead does" in capsys.readouterr().err


def taken(monkeypatch: pytest.MonkeyPatch, role: str, words: list[str]) -> Settings:
    """Return the settings with which a role would start."""
    got: list[Settings] = []
    monkeypatch.setattr(roles, "_start", lambda _, settings, parsed: got.append(settings) or 0)
    monkeypatch.setattr("llamastead.shared.log.setup", lambda *_: None)
    assert main([role, *words]) == 0
    return got[0]


def test_words_of_llama_server_go_to_all_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mix our flags and llama-server's, short ones, underscores and negative values: each finds its place."""
    words = [
        "-ngl",
        "99",
        "--models_max",
        "2",
        "--jinja",
        "--no-models-autoload",
        "-hf",
        "o/n:Q4",
        "-n",
        "-1",
    ]
    settings = taken(monkeypatch, "up", [*words, "--port=9000", "--cache-ram", "0"])
    assert settings.instance_args == (
        "-ngl",
        "99",
        "--jinja",
        "-hf",
        "o/n:Q4",
        "-n",
        "-1",
        "--cache-ram",
        "0",
    )
    assert (settings.models_max, settings.models_autoload, settings.port) == (2, False, 9000)


def test_keys_may_be_repeated_or_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give keys both ways at once."""
    settings = taken(monkeypatch, "gateway", ["--api-key", "a,b", "--api-key", "c"])
    assert [key.get_secret_value() for key in settings.api_keys] == ["a", "b", "c"]


def test_help_lists_every_flag_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    """Read the help of `up`: each flag and a variable for each stand in it, and examples."""
    with pytest.raises(SystemExit) as end:
        main(["up", "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert "examples:" in text
    for name in Settings.model_fields:
        if flag := flag_of(name):
            assert re.search(rf"{flag}\b", text), flag
    assert "LLAMA_ARG_MODELS_MAX" in text
    assert "LLAMASTEAD_MAX_WAIT" in text


@pytest.mark.parametrize(
    "command", ["ps", "load", "unload", "logs", "queue", "events", "doctor", "redis", "gateway"]
)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ask each for help."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"examples:\n  llamastead {command}" in capsys.readouterr().out


def test_doctor_tells_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that can run a herd all checks are there, and none fails."""
    assert main(["doctor", "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    names = [
        "platform",
        "llamastead",
        "run folder",
        "engine",
        "engine runs",
        "devices",
        "models",
        "memory",
        "redis",
        "open files",
    ]
    assert list(findings) == names
    assert "llama-server" in findings["engine"]["text"]


def test_doctor_goes_on_where_the_address_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Give an address that is no Redis URL: one finding fails, the others are told."""
    assert main(["doctor", "--redis-url", "http://x"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"redis +fail +http://x is no Redis address", text)
    assert "open files" in text


def test_doctor_fails_when_something_is_missing(capsys: pytest.CaptureFixture[str], short_tmp: Path) -> None:
    """Name an engine that can't run and a Redis that isn't there: both are told, the exit code is 1."""
    broken = short_tmp / "llama-server"
    broken.write_text("#!/bin/sh\nkill -ILL $$\n")
    broken.chmod(0o755)
    assert main(["doctor", "--engine", str(broken), "--redis-url", "redis://:s3cret@127.0.0.1:1"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"engine +fail +.*illegal instruction", text, re.IGNORECASE)
    assert re.search(r"redis +fail +Redis at redis://:\*\*\*@127.0.0.1:1", text)


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


async def test_events_are_read_from_redis(redis: Redis, redis_url: str) -> None:
    """Write two events and print the last one, for people and as JSON."""
    await redis.xadd("llamastead:events", {"kind": "registry", "revision": "1"})
    await redis.xadd("llamastead:events", {"kind": "status", "instance": "i", "model": "m", "state": "ready"})
    words = ["-m", "llamastead", "events", "--redis-url", redis_url, "-n", "1"]
    shown = await output(sys.executable, *words)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} status m ready i\n", shown)
    assert json.loads(await output(sys.executable, *words, "--json"))["state"] == "ready"


async def output(*words: str) -> str:
    """Run a command and return what it prints."""
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    return printed.decode()


def test_a_closed_pipe_is_no_traceback(gateway: FakeGateway) -> None:
    """Print into a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "llamastead", "ps", "--json"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert "Traceback" not in done.stderr


def test_logs_are_lines_or_json() -> None:
    """Log one event in both forms, with facts that need quotes, and read it back."""
    import logging

    from llamastead.shared import log

    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    try:
        lines = []
        for form in ("text", "json"):
            out = io.StringIO()
            log.setup("info", form, "supervisor", out)
            logging.getLogger("x").info(
                "instance ready", extra={"model": "a b", "instance": "h-1-2", "none": None}
            )
            logging.getLogger("x").debug("unseen")
            lines.append(out.getvalue())
    finally:
        root.handlers[:] = kept
        root.setLevel(level)
        logging.captureWarnings(False)
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\dT\S{12}Z info +supervisor instance ready model="a b" instance=h-1-2\n',
        lines[0],
    )
    fields = json.loads(lines[1])
    assert (fields["message"], fields["model"], fields["role"]) == ("instance ready", "a b", "supervisor")
