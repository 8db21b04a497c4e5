"""The option table that is parsed from llama-server's --help."""

import pytest
from help_text import HELP, TABLE

from llamastead.supervisor.registry.options import Option, OptionError, parse_help


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("c", Option(("-c", "--ctx-size"), (), 1, "LLAMA_ARG_CTX_SIZE")),
        ("usage", Option(("-h", "--help", "--usage"))),
        ("temp", Option(("--temp", "--temperature"), (), 1, "LLAMA_ARG_TEMP")),
        ("no-host", Option(("--no-host",), (), 0, "LLAMA_ARG_NO_HOST")),
        ("nr", Option(("--repack",), ("-nr", "--no-repack"), 0, "LLAMA_ARG_REPACK")),
        ("kvo", Option(("-kvo", "--kv-offload"), ("-nkvo", "--no-kv-offload"), 0, "LLAMA_ARG_KV_OFFLOAD")),
        ("ui", Option(("--ui", "--webui"), ("--no-ui", "--no-webui"), 0, "LLAMA_ARG_UI")),
        (
            "no-mmproj",
            Option(("--mmproj-auto",), ("--no-mmproj", "--no-mmproj-auto"), 0, "LLAMA_ARG_MMPROJ_AUTO"),
        ),
        ("ot", Option(("-ot", "--override-tensor"), (), 1, "LLAMA_ARG_OVERRIDE_TENSOR")),
        ("control-vector-layer-range", Option(("--control-vector-layer-range",), (), 2)),
        ("LLAMA_ARG_NO_MMAP", Option(("--mmap",), ("--no-mmap",), 0, "LLAMA_ARG_MMAP")),
    ],
)
def test_each_form_of_the_help_text_is_understood(key, expected):
    """Look one option of each form up by some key and compare all its facts."""
    assert TABLE.of_key(key) == expected


def test_canonical_name_is_the_last_positive_one():
    """Compare the canonical names of options with several."""
    names = [TABLE.of_key(key).canonical for key in ("c", "ngl", "temp", "ui", "md")]
    assert names == ["ctx-size", "n-gpu-layers", "temperature", "webui", "model-draft"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ctx-size", "512", ["--ctx-size", "512"]),
        ("ctx-size", "", ["--ctx-size", ""]),
        ("mmap", "off", ["--no-mmap"]),
        ("mmap", "yes", ["--mmap"]),
        ("mmap", "", ["--mmap"]),
        ("mmproj-auto", "0", ["--no-mmproj-auto"]),
        ("metrics", "on", ["--metrics"]),
        ("metrics", "false", []),
    ],
)
def test_rendering_follows_llama_server(name, value, words):
    """Render options with plain, false, odd and empty values."""
    assert TABLE[name].render(value) == words


def test_order_is_by_the_bytes_of_the_first_name():
    """Order options given the other way round."""
    given = {
        "threads": "1",
        "n-gpu-layers": "2",
        "alias": "a",
        "temperature": "3",
        "host": "h",
        "mmproj": "m",
    }
    ordered = [option.canonical for option, _ in TABLE.ordered(given)]
    assert ordered == ["host", "temperature", "alias", "mmproj", "n-gpu-layers", "threads"]


def test_command_line_words_become_canonical_options():
    """Parse long, short, negated, repeated and underscored words."""
    words = ["-c", "1", "--ctx_size", "2", "--no-mmap", "-nkvo", "--metrics", "--chat-template", "x\ny"]
    assert TABLE.parse(words) == {
        "ctx-size": "2",
        "mmap": "0",
        "kv-offload": "0",
        "metrics": "1",
        "chat-template": "x\ny",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ctx-sizes", "1"], r"argument --ctx-sizes not recognized .*did you mean --ctx-size\?"),
        (["--ctx-size=1"], r"argument --ctx-size=1 not recognized: write .* two words, --ctx-size 1"),
        (["-c"], "argument -c lacks its value"),
        (["stray"], "argument stray not recognized"),
        (["--control-vector-layer-range", "1", "2"], "--control-vector-layer-range takes 2 values"),
    ],
)
def test_a_bad_argument_is_named(words, message):
    """Parse words that can't be taken and read the message."""
    with pytest.raises(OptionError, match=message):
        TABLE.parse(words)


def test_a_foreign_help_text_is_refused():
    """Parse the help text of something else."""
    with pytest.raises(OptionError, match="isn't llama-server"):
        parse_help("usage: something [-h]\n\n-h, --help   show this help\n")


def test_variables_lead_to_their_options():
    """Look up variables: plain, negated, one of another prefix, an unknown one."""
    names = ("LLAMA_ARG_MMAP", "LLAMA_ARG_NO_MMAP", "LLAMA_API_KEY", "LLAMA_ARG_NO_CTX_SIZE")
    found = [TABLE.of_variable(name) for name in names]
    assert [option and option.canonical for option in found] == ["mmap", "mmap", "api-key", None]


def test_every_line_of_the_excerpt_is_an_option_of_its_own():
    """Count the option lines of the text against the table."""
    lines = [line for line in HELP.splitlines() if line.startswith("-") and not line.startswith("-----")]
    assert len(TABLE.options) == len(lines)
