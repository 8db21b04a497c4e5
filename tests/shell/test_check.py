"""`llamastead check`: a dry run on files alone."""

import json
from pathlib import Path

import pytest
from tiny import tiny_model

from llamastead.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder with one model, no hub cache, and no variables."""
    (tmp_path / "models").mkdir()
    tiny_model(tmp_path / "models" / "one.gguf", 1)
    for name in ("LLAMA_CACHE", "HF_HOME", "LLAMA_ARG_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LLAMASTEAD_REDIS_URL", "redis://127.0.0.1:1")
    return tmp_path


def run(folder: Path, preset: str, *words: str) -> int:
    """Run the command on a preset text and the folder's models."""
    (folder / "m.ini").write_text(preset)
    return main(
        ["check", "--models-preset", str(folder / "m.ini"), "--models-dir", str(folder / "models"), *words]
    )


def test_each_argument_is_shown_with_its_place(folder, capsys, monkeypatch):
    """Check a model with settings from five places, Redis being out of reach."""
    monkeypatch.setenv("LLAMA_ARG_THREADS", "2")
    preset = "[*]\nc = 512\nhost = 0.0.0.0\n[one]\nngl = 0\npin = on\nsamplers = a;b\nenv = A=geheim\n"
    assert run(folder, preset, "-b", "64", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    (model,) = shown["models"]
    words = {word["text"]: word["origin"].rpartition("/")[2] for word in model["arguments"]}
    expected = {
        "--ctx-size 512": "m.ini:2 in [*]",
        "--n-gpu-layers 0": "m.ini:5",
        "--batch-size 64": "command line",
        f"--model {folder}/models/one.gguf": "models folder",
        "LLAMA_ARG_THREADS=2": "environment",
        "--alias one": "Llamastead",
        "pin = true": "m.ini:6",
        "env = A": "m.ini:8",
    }
    assert expected.items() <= words.items()
    assert [(p["severity"], p["where"].rpartition("/")[2]) for p in shown["problems"]] == [
        ("note", "m.ini:7"),
        ("warning", "m.ini:3"),
    ]
    assert run(folder, preset) == 0
    out = capsys.readouterr().out
    assert "one  (preset)" in out
    assert "1 model, 0 errors, 2 remarks" in out
    assert "geheim" not in out


def test_what_somebody_wrote_comes_first(folder, capsys, monkeypatch):
    """Check a model for people: its own lines stand before those of every model, numbers as written."""
    monkeypatch.setenv("COLUMNS", "300")  # a long path of the folder would fold the lines
    assert run(folder, "[one]\nctx-size = 512\nunload-after = 300\n") == 0
    lines = capsys.readouterr().out.splitlines()
    places = ["Llamastead" if line.rstrip().endswith("Llamastead") else "own" for line in lines[2:]]
    own = places.index("Llamastead")
    assert {line.split(" /")[0].strip() for line in lines[2 : 2 + own]} >= {"unload-after = 300"}
    assert "own" not in places[own : places.index("own", own)]
    assert lines[2 + places.index("own", own)] == ""


def test_what_can_not_work_is_an_error(folder, capsys, monkeypatch):
    """Check unknown keys, bad values, a missing file, a bad variable and a bad command line: each fails."""
    assert run(folder, "[a]\nctx_size = 1\n[b]\nfrob = 1\n") == 1
    out = capsys.readouterr().out
    assert "m.ini:2: option 'ctx_size' not recognized" in out
    assert "m.ini:4: option 'frob' not recognized" in out
    assert run(folder, "[one]\nc = lots\n", "--json") == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["severity"] == "error"
    assert problem["message"] == "c = lots: expected a number"
    assert run(folder, "[x]\nmodel = /no/x.gguf\n") == 1
    assert "/no/x.gguf doesn't exist" in capsys.readouterr().out
    assert run(folder, "[one]\n", "-c", "lots") == 1
    assert "command line: --ctx-size lots: expected a number" in capsys.readouterr().out
    assert run(folder, "[one]\n", "--ctx-siz", "1") == 78
    monkeypatch.setenv("LLAMA_ARG_THREADS", "many")
    assert run(folder, "[one]\n") == 1
    assert "LLAMA_ARG_THREADS=many: expected a number" in capsys.readouterr().out


def test_what_the_engine_refuses_by_itself_is_an_error(folder, capsys, monkeypatch):
    """Check options whose values only the engine judges, of a preset for two models, of the command line and
    of a variable, and one that was removed: each is told where it stands, with the engine's own reason.
    """
    preset = "[*]\nprio = 9\n[one]\n[two]\nmodel = {0}/models/one.gguf\nprio = 1\noverride-tensor = x\n"
    assert run(folder, preset.format(folder), "--json") == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    told = {p["where"].rpartition("/")[2]: p["message"] for p in problems}
    assert told.keys() == {"m.ini:2 in [*]", "m.ini:7"}
    assert told["m.ini:2 in [*]"].endswith("refuses it: invalid value")
    assert run(folder, "[one]\n", "--draft", "5") == 1
    assert (
        "command line: llama-server refuses --draft: the argument has been removed" in capsys.readouterr().out
    )
    assert run(folder, "[one]\n", "--grammar-file", "/no/such", "--log-file", str(folder / "log")) == 1
    assert "refuses --grammar-file" in capsys.readouterr().out
    assert not (folder / "log").exists()
    monkeypatch.setenv("LLAMA_ARG_OVERRIDE_TENSOR", "x")
    assert run(folder, "[one]\n") == 1
    assert "environment: llama-server refuses LLAMA_ARG_OVERRIDE_TENSOR" in capsys.readouterr().out


def test_one_model_can_be_picked_out(folder, capsys):
    """Check one of two models by its alias, and one that isn't there."""
    two = f"[two]\nalias = zwei\nmodel = {folder}/models/one.gguf\nengine = /no/engine\n"
    preset = f"{two}[three]\nhidden = on\nhf = o/r\n"
    assert run(folder, preset, "--of", "three", "--json") == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert (model["name"], model["hidden"]) == ("three", True)
    assert run(folder, preset, "--of", "zwei") == 1
    assert "/no/engine" in capsys.readouterr().out
    assert run(folder, preset, "--of", "nobody") == 78


def test_one_model_is_not_blamed_for_another(folder, capsys):
    """Check a sound model beside one with a wrong value, one without its file and a remark on all: exit 0 and
    only what concerns it; of the others, and of all, exit 1.
    """
    sound = f"[sound]\nmodel = {folder}/models/one.gguf\n"
    preset = f"[*]\nalias = x\n{sound}[odd]\nhf = o/r\nctx-size = lots\n[lost]\nmodel = /no/such.gguf\n"
    assert run(folder, preset, "--of", "sound", "--json") == 0
    (remark,) = json.loads(capsys.readouterr().out)["problems"]
    assert "alias is ignored here" in remark["message"]
    for model, words in (("odd", "ctx-size = lots"), ("lost", "/no/such.gguf")):
        assert run(folder, preset, "--of", model) == 1
        assert words in capsys.readouterr().out
    assert run(folder, preset) == 1


def test_a_file_that_no_engine_reads_is_told(folder, capsys):
    """Put a text, an empty file and half a header into the folder: each is named, the sound one is not."""
    whole = (folder / "models" / "one.gguf").read_bytes()
    for name, content in (("text", b"no model at all, but long"), ("empty", b""), ("half", whole[:400])):
        (folder / "models" / f"{name}.gguf").write_bytes(content)
    assert run(folder, "", "--json") == 0
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [(p["severity"], p["where"]) for p in problems] == [
        ("warning", name) for name in ("empty", "half", "text")
    ]
    assert "isn't a GGUF file" in problems[2]["message"]


def test_where_no_model_was_found_is_told(folder, capsys):
    """Leave the folder empty: the places that were looked at are named, and the flags that name others."""
    (folder / "models" / "one.gguf").unlink()
    assert run(folder, "") == 0
    out = capsys.readouterr().out
    assert f"none found in {folder}/m.ini and {folder}/models and {folder}/hub; give --models-dir" in out
    assert "`llamastead ps` lists those of a running herd" in out
    assert out.endswith("0 models, 0 errors, 1 remark\n")
