"""Command-line flags, made from the fields of Settings; everything else is an option of llama-server."""

import argparse
import types
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, get_args

from pydantic.fields import FieldInfo

from llamastead.shared.settings import Settings, flag_of
from llamastead.shared.settings_fields import field_extra

NEAR = 0.8  # how alike a flag must be to be what was meant


class UsageError(Exception):
    """The command line can't be understood; the message names the word and what may have been meant."""


class Parser(argparse.ArgumentParser):
    """An argument parser that never guesses abbreviations and leaves the printing of errors to its caller."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options}
        )

    def error(self, message: str) -> Any:
        """Raise UsageError instead of printing and exiting."""
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def setting_flags() -> list[str]:
    """Return all flags of Settings."""
    return [flag for name in Settings.model_fields if (flag := flag_of(name))]


def add_setting_flags(
    parser: argparse.ArgumentParser,
    names: Iterable[str] = Settings.model_fields,
    shown: Container[str] = Settings.model_fields,
) -> None:
    """Add the flags of Settings, llama-server's own first; what isn't given is absent from the result.

    Those that are not `shown` are taken all the same and left out of the help.
    """
    routers = parser.add_argument_group("settings of llama-server's router, spelled alike")
    ours = parser.add_argument_group("settings of Llamastead")
    for name in names:
        info, flag = Settings.model_fields[name], flag_of(name)
        if flag is None:
            continue
        group = routers if field_extra(info)["env"] else ours
        text = _help(name, info) if name in shown else argparse.SUPPRESS
        group.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=text, **_form(info))


def given_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given as flags; of a repeated key flag all values."""
    given = {name: value for name, value in vars(parsed).items() if name in Settings.model_fields}
    return {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}


def split_words(
    parser: argparse.ArgumentParser, words: Sequence[str], leading: bool = False
) -> tuple[list[str], list[str]]:
    """Part a command line into the parser's words and the rest, which is another program's, each in order.

    Needed since argparse would read `-hf` as `-h -f`, and can't know how many values a foreign option takes.
    `leading`: the first foreign word makes all that follow it foreign.
    """
    known = {word: action.nargs != 0 for action in parser._actions for word in action.option_strings}
    ours: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name  # llama-server takes both
        if name not in known or (leading and rest):
            rest.append(word)
            continue
        ours.append(name + word[len(name) :])
        if known[name] and not equals:
            ours.extend(islice(left, 1))
    return ours, rest


def _form(info: FieldInfo) -> Mapping[str, Any]:
    kind = info.annotation
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    metavar = field_extra(info)["metavar"] or _metavar(kind)
    return {"action": "append", "metavar": metavar} if _is_tuple(kind) else {"metavar": metavar}


def _is_tuple(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is tuple


def _metavar(kind: Any) -> str:
    choices = [str(arg) for arg in get_args(kind) if isinstance(arg, str)]
    if choices:
        return "|".join(choices)
    if isinstance(kind, types.UnionType):
        kind = get_args(kind)[0]
    return {"int": "N", "float": "SECONDS", "Path": "PATH"}.get(kind.__name__, "TEXT")


def _help(name: str, info: FieldInfo) -> str:
    variable = field_extra(info)["env"] or f"LLAMASTEAD_{name.upper()}"
    default = info.default
    shown = default not in (None, (), "") and not info.default_factory
    start = f"{info.description}"
    words = [f"default {_default_text(default)}"] if shown else []
    return f"{start} ({', '.join([*words, variable])})".replace("%", "%%")


def _default_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
