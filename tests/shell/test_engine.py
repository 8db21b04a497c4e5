"""Finding the engine and telling why one can't be used, with scripts in its place."""

import os
from pathlib import Path

import pytest
from help_text import HELP
from waiting import until_blocking

from llamastead.shared.settings import Settings
from llamastead.supervisor import engine as engine_module
from llamastead.supervisor.configuration import Configuration
from llamastead.supervisor.engine import EngineError, find_engine
from llamastead.supervisor.selftest import self_test


def script(path: Path, load: str = "exit 1") -> Path:
    """Write a shell script that answers like llama-server and does `load` when it is to serve."""
    path.parent.mkdir(parents=True, exist_ok=True)
    help_file = path.with_suffix(".help")
    help_file.write_text(HELP)
    path.write_text(
        f"#!/bin/sh\necho start >>{path}.journal\ncase $1 in\n--help) cat {help_file};;\n"
        f"--version) echo 'version: 77 (abc)' >&2; echo 'built with sh' >&2;;\n*) {load};;\nesac\n"
    )
    path.chmod(0o755)
    return path


def starts(engine: Path) -> int:
    """Return how often a script was started so far."""
    return len(Path(f"{engine}.journal").read_text().splitlines())


READY = 'echo \'cmd_child_to_router:state:{"state":"ready","payload":{}}\'; read line'


def test_an_explicit_path_wins_and_is_asked(tmp_path):
    """Find a script by its path though another is on PATH."""
    engine = script(tmp_path / "mine")
    on_path = script(tmp_path / "bin" / "llama-server")
    found = find_engine(engine, {"PATH": f"{on_path.parent}:/bin"})
    assert (found.path, found.version) == (engine, "77 (abc)")
    assert "ctx-size" in found.options


def test_then_path_then_the_wheel(tmp_path):
    """Find the one on PATH, and without any the installed wheel's."""
    on_path = script(tmp_path / "bin" / "llama-server")
    assert find_engine(None, {"PATH": f"{on_path.parent}:/bin"}).path == on_path
    assert find_engine(None, {"PATH": str(tmp_path)}).path.parts[-2:] == ("bin", "llama-server")


def test_without_any_engine_it_says_what_to_do(tmp_path, monkeypatch):
    """Look with an empty PATH and no wheel installed."""
    monkeypatch.setattr("llamastead.supervisor.engine.ENGINE_WHEEL", "no_such_wheel")
    with pytest.raises(EngineError, match=r"none on PATH .* --engine PATH or install llamastead\[engine\]"):
        find_engine(None, {"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("#!/bin/sh\necho hello\n", "isn't llama-server"),
        (
            "#!/bin/sh\necho 'x: error while loading shared libraries: liby.so: no' >&2\nexit 127\n",
            "liby.so: no",
        ),
        ("#!/bin/sh\nkill -ILL $$\n", r"illegal instruction \(SIGILL\).*use another build with --engine"),
        ("#!/no/such/interpreter\n", "can't be run: No such file"),
    ],
)
def test_a_binary_that_is_no_engine_is_told_in_words(tmp_path, body, message):
    """Find binaries that answer wrongly, lack a library, die or don't run."""
    path = tmp_path / "e"
    path.write_text(body)
    path.chmod(0o755)
    with pytest.raises(EngineError, match=message):
        find_engine(path, os.environ)


def test_a_missing_or_forbidden_file_is_told(tmp_path):
    """Find paths that are nothing, and a file that is no program."""
    with pytest.raises(EngineError, match=f"there is no llama-server at {tmp_path}/no"):
        find_engine(tmp_path / "no")
    (tmp_path / "text").write_text("x")
    with pytest.raises(EngineError, match="can't be run: Permission denied"):
        find_engine(tmp_path / "text")


def test_its_own_variables_do_not_disturb_the_question(tmp_path):
    """Find a script that fails when a variable of llama-server is set."""
    path = script(tmp_path / "e")
    path.write_text(path.read_text().replace("case $1", "test -z $LLAMA_ARG_CTX_SIZE || exit 9\ncase $1"))
    assert find_engine(path, {**os.environ, "LLAMA_ARG_CTX_SIZE": "x"}).path == path


def test_an_engine_that_does_not_answer_is_asked_once_and_again_when_the_registry_is_read(
    tmp_path, monkeypatch
):
    """Name a silent engine in a preset: two looks cost one wait; once it answers, a reading finds it."""
    silent = tmp_path / "silent"
    silent.write_text(f"#!/bin/sh\necho start >>{silent}.journal\nexec sleep 60\n")
    silent.chmod(0o755)
    preset = tmp_path / "m.ini"
    preset.write_text(f"[m]\nmodel = /m.gguf\nengine = {silent}\n")
    herds = script(tmp_path / "mine")
    settings = Settings(run_dir=tmp_path / "run", models_preset=preset, engine=herds, ui=False)
    made = Configuration(settings, {"PATH": os.defpath})
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "ANSWER_SECONDS", 4.0)  # enough to begin
        for _ in range(2):
            with pytest.raises(EngineError, match="gave no answer"):
                made.engine_of(made.registry.entries["m"])
    assert starts(silent) == 1
    script(silent)
    made.ask_silent_engines()
    assert made.engine_of(made.registry.entries["m"]).path == silent


def test_a_script_that_does_not_answer_takes_what_it_started_along(tmp_path, monkeypatch):
    """Ask a script that waits for another program for ever: both are gone once it is given up."""
    path = tmp_path / "e"
    path.write_text(f"#!/bin/sh\nsleep 60 &\necho $! >{path}.pid\nwait\n")
    path.chmod(0o755)
    monkeypatch.setattr(engine_module, "ANSWER_SECONDS", 4.0)  # enough to begin
    with pytest.raises(EngineError, match="gave no answer"):
        find_engine(path)
    state = Path("/proc", Path(f"{path}.pid").read_text().strip(), "stat")
    until_blocking(lambda: not state.exists() or ") Z " in state.read_text(), "its child to end")


def test_an_illegal_instruction_at_load_is_said_at_start(tmp_path):
    """Test an engine that answers --help but dies of SIGILL when it loads tensors."""
    load = "echo 'load_tensors: AMX is not ready to be used!' >&2; kill -ILL $$"
    engine = find_engine(script(tmp_path / "e", load))
    with pytest.raises(EngineError, match=r"can't serve on this machine: illegal instruction \(SIGILL\)"):
        self_test(engine, tmp_path)


def test_any_other_failure_is_told_with_its_reason(tmp_path):
    """Test an engine that refuses an argument."""
    engine = find_engine(script(tmp_path / "e", "echo 'error: invalid argument: --x' >&2; exit 1"))
    with pytest.raises(EngineError, match=r"can't serve .*: invalid argument: --x \(exit code 1\)"):
        self_test(engine, tmp_path)


def test_an_engine_that_never_gets_ready_is_given_up(tmp_path, monkeypatch):
    """Test an engine that says nothing, with a short patience."""
    monkeypatch.setattr("llamastead.supervisor.selftest.LOAD_SECONDS", 0.2)
    monkeypatch.setattr("llamastead.supervisor.selftest.EXIT_SECONDS", 0.1)
    engine = find_engine(script(tmp_path / "e", "exec sleep 60"))
    with pytest.raises(EngineError, match="loads no model of a few kilobytes within 0 s"):
        self_test(engine, tmp_path)


def test_a_pass_is_remembered_as_long_as_engine_and_libraries_stay(tmp_path):
    """Test an engine twice, then after a library beside it changed; failures are not remembered."""
    engine = find_engine(script(tmp_path / "e", READY))
    library = tmp_path / "libggml-cpu.so"
    library.write_text("1")
    before = starts(engine.path)
    counts = []
    for change in ("1", "1", "22"):
        if library.read_text() != change:
            library.write_text(change)
        self_test(engine, tmp_path)
        counts.append(starts(engine.path) - before)
    assert counts == [1, 1, 2]
    (tmp_path / "engine-test.json").write_text("[]")
    self_test(engine, tmp_path)
    assert starts(engine.path) - before == 3
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == []


def test_the_real_engine_passes(tmp_path):
    """Test the installed engine for real."""
    engine = find_engine(None)
    self_test(engine, tmp_path, {**os.environ, "LLAMA_ARG_CTX_SIZE": "x"})
    assert (tmp_path / "engine-test.json").exists()
