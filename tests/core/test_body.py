"""The model's name in JSON bodies: whole and piecewise, against the standard library's parser."""

import json
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from body_pieces import Verdict, cuts, pieces_of
from hypothesis import example, given
from hypothesis import strategies as st

from llamastead.gateway.jsonscan import (
    MAX_DEPTH,
    BrokenJson,
    JsonScan,
    ModelField,
    NotAString,
    model_of_json,
)


def scanned(pieces: list[bytes]) -> ModelField:
    scan = JsonScan()
    for piece in pieces:
        scan.feed(piece)
    return scan.finish()


def verdict(found: Any) -> Verdict:
    """Call and note what came: a name, something else, nothing, or a refusal."""
    try:
        field = found()
    except BrokenJson:
        return ("broken", None)
    if isinstance(field, NotAString):
        return ("not a string", field.shown)
    return ("model", field)


def by_full_parser(data: bytes) -> Verdict:
    """What the standard library's parser says, made as strict as RFC 8259 in constants."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        document = json.loads(data.removeprefix(b"\xef\xbb\xbf").decode(), parse_constant=refuse)
    except ValueError:
        return ("broken", None)
    value = document.get("model") if isinstance(document, dict) else None
    if value is None or isinstance(value, str):
        return ("model", value)
    return ("not a string", None)


keys = st.sampled_from(["model", "mod\\u0065l", "Model", "model ", "", "messages", "a", "\\ud83d\\ude00"])
strings = st.one_of(
    st.sampled_from(
        ["x", "", "gemma", "a/b:Q4_K_M", "ünï", "😀", '\\"', "\\\\", "\\n", "\\u00e9", "\\/", "model"]
    ),
    st.text(
        st.characters(blacklist_categories=("Cs",), blacklist_characters='"\\', min_codepoint=32), max_size=8
    ),
).map(lambda text: f'"{text}"')
scalars = st.one_of(
    strings,
    st.sampled_from(["0", "-0", "1.5e+300", "-12.25", "1E5", "true", "false", "null", "1" * 100, "3e-7"]),
    st.integers().map(str),
)
spaces = st.sampled_from(["", "", "", " ", "\n", "\r\n\t ", "  " * 40])


def spaced(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(spaces, values, spaces).map("".join)


def arrays(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(spaced(values), max_size=6).map(lambda items: f"[{','.join(items)}]")


def objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    member = st.tuples(spaces, keys, spaces, spaced(values)).map(lambda m: f'{m[0]}"{m[1]}"{m[2]}:{m[3]}')
    return st.lists(member, max_size=6).map(lambda members: f"{{{','.join(members)}}}")


values = st.recursive(scalars, lambda inner: st.one_of(arrays(inner), objects(inner)), max_leaves=30)
documents = st.one_of(objects(values), objects(values), values).map(str.encode)
# What breaks a text: characters put in, cut out or swapped.
noise = st.one_of(
    st.sampled_from(b',}]{["\\:-.e0\x00\n\xff\xc3').map(lambda byte: bytes([byte])),
    st.sampled_from([b"", b"nul", b"tru", b"NaN", b"Infinity", b"\\u12", b"+1", b"01", b"'", b"//"]),
    st.sampled_from([b"\xed\xa0\x80", b"\xef\xbb\xbf"]),
)


@given(documents, cuts)
@example(b'{"model":"a","model":"b"}', [])
@example(b'{"model":"a","model":5}', [12])
@example(b'{"model":5,"model":null}', [])
@example(b'{"x":{"model":"inner"},"y":["model",{"model":"z"}]}', [5, 6])
@example(b'\xef\xbb\xbf{"model":"bom"}', [1, 2])
@example(b'{"n":' + b"1" * 300 + b',"model":"m"}', list(range(0, 300, 7)))
@example(b'{"model":' + b"1" * 100 + b"}", [85])
@example(b"5", [])
@example(b" ", [])
def test_a_valid_body_gives_the_full_parsers_model_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    """Generated JSON, cut anywhere: scan, whole-body reader and the standard parser agree on the model."""
    expected = by_full_parser(data)
    whole = verdict(lambda: model_of_json(data))
    assert whole == verdict(lambda: scanned(pieces_of(data, cuts)))
    assert whole[0] == expected[0]
    if whole[0] == "model":
        assert whole == expected


@given(documents, noise, st.integers(0, 10_000), st.integers(0, 3), cuts)
@example(b'{"model":"a"}', b"", 12, 1, [])
@example(b'{"a":"' + b"\xc3\xbc" + b'"}', b"", 7, 1, [6])
@example(b'{"a":01}', b"", 0, 0, [])
@example(b"[1,]", b"", 0, 0, [2])
@example(b'{"a":1.}', b"", 0, 0, [7])
@example(b'["\\ud800"]', b"", 0, 0, [])
def test_a_damaged_body_gets_the_full_parsers_verdict(
    data: bytes, junk: bytes, place: int, cut_out: int, cuts: list[int]
) -> None:
    """Valid JSON with bytes put in or taken out: all three refuse it or all agree on the model."""
    at = place % (len(data) + 1)
    damaged = data[:at] + junk + data[at + cut_out :]
    expected = by_full_parser(damaged)
    whole = verdict(lambda: model_of_json(damaged))
    assert whole == verdict(lambda: scanned(pieces_of(damaged, cuts)))
    assert whole[0] == expected[0]
    if whole[0] == "model":
        assert whole == expected


@given(st.binary(max_size=40), cuts)
def test_any_bytes_get_the_full_parsers_verdict(data: bytes, cuts: list[int]) -> None:
    """Random bytes: scan, whole-body reader and the standard parser give the same verdict."""
    assert verdict(lambda: scanned(pieces_of(data, cuts)))[0] == by_full_parser(data)[0]
    assert verdict(lambda: model_of_json(data))[0] == by_full_parser(data)[0]


CORPUS = sorted((Path(__file__).parent.parent / "corpus" / "bodies").iterdir())
"""Bodies that a scanner got wrong once, or might: a file each, kept for ever. Broken ones are called so."""


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_the_kept_bodies_get_the_full_parsers_verdict_in_any_pieces(path: Path) -> None:
    """Each whole, byte by byte, and cut in two everywhere: one verdict, that of the standard parser."""
    data = path.read_bytes()
    whole = verdict(lambda: model_of_json(data))
    expected = by_full_parser(data)
    assert (whole[0] == "broken") == path.name.startswith("broken-")
    assert whole[0] == expected[0]
    assert whole == expected or whole[0] == "not a string"
    for places in (list(range(len(data))), *([cut] for cut in range(len(data)))):
        assert verdict(partial(scanned, pieces_of(data, places))) == whole


@pytest.mark.parametrize("pieces", [1, 7])
def test_nesting_beyond_any_recursion_is_scanned(pieces: int) -> None:
    """As many brackets as may be around the model's neighbour: found, where a recursive parser gives up."""
    depth = MAX_DEPTH - 1
    data = b'{"a":' + b"[" * depth + b"]" * depth + b',"model":"deep"}'
    assert model_of_json(data) == "deep"
    assert scanned(pieces_of(data, [len(data) * k // pieces for k in range(pieces)])) == "deep"


@pytest.mark.parametrize("pieces", [1, 7])
def test_nesting_that_would_end_an_engine_is_refused(pieces: int) -> None:
    """One bracket more than may be: refused with its place, whole and in pieces."""
    data = b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b',"model":"deep"}'
    told = f"column {5 + MAX_DEPTH}: nested deeper than {MAX_DEPTH}"
    with pytest.raises(BrokenJson, match=told):
        model_of_json(data)
    with pytest.raises(BrokenJson, match=told):
        scanned(pieces_of(data, [len(data) * k // pieces for k in range(pieces)]))


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b'{"model": "a",\n "x": tru}', "line 2, column 7"),
        (b'{"model": "a",\n "x": 1,}', "line 2, column 9"),
        (b'{"model" "a"}', "line 1, column 10"),
        (b'\n\n["a\tb"]', "line 3, column 4"),
        (b'{"a": "\xff"}', "line 1, column 8"),
        (b'{"a": 1', "line 1, column 8"),
    ],
)
def test_c144_broken_json_names_its_place(data: bytes, where: str) -> None:
    """Broken in one place: the message of the scan says line and column, cut in two anywhere or not."""
    for cut in range(len(data)):
        with pytest.raises(BrokenJson, match=where):
            scanned([data[:cut], data[cut:]])
    with pytest.raises(BrokenJson, match=where.split(",")[0]):
        model_of_json(data)


def test_numbers_of_any_length_cost_no_memory() -> None:
    """A million digits in small pieces: the scan keeps the number's shape only, and still sees its end."""
    scan = JsonScan()
    scan.feed(b'{"model":"m","n":-')
    for _ in range(1000):
        scan.feed(b"1" * 1000)
        assert len(scan._rest) < 100
    scan.feed(b".5e+7}")
    assert scan.finish() == "m"


@pytest.mark.parametrize("item", [b"1,", b'"x",', b'{"a":[1,2]},'])
def test_a_long_array_costs_no_memory(item: bytes) -> None:
    """A quarter of a MiB of small items in one piece, as a prompt of tokens is: no more than a few MiB."""
    scan = JsonScan()
    scan.feed(b'{"model":"m","prompt":[')
    piece = item * (256 * 1024 // len(item))
    tracemalloc.start()
    try:
        scan.feed(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20
    scan.feed(b"0]}")
    assert scan.finish() == "m"
