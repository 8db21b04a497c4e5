"""Finds the top-level `model` of a JSON body piece by piece, with the verdict a full parser would give.

A body that arrived in one piece goes through the C parser of the standard library; a larger one is scanned
as it arrives, in bounded memory, without building the tree. Both take and refuse the same texts (RFC 8259,
UTF-8, an optional byte order mark) and both let the last of repeated keys win, as llama-server does.
"""

import codecs
import json
import re
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class NotAString:
    """A `model` that is there but isn't a string; `shown` is how an error message shows it."""

    shown: str


ModelField = str | NotAString | None
"""What a body says about its model: a name, something else, or nothing (`null` says nothing)."""


class BrokenJson(ValueError):  # noqa: N818
    """The text isn't JSON; line and column count from 1, columns in characters."""

    def __init__(self, line: int, column: int, problem: str) -> None:
        super().__init__(f"line {line}, column {column}: {problem}")


class _Number(str):
    __slots__ = ()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_whole = json.JSONDecoder(parse_int=_Number, parse_float=_Number, parse_constant=_no_constant)
_BOM = "\ufeff"
MAX_DEPTH = 10_000
"""Brackets open at once. llama-server recurses into values: many more would end it for all its clients."""
_MAX_SHOWN = 64


def model_of_json(data: bytes) -> ModelField:
    """Return what a whole JSON body says about its model. Raises BrokenJson."""
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        return _scanned(data)
    try:
        document = _whole.decode(data.decode().removeprefix(_BOM))
    except json.JSONDecodeError as error:
        raise BrokenJson(error.lineno, error.colno, error.msg) from None
    except (ValueError, RecursionError):
        # Not UTF-8, a constant that JSON doesn't know, or nested too deep for a recursive parser.
        return _scanned(data)
    if type(document) is not dict:
        return None
    value = document.get("model")
    if type(value) is str or value is None:
        return value
    if isinstance(value, dict | list):
        return NotAString("an object" if isinstance(value, dict) else "an array")
    return NotAString(json.dumps(value) if isinstance(value, bool) else value[:_MAX_SHOWN])


def _scanned(data: bytes) -> ModelField:
    scan = JsonScan()
    scan.feed(data)
    return scan.finish()


# What may stand next.
(_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA_OR_END, _NOTHING) = range(7)
_WANTED = (
    "a value",
    "a value or ']'",
    "a key in double quotes",
    "a key in double quotes or '}'",
    "':'",
    "',' or the closing bracket",
    "the end of the body",
)

_S = r"[ \t\n\r]*"
_TEXT = r'[^"\\\x00-\x1f]*'
_ESCAPE = r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
_DIGITS = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
_SPACE = re.compile(_S)
_CHARS = re.compile(rf"{_TEXT}(?:{_ESCAPE}{_TEXT})*")
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_NUMBER = re.compile(_DIGITS)
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]+")
_LONG_DIGITS = re.compile(r"(?<=[0-9])[0-9]+(?=[0-9])")
_LITERALS = {"t": "true", "f": "false", "n": "null"}


def _runs(depth: int) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of runs of whole items and of whole members, each with its comma, nested up to `depth`.

    They are the bulk of a large body, and one match passes them without a step per token. Nothing in them is
    ambiguous, so a failing match costs no more than a second reading.
    """
    string = rf'"(?>{_TEXT}(?:{_ESCAPE}{_TEXT})*)"'
    plain = rf"{string}|{_DIGITS}|true|false|null"
    value = f"(?:{plain})"
    for _ in range(depth):
        member = rf"{_S}{string}{_S}:{_S}{value}{_S}"
        item = rf"{_S}{value}{_S}"
        value = rf"(?:{plain}|\[(?:{item}(?:,{item})*|{_S})\]|\{{(?:{member}(?:,{member})*|{_S})\}})"
    return re.compile(rf"(?:{_S}{value}{_S},)+"), re.compile(rf"(?:{_S}{string}{_S}:{_S}{value}{_S},)+")


_ITEMS, _MEMBERS = _runs(4)
_RUN_CHARS = 8192
"""The longest run passed at once: `re` keeps a few hundred bytes for each item until it has matched."""


class JsonScan:
    """One body's scan for the top-level member `key`: `feed` every piece in order, then `finish`."""

    def __init__(self, key: str = "model") -> None:
        self._key = key
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._started = False
        self._expect = _VALUE
        self._stack = bytearray()
        # Inside a string; keys of the top level and the member's value are captured, raw.
        self._in_string = False
        self._string_is_key = False
        self._captured: list[str] | None = None
        self._at_key = False
        self._found: ModelField = None
        # What the next piece has to be read together with: a cut escape, number or literal.
        self._rest = ""
        # Where the text now looked at begins, in lines and characters before it.
        self._line = 1
        self._column = 0

    def feed(self, data: bytes) -> None:
        """Scan the next piece. Raises BrokenJson at the first character no JSON text can have there."""
        try:
            text = self._decoder.decode(data)
        except UnicodeDecodeError as error:
            self._scan(self._rest + error.object[: error.start].decode(), final=False)
            self._fail(self._rest, len(self._rest), "not UTF-8")
        if not self._started and text:
            self._started = True
            text = text.removeprefix(_BOM)
        self._scan(self._rest + text, final=False)

    def finish(self) -> ModelField:
        """Return what the body says about its member. Raises BrokenJson when the text ends too early."""
        if self._decoder.getstate()[0]:
            self._fail(self._rest, len(self._rest), "not UTF-8")
        self._scan(self._rest, final=True)
        if self._in_string:
            self._fail("", 0, "the body ends inside a string")
        if self._expect != _NOTHING:
            self._fail("", 0, f"the body ends where {_WANTED[self._expect]} should stand")
        return self._found

    def _scan(self, text: str, *, final: bool) -> None:
        at, end = 0, len(text)
        while True:
            if self._in_string:
                at = self._pass_string(text, at, final=final)
                if self._in_string:
                    break
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at == end:
                break
            char = text[at]
            if char == '"':
                self._open_string(text, at)
                at += 1
            elif char in "{}[],:":
                self._punctuate(text, at, char)
                at = self._pass_run(text, at + 1)
            else:
                after = self._pass_scalar(text, at, final=final)
                if after == at:
                    break
                at = after
        self._keep(text, at)

    def _keep(self, text: str, at: int) -> None:
        lines = text.count("\n", 0, at)
        self._line += lines
        self._column = at - text.rfind("\n", 0, at) - 1 if lines else self._column + at
        rest = text[at:]
        if len(rest) > _MAX_SHOWN and not self._in_string:
            # Of a number's digits behind those only the fact that there are more of them matters further on.
            self._column += len(rest)
            rest = rest[:_MAX_SHOWN] + _LONG_DIGITS.sub("", rest[_MAX_SHOWN:])
            self._column -= len(rest)
        self._rest = rest

    def _open_string(self, text: str, at: int) -> None:
        self._in_string = True
        self._string_is_key = self._expect in (_KEY, _KEY_OR_END)
        if self._string_is_key:
            self._captured = [] if len(self._stack) == 1 else None
        elif self._expect in (_VALUE, _VALUE_OR_END):
            self._captured = [] if self._at_key else None
        else:
            self._fail(text, at, f"a string where {_WANTED[self._expect]} should stand")

    def _pass_string(self, text: str, at: int, *, final: bool) -> int:
        stop = _CHARS.match(text, at).end()  # type: ignore[union-attr]
        if self._captured is not None:
            self._captured.append(text[at:stop])
        if stop == len(text):
            return stop
        if text[stop] == '"':
            self._close_string()
            return stop + 1
        if text[stop] == "\\":
            if not final and _CUT_ESCAPE.fullmatch(text, stop):
                return stop
            self._fail(text, stop, "an escape JSON doesn't know")
        return self._fail(text, stop, "a control character inside a string")

    def _close_string(self) -> None:
        self._in_string = False
        if self._captured is None:
            if self._string_is_key:
                self._expect = _COLON
            else:
                self._end_value()
            return
        raw = "".join(self._captured)
        content: str = json.loads(f'"{raw}"') if "\\" in raw else raw
        if self._string_is_key:
            self._at_key = content == self._key
            self._expect = _COLON
        else:
            self._found = content
            self._end_value()

    def _pass_scalar(self, text: str, at: int, *, final: bool) -> int:
        """Return where the number or literal at `at` ends, or `at` when the piece may have cut it."""
        if self._expect not in (_VALUE, _VALUE_OR_END):
            self._fail(text, at, f"{text[at]!r} where {_WANTED[self._expect]} should stand")
        literal = _LITERALS.get(text[at])
        if literal is not None:
            stop = at + len(literal)
            if text.startswith(literal, at):
                self._take_scalar(literal)
                return stop
            if not final and stop > len(text) and literal.startswith(text[at:]):
                return at
        elif (chars := _NUMBER_CHARS.match(text, at)) is not None:
            if chars.end() == len(text) and not final:
                return at
            number = _NUMBER.fullmatch(text, at, chars.end())
            if number is not None:
                self._take_scalar(number.group())
                return chars.end()
            self._fail(text, at, "not a number")
        return self._fail(text, at, f"{text[at]!r} where {_WANTED[self._expect]} should stand")

    def _take_scalar(self, written: str) -> None:
        if self._at_key:
            self._found = None if written == "null" else NotAString(written[:_MAX_SHOWN])
        self._end_value()

    def _punctuate(self, text: str, at: int, char: str) -> None:
        expect = self._expect
        if char in "{[" and expect in (_VALUE, _VALUE_OR_END):
            if self._at_key:
                self._found = NotAString("an object" if char == "{" else "an array")
                self._at_key = False
            if len(self._stack) == MAX_DEPTH:
                self._fail(text, at, f"nested deeper than {MAX_DEPTH}")
            self._stack.append(ord(char))
            self._expect = _KEY_OR_END if char == "{" else _VALUE_OR_END
        elif char == ":" and expect == _COLON:
            self._expect = _VALUE
        elif char == "," and expect == _COMMA_OR_END:
            self._expect = _KEY if self._stack[-1] == ord("{") else _VALUE
        elif char in "}]" and self._may_close(char):
            self._stack.pop()
            self._end_value()
        else:
            self._fail(text, at, f"{char!r} where {_WANTED[expect]} should stand")

    def _may_close(self, char: str) -> bool:
        if self._expect == _COMMA_OR_END:
            return self._stack[-1] == (ord("{") if char == "}" else ord("["))
        return self._expect == (_KEY_OR_END if char == "}" else _VALUE_OR_END)

    def _end_value(self) -> None:
        self._at_key = False
        self._expect = _COMMA_OR_END if self._stack else _NOTHING

    def _pass_run(self, text: str, at: int) -> int:
        """Return the end of the run of whole items or members at `at`; what may be cut isn't in it."""
        expect = self._expect
        if expect <= _VALUE_OR_END:
            if not self._stack or self._stack[-1] != ord("["):
                return at
            run, expect = _ITEMS.match(text, at, at + _RUN_CHARS), _VALUE
        elif expect <= _KEY_OR_END and len(self._stack) > 1:
            run, expect = _MEMBERS.match(text, at, at + _RUN_CHARS), _KEY
        else:
            return at
        if run is None:
            return at
        self._expect = expect
        return run.end()

    def _fail(self, text: str, at: int, problem: str) -> NoReturn:
        lines = text.count("\n", 0, at)
        column = at - text.rfind("\n", 0, at) if lines else self._column + at + 1
        raise BrokenJson(self._line + lines, column, problem)
