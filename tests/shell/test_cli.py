"""The command: what it prints, what it makes of words, and how it refuses."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import MODELS, QUEUE, FakeGateway
from cli_kit import gateway as gateway
from redis.asyncio import Redis

from llamastead.cli import roles
from llamastead.cli.main import main
from llamastead.shared.settings import Settings, flag_of

pytestmark = pytest.mark.usefixtures("own_run_dir")

PS = """\
MODEL   STATE    CONTEXT  SIZE      SOURCE      NOTE
gemma   ready    4096     -         models_dir
slow    loading  -        -         models_dir  42%
qwen    stopped  -        1024 MiB  preset      default, q
broken  failed   -        -         models_dir  out of memory; also old
"""
QUEUE_TABLE = """\
PLACE  MODEL  WAITING  REQUESTS  WHY
1      qwen   4.2s     2         waits for tiny: 2 requests in flight, drains in 12 s
"""


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


def test_measuring_by_a_load_waits_for_that_load(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier load's figure is there: it is not taken for that of the load just ordered; that of a load
    which still runs is.
    """
    memory = {"source": "measured", "min": {}, "effective": {"host": {"model": 1 << 20}}, "effective_ms": 7}
    stopped = {**MODELS[0], "memory": memory}
    gateway.answers["GET", "/v1/models/qwen"] = 200, stopped
    gateway.answers["POST", "/models/load"] = 200, {"success": True}
    assert main(["measure", "qwen", "--load", "--wait", "0.5"]) == 0
    assert "still not over after 0.5 s" in capsys.readouterr().err
    gateway.answers["GET", "/v1/models/qwen"] = 200, {**stopped, "status": MODELS[1]["status"]}
    assert main(["measure", "qwen", "--load", "--wait", "600"]) == 0
    assert capsys.readouterr().err == ""


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
        (["frobnicate"], 2, "there is no command 'frobnicate' \\(see `llamastead --help`\\)"),
        (["unlaod", "a"], 2, "there is no command 'unlaod'; did you mean `llamastead unload`\\? .*"),
        (["list"], 2, "there is no command 'list'; did you mean `llamastead ps`\\? .*"),
        (["ps", "--jsn"], 2, "unrec.*: --jsn; did you mean '--json'\\? \\(see `llamastead ps --help`\\)"),
        (["events", "--model", "x"], 2, "unrec.*: --model x \\(see `llamastead events --help`\\)"),
        (["up", "/tmp"], 78, "argument /tmp not recognized.*; did you mean `--models-dir /tmp`\\?"),
        (["logs", "-n", "0"], 2, ".*-n/--lines: expected a number from 1 on, not '0'.*--help.*"),
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
    """Let it want a key, pass on the hub's refusal, know no model, and let something else answer there."""
    gateway.answers["GET", "/models"] = 401, {"error": {"message": "Invalid API Key"}}
    assert main(["ps"]) == 1
    assert capsys.readouterr().err == (
        "llamastead: Invalid API Key: give --api-key or set LLAMASTEAD_API_KEY\n"
    )
    refusal = {"message": "'a/b' is gated", "reason": "gated"}
    gateway.answers["POST", "/models"] = 401, {"error": refusal}
    assert main(["pull", "a/b"]) == 1
    assert capsys.readouterr().err == "llamastead: 'a/b' is gated\n"
    gateway.answers["POST", "/models/load"] = 404, {"error": {"message": "model 'no' not found\n"}}
    assert main(["load", "no"]) == 1
    assert capsys.readouterr().err == "llamastead: model 'no' not found: `llamastead ps` lists the names\n"
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
    ("role", "package"), [("gateway", "gateway"), ("supervisor", "supervisor"), ("worker", "measure_worker")]
)
def test_help_of_a_role_lists_what_its_code_reads(
    role: str, package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the settings that a role's code names with its help: all are there; others are taken."""
    with pytest.raises(SystemExit):
        main([role, "--help"])
    listed = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    code = "".join(path.read_text() for path in (Path(roles.__file__).parents[2] / package).rglob("*.py"))
    read = set(re.findall(r"\bsettings\.([a-z_]+)", code)) & Settings.model_fields.keys()
    assert {flag for name in read if (flag := flag_of(name))} <= listed
    foreign, value = {
        "gateway": ("models_preset", "/m.ini"),
        "supervisor": ("port", "9000"),
        "worker": ("port", "9000"),
    }[role]
    assert flag_of(foreign) not in listed
    assert str(getattr(taken(monkeypatch, role, [str(flag_of(foreign)), value]), foreign)) == value


@pytest.mark.parametrize(
    "command", ["ps", "load", "unload", "logs", "queue", "events", "doctor", "redis", "gateway"]
)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ask each for help."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"examples:\n  llamastead {command}" in capsys.readouterr().out


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


def test_an_early_interrupt_is_no_traceback() -> None:
    """Interrupt it while it imports its own code: it ends with 130 and no word."""
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'llamastead.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "import runpy\n"
        "runpy.run_module('llamastead', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_logs_are_lines_or_json() -> None:
    """Log one event in both forms, with facts that need quotes, and read it back."""
    import logging

    from llamastead.shared import log

    lines = []
    for form in ("text", "json"):
        out = io.StringIO()
        log.setup("info", form, "supervisor", out)
        logging.getLogger("x").info(
            "instance ready", extra={"model": "a b", "instance": "h-1-2", "none": None}
        )
        logging.getLogger("x").debug("unseen")
        lines.append(out.getvalue())
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\dT\S{12}Z info +supervisor instance ready model="a b" instance=h-1-2\n',
        lines[0],
    )
    fields = json.loads(lines[1])
    assert (fields["message"], fields["model"], fields["role"]) == ("instance ready", "a b", "supervisor")
