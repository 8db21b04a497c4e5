"""The engine's option table, parsed from its --help so that no build's names are typed in here."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

TRUE = frozenset({"on", "enabled", "true", "1"})
FALSE = frozenset({"off", "disabled", "false", "0"})
_NAME = re.compile(r"(--?[A-Za-z0-9][A-Za-z0-9_.-]*)(?:,\s+|\s+|$)")
_ENV = re.compile(r"\s+\(env: ([A-Z0-9_]+)\)\s*")
_BRACKETED = re.compile(r"<[^<>]*>")
_DESCRIPTION_COLUMN = 40


class OptionError(ValueError):
    """An option or a key that the engine doesn't know, or that lacks its value; the message names it."""


@dataclass(frozen=True)
class Option:
    """One option: `names` turn it on, `negations` turn it off, dashes included.

    `arity` is how many values follow it; `env` is its environment variable, or empty.
    """

    names: tuple[str, ...]
    negations: tuple[str, ...] = ()
    arity: int = 0
    env: str = ""

    @property
    def canonical(self) -> str:
        """The name in presets, and the key everywhere here: the last positive one without dashes."""
        return self.names[-1].lstrip("-")

    @property
    def sort_key(self) -> bytes:
        """llama-server orders options by the bytes of their first name, dashes included."""
        return self.names[0].encode()

    def value_of_key(self, key: str, value: str) -> str:
        """Return what the preset line `key = value` sets this option to; a negation turns it round."""
        if self.negations and key in (_negated(self.env), *(name.lstrip("-") for name in self.negations)):
            return "false" if value in TRUE else "true"
        return value

    def render(self, value: str) -> list[str]:
        """Return the command-line words for this option set to `value`, as llama-server renders them.

        A flag with a negation is on for each value that isn't plainly false; one without is left out then.
        """
        if self.arity:
            return [self.names[-1], value]
        if value not in FALSE:
            return [self.names[-1]]
        return [self.negations[-1]] if self.negations else []


@dataclass(frozen=True)
class OptionTable:
    """All options of an engine, found by any of their names."""

    options: tuple[Option, ...]

    @cached_property
    def _by_word(self) -> Mapping[str, Option]:
        return {word: option for option in self.options for word in (*option.names, *option.negations)}

    @cached_property
    def _by_variable(self) -> dict[str, Option]:
        negated = {_negated(option.env): option for option in self.options if option.env and option.negations}
        return negated | {option.env: option for option in self.options if option.env}

    @cached_property
    def _by_key(self) -> Mapping[str, Option]:
        return {word.lstrip("-"): option for word, option in self._by_word.items()} | self._by_variable

    @cached_property
    def _by_canonical(self) -> Mapping[str, Option]:
        return {option.canonical: option for option in self.options}

    def __contains__(self, canonical: object) -> bool:
        return canonical in self._by_canonical

    def __getitem__(self, canonical: str) -> Option:
        return self._by_canonical[canonical]

    def of_key(self, key: str) -> Option | None:
        """Return the option that a preset key names: a long or short name without dashes, or its variable."""
        return self._by_key.get(key)

    def nearest_key(self, key: str, others: Iterable[str] = ()) -> str:
        """Return the known preset key, or one of `others`, that looks most like `key`, or ""."""
        return _nearest(key.lower().replace("_", "-"), [*self._by_key, *others])

    def of_variable(self, name: str) -> Option | None:
        """Return the option that an environment variable sets (`LLAMA_ARG_…`, its negation included)."""
        return self._by_variable.get(name)

    def ordered(self, options: Mapping[str, str]) -> list[tuple[Option, str]]:
        """Return canonical options with their values in llama-server's order."""
        return sorted(
            ((self[name], value) for name, value in options.items()), key=lambda pair: pair[0].sort_key
        )

    def parse(self, arguments: Sequence[str]) -> dict[str, str]:
        """Return the canonical options that command-line words set, the last of each kind.

        Underscores in long names are read as hyphens, as by llama-server. Raises OptionError naming the word.
        """
        options: dict[str, str] = {}
        words = iter(arguments)
        for word in words:
            option = self._by_word.get(word.replace("_", "-") if word.startswith("--") else word)
            if option is None:
                raise OptionError(self._unknown_word(word))
            if option.arity > 1:
                raise OptionError(
                    f"argument {word} takes {option.arity} values and can't be passed to all instances"
                )
            if option.arity:
                value = next(words, None)
                if value is None:
                    raise OptionError(f"argument {word} lacks its value")
                options[option.canonical] = value
            else:
                positive = word.replace("_", "-") in option.names
                options[option.canonical] = "1" if positive else "0"
        return options

    def _unknown_word(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if equals and name in self._by_word:
            return f"argument {word} not recognized: write name and value as two words, {name} {value}"
        near = _nearest(word, self._by_word)
        return f"argument {word} not recognized by llama-server" + (f"; did you mean {near}?" if near else "")


def parse_help(text: str) -> OptionTable:
    """Return the table that llama-server's --help text lists. Raises OptionError if it lists no --model."""
    options: list[Option] = []
    for line in text.splitlines():
        if line.startswith("-") and not line.startswith("-----"):
            options.append(_parse_header(line))
        elif options and (env := _ENV.fullmatch(line)):
            last = options.pop()
            options.append(Option(last.names, last.negations, last.arity, env[1]))
    table = OptionTable(tuple(options))
    if "model" not in table:
        raise OptionError("the --help text lists no --model: that isn't llama-server")
    return table


def _parse_header(line: str) -> Option:
    """Parse `-c,   --ctx-size N     size of …`; before a description on the same line are three blanks."""
    if line[_DESCRIPTION_COLUMN - 3 : _DESCRIPTION_COLUMN].isspace():
        line = line[:_DESCRIPTION_COLUMN]
    names: list[str] = []
    position = 0
    while match := _NAME.match(line, position):
        names.append(match[1])
        position = match.end()
    hint = _BRACKETED.sub("<>", line[position:])
    arity = len(hint.split())
    positive = len(names) if arity else _count_positive(names)
    return Option(tuple(names[:positive]), tuple(names[positive:]), arity)


def _count_positive(names: list[str]) -> int:
    """How many of a flag's names turn it on; those that turn it off follow, after its first long name."""
    if not any(f"--no-{name[2:]}" in names for name in names if name.startswith("--")):
        return len(names)
    first_long = next(index for index, name in enumerate(names) if name.startswith("--"))
    for index in range(first_long + 1, len(names)):
        if names[index].startswith("--no-") or not names[index].startswith("--"):
            return index
    return len(names)


def _nearest(word: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(word, known, n=1)), "")


def _negated(env: str) -> str:
    return env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)
