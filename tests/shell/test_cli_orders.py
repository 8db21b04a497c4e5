"""Commands that order something or wait for it: load, unload, pull, measure, logs."""

import itertools
import json
import re

import pytest
from cli_kit import MODELS, QUEUE, FakeGateway
from cli_kit import gateway as gateway

from llamastead.cli import models
from llamastead.cli.main import main

pytestmark = pytest.mark.usefixtures("own_run_dir")


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
    assert capsys.readouterr().err == (
        "llamastead: broken did not load: out of memory; `llamastead logs broken` has more\n"
    )


def test_load_of_several_ends_when_one_has_gone_for_another(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """Load a model that is stopped again before it was seen loaded, and one that stays: both are told of."""
    gateway.answers["POST", "/models/load"] = 200, {"success": True}
    gone = {"value": "unloaded", "state": "stopped", "reason": "stopped: made room for gemma"}
    gateway.answers["GET", "/v1/models/qwen"] = 200, {**MODELS[0], "status": gone}
    gateway.answers["GET", "/v1/models/gemma"] = 200, MODELS[1]
    gateway.answers["GET", "/queue"] = 200, {"queue": [], "waiting": 0}
    assert main(["load", "qwen", "gemma"]) == 1
    said = capsys.readouterr()
    assert said.err == "llamastead: qwen is not loaded: stopped: made room for gemma\n"
    assert re.fullmatch(r"gemma loaded after [\d.]+s\n", said.out)


def test_load_waits_while_the_queue_has_it(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have a load by an alias wait its turn for many looks, then come: it is not given up."""
    gateway.answers["POST", "/models/load"] = 200, {"success": True}
    gateway.answers["GET", "/v1/models/q"] = 200, MODELS[0]
    gateway.answers["GET", "/queue"] = 200, QUEUE
    looks = itertools.count()

    def look(_: float) -> None:
        if next(looks) == 50:
            gateway.answers["GET", "/v1/models/q"] = 200, {**MODELS[1], "id": "qwen"}

    monkeypatch.setattr(models, "SETTLE_S", -1.0)
    monkeypatch.setattr(models.time, "sleep", look)
    assert main(["load", "q"]) == 0
    assert capsys.readouterr().out.startswith("q loaded after ")


def test_unload_of_what_is_gone_meanwhile(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Have the gateway refuse since nothing runs: for all that is what was wanted, a name is told of."""
    error = {"error": {"code": 400, "message": "model is not running"}}
    gateway.answers["POST", "/models/unload"] = 400, error
    assert main(["unload", "--all", "--no-wait"]) == 0
    assert main(["unload", "gemma"]) == 1
    assert capsys.readouterr().err == "llamastead: gemma is not loaded\n"


@pytest.mark.parametrize("words", [["ps"], ["devices"], ["queue"], ["report"], ["load", "x"]])
def test_a_server_of_another_kind_is_told_of(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Let a lone llama-server answer: one line says so."""
    gateway.answers |= {
        ("GET", "/models"): (200, {"data": [{"id": "x", "object": "model"}]}),
        ("GET", "/props"): (200, {"default_generation_settings": {}}),
        ("GET", "/queue"): (200, {}),
        ("POST", "/models/load"): (200, {}),
        ("GET", "/v1/models/x"): (200, {"id": "x"}),
    }
    assert main([*words, "--url", gateway.url]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(r"llamastead: what answers is no Llamastead, .*: check --url\n", said), said


def test_unload_all_takes_what_is_in_memory(gateway: FakeGateway) -> None:
    """Unload all: only the loaded and the loading one are named."""
    gateway.answers["POST", "/models/unload"] = 200, {"success": True}
    assert main(["unload", "--all", "--no-wait"]) == 0
    assert [body for method, _, _, body in gateway.asked if method == "POST"] == [
        b'{"model":"gemma"}',
        b'{"model":"slow"}',
    ]


def test_what_is_hidden_is_in_memory_all_the_same(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """Have a hidden model run: it is shown as that, goes with all others, and its log is among theirs."""
    ghost = {**MODELS[1], "id": "ghost", "aliases": ["boo"], "hidden": True}
    gateway.answers["GET", "/models?hidden=true"] = 200, {"data": [ghost]}
    gateway.answers["GET", "/logs/ghost"] = 200, "a line\n"
    gateway.answers["POST", "/models/unload"] = 200, {"success": True}
    assert main(["ps"]) == 0
    assert capsys.readouterr().out.splitlines()[1].rstrip().endswith("hidden; also boo")
    assert main(["logs"]) == 0
    assert capsys.readouterr().out == "ghost | a line\n"
    assert main(["unload", "--all", "--no-wait"]) == 0
    assert gateway.asked[-1][3] == b'{"model":"ghost"}'


def test_reload_names_what_runs_with_old_settings(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reload files that the herd had read by itself: what still waits for its restart is told, and how."""
    answer = {"added": [], "removed": [], "changed": {}, "restarted": [], "revision": "r2"}
    gateway.answers["POST", "/models/reload"] = 200, answer
    old = {**MODELS[1], "status": {**MODELS[1]["status"], "changed": True}}  # type: ignore[dict-item]
    gateway.answers["GET", "/models"] = 200, {"data": [MODELS[0], old]}
    assert main(["reload"]) == 0
    assert capsys.readouterr().out == (
        "nothing changed since the files were read last; revision r2\n"
        "old settings until its next load: gemma; `llamastead reload --apply` restarts at once what is idle\n"
    )
    gateway.answers["POST", "/models/reload"] = 200, {**answer, "restarted": ["gemma"]}
    assert main(["reload", "--apply"]) == 0
    assert capsys.readouterr().out == "restarted  gemma\n"


def test_a_list_without_models_is_explained(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """List a herd that has none, as one that only just starts: the reason is told apart from the table."""
    gateway.answers["GET", "/models"] = 200, {"data": []}
    assert main(["ps"]) == 0
    said = capsys.readouterr()
    assert said.out.split() == ["MODEL", "STATE", "CONTEXT", "SIZE", "SOURCE", "NOTE"]
    assert said.err.startswith("llamastead: no models: the herd is just starting, or ")


def test_unload_takes_names_or_all(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Give both, and neither: nothing is unloaded."""
    for words in (["--all", "gemma"], []):
        assert main(["unload", *words]) == 1
        assert "name the models to unload, or give --all" in capsys.readouterr().err
    assert not [method for method, *_ in gateway.asked if method == "POST"]


def test_measured_figures_fit_a_narrow_screen(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show four figures of two devices on 60 columns: each has a line, and nothing is cut."""
    parts = {"model": 14 << 30, "mapped": 1 << 20, "context": 2 << 30, "compute": 500 << 20}
    both = {"gpu0": parts, "host": {"model": 1 << 30}}
    memory = dict.fromkeys(("min", "max", "effective"), both) | {"source": "measured"}
    gateway.answers["GET", "/v1/models/gemma"] = 200, {**MODELS[1], "memory": memory | {"peak": {"gpu0": 5}}}
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["measure", "gemma"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["DEVICE", "FIGURE", "SIZE", "OF"]
    assert lines[1].split()[:3] == ["gpu0", "min", "16884"]
    shown = " ".join(lines)
    words = {"14336 MiB": 3, "compute": 3, "500 MiB": 3, "peak": 1, "host": 3}
    assert {word: shown.count(word) for word in words} == words
    assert "mapped" not in shown


def test_a_pulled_model_is_told_by_the_name_to_ask_for(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pull without a quantisation what is here: the name with one is said, and not where it is the same."""
    entry = {**MODELS[1], "id": "a/b:Q4_K_M", "source": "cache"}
    gateway.answers["GET", "/models"] = 200, {"data": [*MODELS, entry, {**entry, "id": "a/bc:Q4_K_M"}]}
    gateway.answers["POST", "/models"] = 400, {"error": {"message": "model 'a/b' already exists"}}
    assert main(["pull", "a/b"]) == 0
    assert main(["pull", "a/b:Q4_K_M"]) == 0
    assert capsys.readouterr().out == (
        "a/b is here already; its name is a/b:Q4_K_M\na/b:Q4_K_M is here already\n"
    )


def test_a_download_that_is_still_listed_is_not_taken_for_its_model(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have the gateway list the download that just ended for one more look: the model's own name is said."""
    coming = {"id": "a/b", "aliases": [], "source": "cache", "status": {"value": "downloading"}}
    entry = {**MODELS[1], "id": "a/b:Q4_K_M", "source": "cache"}
    gateway.answers["GET", "/models"] = 200, {"data": [coming]}
    gateway.answers["POST", "/models"] = 400, {"error": {"message": "model 'a/b' already exists"}}

    def look(_: float) -> None:
        gateway.answers["GET", "/models"] = 200, {"data": [entry]}

    monkeypatch.setattr("llamastead.cli.downloads.time.sleep", look)
    assert main(["pull", "a/b"]) == 0
    assert capsys.readouterr().out == "a/b is here already; its name is a/b:Q4_K_M\n"
    assert main(["pull", "a/b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["names"] == ["a/b:Q4_K_M"]


def test_logs_of_all_that_run_carry_names(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Name no model: the lines of both running ones come, each behind its model's name."""
    gateway.answers["GET", "/logs/gemma?lines=2"] = 200, "one\ntwo\n"
    gateway.answers["GET", "/logs/slow?lines=2"] = 200, "three\n"
    assert main(["logs", "-n", "2"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["gemma | one", "gemma | two", "slow | three"]
