"""The model's name in request bodies: whole and piecewise, against the standard library's parser."""

import asyncio
import json
import math
import tracemalloc
import zlib
from email import message_from_bytes
from email.policy import HTTP
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from llamastead.gateway.body import MEMORY_BYTES, Body, ClientGone, read_body
from llamastead.gateway.formscan import BrokenForm, FormScan
from llamastead.gateway.jsonscan import (
    MAX_DEPTH,
    BrokenJson,
    JsonScan,
    ModelField,
    NotAString,
    model_of_json,
)
from llamastead.shared.errors import ApiError

Verdict = tuple[str, Any]


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut `data` at the given places, taken modulo its length."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


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
cuts = st.lists(st.integers(0, 10_000), max_size=12)
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
    for cuts in (list(range(len(data))), *([cut] for cut in range(len(data)))):
        assert verdict(partial(scanned, pieces_of(data, cuts))) == whole


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


BOUNDARY = "----7MA4YWxk"


def form(*parts: tuple[str, bytes]) -> bytes:
    """Build a form of (head, content) parts."""
    body = b"".join(f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + content + b"\r\n" for head, content in parts)
    return body + f"--{BOUNDARY}--\r\n".encode()


def form_model(pieces: list[bytes], content_type: bytes | None = None) -> str | None:
    scan = FormScan(content_type or f"multipart/form-data; boundary={BOUNDARY}".encode())
    for piece in pieces:
        scan.feed(piece)
    return scan.finish()


MODEL = 'Content-Disposition: form-data; name="model"'
FILE = 'content-disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav'


@given(
    st.permutations(
        [(MODEL, b"whisper"), (FILE, b"\r\n--" + BOUNDARY[:-1].encode() + b"\r\n\x00" * 9), (FILE, b"")]
    ),
    cuts,
)
def test_c141_a_forms_model_is_found_anywhere(parts: list[tuple[str, bytes]], cuts: list[int]) -> None:
    """The field before, between and after files that look like boundaries, cut anywhere."""
    assert form_model(pieces_of(form(*parts), cuts)) == "whisper"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (form((MODEL, b"a"), (MODEL, b"b")), "b"),
        (form((FILE, b"x")), None),
        (form(('Content-Disposition: form-data; filename="x"; name="model"', b"file")), None),
        (form(("Content-Disposition: form-data; name=model", b"bare")), "bare"),
        (form(("X: y\r\n" + MODEL + "\r\nZ: z", "ü".encode())), "ü"),
        (b"preamble\r\n" + form((MODEL, b"a")) + b"epilogue", "a"),
        (form(), None),
    ],
)
def test_a_forms_fields(body: bytes, found: str | None) -> None:
    """Fields in all their spellings: the last `model` that is no file counts."""
    assert form_model([body]) == found
    assert form_model(pieces_of(body, list(range(len(body))))) == found


@pytest.mark.parametrize(
    ("body", "content_type", "problem"),
    [
        (form((MODEL, b"a"))[:-6], None, "without its closing boundary"),
        (form((MODEL, b"\xff")), None, "UTF-8"),
        (form((MODEL, b"a" * 20_000)), None, "longer than"),
        (form((MODEL + "\r\nX: " + "y" * 20_000, b"a")), None, "head is longer than"),
        (form((MODEL, b"a")).replace(b"\r\n", b" " * 400 + b"\r\n", 1), None, "must end its line"),
        (f"--{BOUNDARY}junk\r\n".encode() + b"x" * 99, None, "must end its line"),
        (f"--{BOUNDARY}\r\nA: ".encode() + b"x" * 20_000, None, "head is longer"),
        (b"", b"multipart/form-data", "without a boundary"),
    ],
)
def test_a_broken_form_is_refused(body: bytes, content_type: bytes | None, problem: str) -> None:
    """A form that ends early, or isn't one: refused with what is wrong, in whatever pieces it comes."""
    for pieces in ([body], pieces_of(body, list(range(0, len(body), 97)))):
        with pytest.raises(BrokenForm, match=problem):
            form_model(pieces, content_type)


def form_verdict(pieces: list[bytes], boundary: str = BOUNDARY) -> Verdict:
    """Scan a form and note what came: a name or none, or a refusal with its reason, but for the place."""
    try:
        return ("model", form_model(pieces, f'multipart/form-data; boundary="{boundary}"'.encode()))
    except BrokenForm as broken:
        return ("broken", str(broken).partition(": ")[2])


def by_mail_parser(body: bytes, boundary: str) -> Verdict:
    """What the standard library makes of a form, read as the mail whose shape it has."""
    head = f'Content-Type: multipart/form-data; boundary="{boundary}"\r\n\r\n'.encode()
    found = None
    for part in message_from_bytes(head + body, policy=HTTP).iter_parts():
        if part.get_param("name", header="content-disposition") == "model" and part.get_filename() is None:
            found = part.get_payload(decode=True).decode()
    return ("model", found)


boundaries = st.from_regex(r"[0-9A-Za-z'()+_,./:=?-]{1,60}", fullmatch=True)
form_names = st.sampled_from(["model", "Model", "models", "file", "prompt", "x model", "modèle"])
form_files = st.sampled_from([None, None, "a.wav", "model", "ünï.wav", ""])
form_heads = st.sampled_from(["", "Content-Type: text/plain\r\n", "X-A: name=model\r\n"])
contents = st.one_of(st.text(max_size=20).map(str.encode), st.sampled_from([b"", b"m", b"--", b"-", b"\r\n"]))


@given(boundaries, st.lists(st.tuples(form_names, form_files, form_heads, contents), max_size=5), cuts)
def test_a_generated_form_is_what_a_full_parser_makes_of_it(
    boundary: str, fields: list[tuple[str, str | None, str, bytes]], cuts: list[int]
) -> None:
    """Fields and files with odd names and boundaries, cut anywhere: the standard library finds the same."""
    delimiter = f"--{boundary}".encode()
    assume(not any(delimiter in content for *_, content in fields))
    body = b""
    for name, file, head, content in fields:
        named = f'Content-Disposition: form-data; name="{name}"'
        named += "" if file is None else f'; filename="{file}"'
        body += b"%b\r\n%b\r\n\r\n%b\r\n" % (delimiter, (head + named).encode(), content)
    body += delimiter + b"--\r\n"
    expected = by_mail_parser(body, boundary)
    assert form_verdict([body], boundary) == expected
    assert form_verdict(pieces_of(body, cuts), boundary) == expected


shreds = st.sampled_from(
    [
        *(b"--b", b"\r\n", b"--b--", b"\r\n--b\r\n", MODEL.encode(), FILE.encode(), b"\r\n\r\n", b"\n"),
        *(b"m", b" ", b"\t", b'; filename="x"', b"\xff", b"-", b"--", b"X: y", b"b", b"x" * 300),
    ]
)


@given(st.lists(shreds, max_size=14).map(b"".join), cuts)
def test_a_damaged_form_gets_one_verdict(data: bytes, cuts: list[int]) -> None:
    """Shreds of forms in any order and any pieces: one verdict, and never another error."""
    whole = form_verdict([data], "b")
    assert form_verdict(pieces_of(data, cuts), "b") == whole
    assert form_verdict(pieces_of(data, list(range(len(data)))), "b") == whole


FORMS = sorted((Path(__file__).parent.parent / "corpus" / "forms").iterdir())
"""Forms with the boundary `b`, kept for ever. A name begins with the model that must be found, `none`, or
`broken`."""


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_the_kept_forms_get_their_verdict_in_any_pieces(path: Path) -> None:
    """Each whole, byte by byte, and cut in two everywhere: the verdict that its name says."""
    data = path.read_bytes()
    whole = form_verdict([data], "b")
    said = path.name.partition("-")[0]
    assert whole[0] == "broken" if said == "broken" else whole == ("model", None if said == "none" else said)
    for cuts in (list(range(len(data))), *([cut] for cut in range(len(data)))):
        assert form_verdict(pieces_of(data, cuts), "b") == whole


async def read(
    pieces: list[bytes],
    *headers: tuple[bytes, bytes],
    limit: int = 10_000_000,
    search: bool = True,
    gone: bool = False,
) -> Body:
    """Read a body from a `receive` that gives these pieces; `gone`: the client leaves before the last."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if gone:
        messages[-1] = {"type": "http.disconnect"}
    else:
        messages[-1]["more_body"] = False
    queue = iter(messages)

    async def receive() -> Any:
        return next(queue)

    return await read_body(receive, headers, limit, search=search)


async def never() -> Any:
    """A `receive` that nobody may call."""
    raise AssertionError("nothing may be read")


async def again(body: Body) -> bytes:
    """Read the whole body back."""
    if body.in_memory:
        return body.data
    parts: list[bytes] = []
    while (size := sum(map(len, parts))) < body.size:
        parts.append(await body.read_at(size))
    return b"".join(parts)


@pytest.mark.parametrize("size", [0, 10, MEMORY_BYTES, MEMORY_BYTES + 1, 3 * MEMORY_BYTES])
async def test_a_body_can_be_read_again_exactly(size: int) -> None:
    """Bodies around the memory limit, in pieces: held in memory or in a file, given back exactly, twice."""
    data = b'{"model":"m","x":"' + b"y" * size + b'"}' if size else b""
    count = math.ceil(len(data) / 65_536) or 1
    body = await read([data[k * 65_536 : (k + 1) * 65_536] for k in range(count)])
    assert body.model == ("m" if size else None)
    assert body.in_memory == (len(data) <= MEMORY_BYTES)
    assert [await again(body), await again(body)] == [data, data]
    body.close()


async def test_c144_a_body_at_the_limit_passes_and_one_byte_more_is_413() -> None:
    """Sizes at the limit and above, announced or not: 413 only above, an announced one unread."""
    data = b'{"model":"m"}'
    for pieces in ([data], [data[:5], data[5:]]):
        body = await read(pieces, limit=len(data))
        assert body.model == "m"
        with pytest.raises(ApiError) as refused:
            await read(pieces, limit=len(data) - 1)
        assert refused.value.status == 413
    with pytest.raises(ApiError) as refused:
        await read_body(never, [(b"content-length", b"14")], 13, search=True)
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"content-length", b"2"), (b"transfer-encoding", b"chunked")], 400),
        ([(b"content-length", b"-2")], 400),
        ([(b"content-encoding", b"br")], 415),
        ([(b"content-encoding", b"zstd")], 415),
        ([(b"content-encoding", b"gzip, gzip")], 415),
        ([(b"content-type", b"multipart/form-data")], 400),
    ],
)
async def test_c142_a_body_with_two_lengths_or_an_unknown_form_is_refused(
    headers: list[tuple[bytes, bytes]], status: int
) -> None:
    """Heads that can't be right: refused before anything is counted."""
    with pytest.raises(ApiError) as refused:
        await read([b"{}"], *headers)
    assert refused.value.status == status


GZIP, DEFLATE = zlib.MAX_WBITS | 16, zlib.MAX_WBITS


def packed(data: bytes, bits: int = GZIP) -> bytes:
    """Compress, as gzip unless told otherwise."""
    packer = zlib.compressobj(9, wbits=bits)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize(("coding", "bits"), [(b"gzip", GZIP), (b"X-GZip ", GZIP), (b"deflate", DEFLATE)])
async def test_c145_a_compressed_body_is_kept_decoded(coding: bytes, bits: int, step: int) -> None:
    """Each known coding, cut anywhere, small and spooled: decoded exactly, the model found on the way."""
    for size in (10, 3 * MEMORY_BYTES):
        data = b'{"x":"' + b"y" * size + b'","model":"m"}'
        raw = packed(data, bits)
        pieces = [raw[at : at + step] for at in range(0, len(raw), step)]
        body = await read(pieces, (b"content-encoding", coding))
        assert body.model == "m"
        assert await again(body) == data
        body.close()


async def test_c145_joined_members_and_an_empty_body_are_whole() -> None:
    """Two gzip members end to end are one body; a coding announced for no body at all hurts nobody."""
    joined = await read([packed(b'{"model":') + packed(b'"m"}')], (b"content-encoding", b"gzip"))
    assert (joined.model, joined.data) == ("m", b'{"model":"m"}')
    assert (await read([b""], (b"content-encoding", b"gzip"))).size == 0


@pytest.mark.parametrize("data", [packed(b'{"model":"m"}')[:-3], b"not gzip", packed(b"{}") + b"tail"])
async def test_c145_what_is_not_the_coding_it_names_is_400(data: bytes) -> None:
    """Cut short, plain text, and something behind the end: 400 that names the coding."""
    with pytest.raises(ApiError, match="not valid gzip") as refused:
        await read([data], (b"content-encoding", b"gzip"))
    assert refused.value.status == 400


async def test_c145_a_bomb_is_413_and_costs_no_memory() -> None:
    """Two MiB that decode to 2 GiB, in one piece, limit 50 MB: 413, with a few MiB of memory at most."""
    bomb = packed(b"[" + b" " * (1 << 20)) + packed(b" " * (1 << 20)) * 2047
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refused:
            await read([bomb], (b"content-encoding", b"gzip"), limit=50_000_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.status == 413
    assert peak < 16 << 20


async def test_broken_json_in_a_large_body_is_400_with_its_place() -> None:
    """A spooled body that breaks off at its end: 400 that says where."""
    with pytest.raises(ApiError, match="line 1, column") as refused:
        await read([b'{"model":"m","x":"', b"y" * 2 * MEMORY_BYTES, b'"'])
    assert refused.value.status == 400


async def test_a_client_that_leaves_during_its_upload_is_gone() -> None:
    """The disconnect comes before the body's end: ClientGone, whether the body is still in memory or not."""
    for size in (10, 2 * MEMORY_BYTES):
        with pytest.raises(ClientGone):
            await read([b'["' + b"y" * size, b""], gone=True)


async def test_cancelled_while_it_writes_the_file_closes_after_the_write() -> None:
    """Cancel in the middle of a spill: the read ends at once; a file left open would fail the test run."""
    started = asyncio.Event()

    async def receive() -> Any:
        started.set()
        return {"type": "http.request", "body": b" " * (MEMORY_BYTES + 1), "more_body": True}

    task = asyncio.create_task(read_body(receive, [], 1 << 30, search=False))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
