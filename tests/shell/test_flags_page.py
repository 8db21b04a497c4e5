"""docs/flags.md says of every flag of the engine what it means here."""

import importlib.util
from pathlib import Path
from types import ModuleType

from llamastead.supervisor.configuration import ignored_variables, unread_config
from llamastead.supervisor.engine import find_engine
from llamastead.supervisor.registry.options import Option, OptionTable, parse_help

ROOT = Path(__file__).parents[2]


def tool() -> ModuleType:
    """Load tools/flags_page.py, which is no package's."""
    spec = importlib.util.spec_from_file_location("flags_page", ROOT / "tools" / "flags_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tool_makes_of_the_engine() -> None:
    """Make the page anew and compare; every option has a row."""
    table = find_engine(None).options
    text = (ROOT / "docs" / "flags.md").read_text()
    assert text == tool().page(table), "run `python tools/flags_page.py > docs/flags.md`"
    newer = parse_help((ROOT / "tools" / "newer_flags.txt").read_text()).options
    options = (*table.options, *newer)
    assert all(f"`{name}`" in text for option in options for name in (*option.names, *option.negations))
    assert {"--mcp-servers-json", "--load-mode"} <= {name for option in newer for name in option.names}


def test_a_file_of_options_that_is_not_read_is_told(tmp_path: Path) -> None:
    """Have the user's own file of options, with engines that would and would not read it, and none."""
    home, elsewhere = tmp_path / "home", tmp_path / "config"
    older = find_engine(None).options
    reads = OptionTable((*older.options, Option(("--log-jsonl",))))
    for folder, environ in (
        (home / ".config", {"HOME": str(home)}),
        (elsewhere, {"HOME": str(home), "XDG_CONFIG_HOME": str(elsewhere)}),
    ):
        assert unread_config(environ, reads) == []
        file = folder / "llama.cpp" / "config.ini"
        file.parent.mkdir(parents=True)
        file.touch()
        (odd,) = unread_config(environ, reads)
        assert (str(odd.severity), odd.where) == ("warning", str(file))
        assert unread_config(environ, older) == []
    assert unread_config({}, reads) == []


def test_variables_that_reach_nobody_are_told() -> None:
    """Set variables of a setting, of all models, of one model, and a reserved one: the last two are told."""
    table = find_engine(None).options
    names = ("LLAMA_ARG_PORT", "LLAMA_ARG_CTX_SIZE", "LLAMA_ARG_MODEL", "LLAMA_ARG_TOOLS", "LLAMA_ARG_NO_UI")
    told = ignored_variables(dict.fromkeys(names, "1"), table)
    ignored = [problem.message.partition(" ")[0] for problem in told]
    assert ignored == ["LLAMA_ARG_MODEL", "LLAMA_ARG_TOOLS"]
