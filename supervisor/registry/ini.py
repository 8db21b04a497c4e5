"""The grammar of preset files: llama-server's, with comments and quotes read as people mean them.

Where the two differ (a comment sign inside a value, quotes around one, keys before the first header) the
reading is reported as a note.
"""

import re
from dataclasses import dataclass

from llamastead.supervisor.registry.model import Problem, RegistryError, Severity

_LINE_END = re.compile(r"\r\n|\r|\n")
_HEADER = re.compile(r"\[[ \t]*([^\] \t][^\]]*)\][ \t]*(?:[;#].*)?")
_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*=(.*)")
_BLANK = re.compile(r"[ \t]*(?:[;#].*)?")
_COMMENT = re.compile(r"(?:^|[ \t])[;#]")
_ENGINE_COMMENT = re.compile(r"[;#]")
GLOBAL_SECTION = "*"
_MOST_ERRORS = 20  # of a file that is no preset file at all


@dataclass(frozen=True)
class Setting:
    """One `key = value` of a section and the line it stands on."""

    key: str
    value: str
    line: int


@dataclass(frozen=True)
class Section:
    """A header with its settings; `[*]` holds what all models share."""

    name: str
    line: int
    settings: tuple[Setting, ...]


def parse_ini(text: str, file: str) -> tuple[dict[str, Section], list[Problem]]:
    """Return the sections by name, a repeated one replaced by its last, and what was odd.

    Settings before the first header are laid under those of `[*]`. Raises RegistryError with the `file:line`
    of each line that is neither header, setting, comment nor blank.
    """
    errors: list[str] = []
    sections: dict[str, Section] = {}
    problems: list[Problem] = []
    loose: list[Setting] = []
    settings = loose
    for number, line in enumerate(_LINE_END.split(text), 1):
        where = f"{file}:{number}"
        if "\0" in line:
            errors.append(f"{where}: the line has a NUL character, which no name or value can hold")
            continue
        if _BLANK.fullmatch(line):
            continue
        if header := _HEADER.fullmatch(line):
            name = header[1]
            if name in sections:
                first = sections[name].line
                message = f"section [{name}] replaces the one on line {first}, as in llama-server"
                problems.append(Problem(Severity.WARNING, where, message))
            settings = []
            sections[name] = Section(name, number, ())
            continue
        if not (pair := _KEY.fullmatch(line)):
            errors.append(f"{where}: {_explain(line)}")
            continue
        value, note = read_value(pair[2])
        settings.append(Setting(pair[1], value, number))
        if note:
            problems.append(Problem(Severity.NOTE, where, note))
        if settings is not loose:
            sections[name] = Section(name, sections[name].line, tuple(settings))
    if len(errors) > _MOST_ERRORS:
        errors[_MOST_ERRORS:] = [f"{file}: {len(errors) - _MOST_ERRORS} more lines are no better"]
    if errors:
        raise RegistryError("\n".join(errors))
    if any(setting.key != "version" for setting in loose):
        message = "settings before the first section are for all models; llama-server makes a model of them"
        problems.append(Problem(Severity.NOTE, f"{file}:{loose[0].line}", message))
        shared = sections.get(GLOBAL_SECTION, Section(GLOBAL_SECTION, loose[0].line, ()))
        sections[GLOBAL_SECTION] = Section(
            GLOBAL_SECTION, shared.line, (*_not_in(loose, shared), *shared.settings)
        )
    return sections, problems


def read_value(raw: str) -> tuple[str, str]:
    """Return the value that the text after `=` means, and a note if llama-server reads it otherwise, else "".

    A comment begins at a `;` or `#` at the start or after white space. One matching pair of quotes around the
    whole value is removed, and protects comment signs inside it; all other quotes are part of the value.
    """
    text = raw.strip(" \t")
    if quoted := _quoted(text):
        value = quoted
    else:
        comment = _COMMENT.search(text)
        text = text[: comment.start()].rstrip(" \t") if comment else text
        value = _unquoted(text)
    if _ENGINE_COMMENT.split(raw, maxsplit=1)[0].strip(" \t") == value:
        return value, ""
    if _ENGINE_COMMENT.search(value):
        return value, "the value goes on after its `;` or `#`; llama-server ends it there"
    return value, "the quotes around the value are removed; llama-server keeps them"


def _quoted(text: str) -> str:
    """Return what stands in quotes at the start of `text` if nothing but a comment follows them, else ""."""
    end = text.find(text[0], 1) if text[:1] in ('"', "'") else -1
    rest = text[end + 1 :]
    if end > 1 and (not rest.strip(" \t") or (rest[0] in " \t" and _COMMENT.match(rest.lstrip(" \t")))):
        return text[1:end]
    return ""


def _unquoted(text: str) -> str:
    """Remove one pair of quotes around `text`, unless the first of them is closed before the end."""
    if len(text) < 2 or text[0] not in "\"'" or text[-1] != text[0]:
        return text
    inner = text[1:-1]
    next_quote = inner.find(text[0])
    opens_another = next_quote == 0 or inner[next_quote - 1 : next_quote] in (
        " ",
        "\t",
        "(",
        "[",
        "{",
        ",",
        ":",
        "=",
    )
    return inner if next_quote < 0 or opens_another else text


def _not_in(loose: list[Setting], shared: Section) -> list[Setting]:
    said = {setting.key for setting in shared.settings}
    return [setting for setting in loose if setting.key not in said]


def _explain(line: str) -> str:
    """Say what is wrong with a line that the grammar doesn't know."""
    if line.startswith("\ufeff"):
        return "the file begins with a byte order mark; save it as UTF-8 without one"
    if line[0] in " \t":
        return "a setting or header must begin at the start of its line"
    if line.startswith("["):
        return f"not a section header: {line.strip()!r}; write [name], with nothing but a comment after it"
    if line.startswith("-"):
        return f"{line.strip()!r}: write the option without its dashes, as in `ctx-size = 4096`"
    if "=" not in line:
        return f"{line.strip()!r} has no `=`: expected `key = value`"
    return f"{line.strip()!r}: a key has letters, digits, `_`, `.`, `-` and begins with a letter"
