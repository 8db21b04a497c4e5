"""The model's name in forms: whole and piecewise, against the standard library's mail parser."""

from email import message_from_bytes
from email.policy import HTTP
from pathlib import Path

import pytest
from body_pieces import Verdict, cuts, pieces_of
from hypothesis import assume, given
from hypothesis import strategies as st

from llamastead.gateway.formscan import BrokenForm, FormScan

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
    for places in (list(range(len(data))), *([cut] for cut in range(len(data)))):
        assert form_verdict(pieces_of(data, places), "b") == whole
