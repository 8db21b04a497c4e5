"""The grammar of preset files."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamastead.supervisor.registry.ini import Setting, parse_ini, read_value
from llamastead.supervisor.registry.model import RegistryError, Severity


def pairs(text):
    """Return {section: {key: value}} and the problems of a text."""
    sections, problems = parse_ini(text, "m.ini")
    return {name: {s.key: s.value for s in section.settings} for name, section in sections.items()}, problems


def test_the_plain_form():
    """Parse sections, comments, blank lines and values with inner blanks."""
    text = "; head\n\n[*]\nc = 512\n\n[a b;#/:]  # words\n  \n\t; indented\nkey\t=\tx  y \nempty =\nc==1\n"
    assert pairs(text) == ({"*": {"c": "512"}, "a b;#/:": {"key": "x  y", "empty": "", "c": "=1"}}, [])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_all_line_ends_are_taken(end):
    """Parse one text with each kind of line end, without one after the last line."""
    assert pairs(end.join(["[a]", "x = 1", "", "y = 2"]))[0] == {"a": {"x": "1", "y": "2"}}


def test_only_line_ends_end_lines():
    """Parse values holding characters that Python takes for line ends."""
    assert pairs("[a]\nx = 1\f2\u2028y = 3\n")[0] == {"a": {"x": "1\f2\u2028y = 3"}}


def test_leading_blanks_of_a_name_are_dropped_and_trailing_ones_kept():
    """Parse a header with blanks inside."""
    assert list(pairs("[ a ]\n")[0]) == ["a "]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (" c = 1", "must begin at the start of its line"),
        ("\t[b]", "must begin at the start of its line"),
        ("c", "has no `=`"),
        ("[]", "not a section header"),
        ("[ ]", "not a section header"),
        ("[b", "not a section header"),
        ("[b] x", "not a section header"),
        ("[b]c]", "not a section header"),
        ("--ctx-size = 1", "without its dashes"),
        ("1c = 1", "begins with a letter"),
        ("= 1", "begins with a letter"),
    ],
)
def test_a_line_that_is_nothing_refuses_the_file(line, message):
    """Parse a file with one bad line and expect its place and what is wrong."""
    with pytest.raises(RegistryError, match=f"^m.ini:3: .*{message}"):
        parse_ini(f"[a]\nc = 1\n{line}\n", "m.ini")


def test_all_lines_that_are_nothing_are_told_of_at_once():
    """Parse a file with four bad lines between good ones: each has its line in the refusal."""
    with pytest.raises(RegistryError) as refused:
        parse_ini("[a]\n c = 1\nd = 2\n[b\ne\n\0\n[f]\n", "m.ini")
    assert [line.split(" ")[0] for line in str(refused.value).splitlines()] == [
        "m.ini:2:",
        "m.ini:4:",
        "m.ini:5:",
        "m.ini:6:",
    ]


def test_a_file_that_is_none_is_told_of_in_a_few_lines():
    """Parse two hundred lines of prose: twenty are told of, the others are counted."""
    with pytest.raises(RegistryError) as refused:
        parse_ini("prose\n" * 200, "m.ini")
    lines = str(refused.value).splitlines()
    assert (len(lines), lines[-1]) == (21, "m.ini: 180 more lines are no better")


def test_a_byte_order_mark_is_named():
    """Parse a file that begins with one."""
    with pytest.raises(RegistryError, match=r"m.ini:1: .*byte order mark"):
        parse_ini("\ufeff[a]\n", "m.ini")


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (" top_k;top_p;temperature", "top_k;top_p;temperature"),
        (" top_k;top_p;temperature ; comment", "top_k;top_p;temperature"),
        (" top_k;top_p;temperature # comment", "top_k;top_p;temperature"),
        (" /data/#1/x.gguf", "/data/#1/x.gguf"),
        (' {"colour": "#ff0000"}', '{"colour": "#ff0000"}'),
        (" x\t; y", "x"),
        (" ; all comment", ""),
        (" #", ""),
    ],
)
def test_c87_a_comment_begins_only_at_the_start_or_after_white_space(raw, value):
    """Read values with comment signs inside and behind them."""
    assert read_value(raw)[0] == value


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (' "/data/My Models/x.gguf"', "/data/My Models/x.gguf"),
        (" '/data/My Models/x.gguf'", "/data/My Models/x.gguf"),
        (" /data/My Models/x.gguf", "/data/My Models/x.gguf"),
        (' {"a": "b"}', '{"a": "b"}'),
        (' "stray', '"stray'),
        (' stray"', 'stray"'),
        (" 'a\"", "'a\""),
        (' "it\'s"', "it's"),
        (' "a "b" c"', 'a "b" c'),
        (' \'{"a": "b"}\'', '{"a": "b"}'),
        (' "{"a": "b"}"', '{"a": "b"}'),
        (' root ::= "x"', 'root ::= "x"'),
        (' "x" ::= "y"', '"x" ::= "y"'),
        (' ""', ""),
        (' "', '"'),
        (' "a ; b" ; c', "a ; b"),
        (' "a" # b "c"', "a"),
    ],
)
def test_c88_one_matching_pair_of_quotes_around_a_value_is_removed(raw, value):
    """Read quoted, half-quoted and inwardly quoted values."""
    assert read_value(raw)[0] == value


def test_c90_settings_before_the_first_header_are_for_all_models():
    """Parse a file with a version and options above a section, with and without `[*]`."""
    sections, problems = pairs("version = 1\nc = 1\nb = 2\n[*]\nb = 3\n[default]\nc = 4\n")
    assert sections == {"*": {"version": "1", "c": "1", "b": "3"}, "default": {"c": "4"}}
    assert [(p.severity, p.where) for p in problems] == [(Severity.NOTE, "m.ini:1")]
    assert pairs("c = 1\n")[0] == {"*": {"c": "1"}}
    assert pairs("version = 1\n[a]\n") == ({"a": {}}, [])


def test_a_repeated_section_replaces_the_first_and_is_reported():
    """Parse a file that has a section twice."""
    sections, problems = pairs("[a]\nc = 1\n[a]\nb = 2\n")
    assert sections == {"a": {"b": "2"}}
    assert [str(problem) for problem in problems] == [
        "m.ini:3: section [a] replaces the one on line 1, as in llama-server"
    ]


def test_readings_that_differ_from_llama_server_are_noted():
    """Parse values that llama-server cuts or keeps quoted, and one it reads alike."""
    _, problems = pairs('[a]\nx = a;b\ny = "c"\nz = d ; e\n')
    assert [problem.where for problem in problems] == ["m.ini:2", "m.ini:3"]


keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
texts = st.text(st.characters(blacklist_characters="\r\n\0", blacklist_categories=("Cs",)), max_size=20)
plain_values = texts.map(lambda text: text.strip(" \t")).filter(
    lambda text: not any(sign in text for sign in ";#\"'")
)
names = texts.filter(lambda text: "]" not in text).map(lambda text: text.lstrip(" \t")).filter(bool)


@given(st.dictionaries(names, st.dictionaries(keys, plain_values, max_size=4), max_size=4))
def test_what_is_written_plainly_is_read_back(content):
    """Write sections without comment signs and quotes and parse them."""
    lines = []
    for name, settings in content.items():
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in settings.items())]
    assert pairs("\n".join(lines)) == (content, [])


@given(plain_values, st.sampled_from("\"'"), st.sampled_from(["", " ; c", "\t# c"]))
def test_c88_quotes_protect_any_value(value, quote, comment):
    """Quote a value, put a comment behind, and read it."""
    assert read_value(f" {quote}{value} ;#{quote}{comment}")[0] == f"{value} ;#"


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused_with_its_line(text):
    """Parse arbitrary text; only RegistryError with a place may come."""
    refusal = ""
    sections = {}
    try:
        sections, _ = parse_ini(text, "m.ini")
    except RegistryError as error:
        refusal = str(error)
    assert refusal == "" or re.match(r"m\.ini:\d+: .", refusal)
    assert all(isinstance(s, Setting) for section in sections.values() for s in section.settings)


@given(st.text("ab \t;#\"'=", max_size=12))
def test_any_value_reads_to_a_part_of_itself(raw):
    """Read arbitrary values; nothing is invented and no outer blank is kept unless it was quoted."""
    value, _ = read_value(raw)
    assert value in raw
    assert value == value.strip(" \t") or any(f"{quote}{value}{quote}" in raw for quote in "\"'")
