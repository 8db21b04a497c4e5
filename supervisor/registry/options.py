"""The engine's option table, parsed from its --help so that no build's names are typed in here."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

TRUE = frozenset({"on", "enabled", "true", "1"})
FALSE = frozenset({"off", "disabled", "false", "0"})
_NAME = re.compile(r"(--?[A-Za-z0-9][A-Za-z0-9_.-]*)(?:,\s+|\s+|$)")
_ENV = re.compile(r"\s+\(env: ([A-Z0-9_]+)\)\s*")
_BRACKETED = re.compile(r"<[^<>]*>")
_DESCRIPTION_COLUMN = 40
# How --help shows a value that is read as a number; a number's beginning will do, as for the engine.
_NUMBERS = frozenset({"N", "PORT", "SEED", "SECONDS", "INDEX", "SIMILARITY", "<0|1>", "<0...100>"})
_NUMBER = re.compile(r"\s*[+-]?(?:\d|\.\d)")
_QUOTED = re.compile(r"'([^']+)'")
_DEFAULT = re.compile(r"\(default: ([a-z]+)")
_CHOICE = re.compile(r"[\[{]([\w|,-]+)[\]}]")
_ALLOWED = re.compile(r"allowed values: ([\w-]+(?:,\s*[\w-]+)*)")


class OptionError(ValueError):
    """An option or a key that the engine doesn't know, or that lacks its value; the message names it."""


@dataclass(frozen=True)
class Option:
    """One option: `names` turn it on, `negations` turn it off, dashes included.

    `arity` is how many values follow it; `env` is its environment variable, or empty; `group`, `hint` and
    `text` are the heading it stands under in --help, how that shows its value, and what it says.
    """

    names: tuple[str, ...]
    negations: tuple[str, ...] = ()
    arity: int = 0
    env: str = ""
    group: str = field(default="", compare=False)
    hint: str = field(default="", compare=False)
    text: str = field(default="", compare=False)

    @property
    def canonical(self) -> str:
        """The name in presets, and the key everywhere here: the last positive one without dashes."""
        return self.names[-1].lstrip("-")

    @property
    def sort_key(self) -> bytes:
        """llama-server orders options by the bytes of their first name, dashes included."""
        return self.names[0].encode()

    def doubt(self, value: str) -> str:
        """Say what is expected in place of a value that the engine refuses, else ""; only --help tells."""
        if self.arity != 1 or "DEPRECATED" in self.text:  # the engine reads those and does nothing
            return ""
        if self.hint in _NUMBERS:
            words = {*_QUOTED.findall(self.text), *_DEFAULT.findall(self.text)}
            return "" if _NUMBER.match(value) or value in words else "expected a number"
        if choice := _CHOICE.fullmatch(self.hint):
            words = set(re.split(r"[|,]", choice[1]))
            switch = TRUE | FALSE | {"-1"} if {"on", "off"} <= words else set()
        elif allowed := _ALLOWED.search(self.text):
            words, switch = set(re.split(r",\s*", allowed[1].strip())), set()
        else:
            return ""
        return "" if value in words | switch else f"expected one of {', '.join(sorted(words))}"

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

        Raises OptionError naming the word.
        """
        return {option.canonical: value for option, value, _ in self.items(arguments)}

    def items(self, arguments: Sequence[str]) -> Iterator[tuple[Option, str, tuple[str, ...]]]:
        """Yield the options that command-line words set, each with its value and its words.

        Underscores in long names are read as hyphens, as by llama-server. Raises OptionError naming the word.
        """
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
                yield option, value, (word, value)
            else:
                positive = word.replace("_", "-") in option.names
                yield option, "1" if positive else "0", (word,)

    def _unknown_word(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if equals and name in self._by_word:
            return f"argument {word} not recognized: write name and value as two words, {name} {value}"
        near = _nearest(word, self._by_word)
        return f"argument {word} not recognized by llama-server" + (f"; did you mean {near}?" if near else "")


def parse_help(text: str) -> OptionTable:
    """Return the table that llama-server's --help text lists. Raises OptionError if it lists no --model."""
    options: list[Option] = []
    group = ""
    for line in text.splitlines():
        if line.startswith("-----"):
            group = line.strip("- ")
        elif line.startswith("-"):
            options.append(replace(_parse_header(line), group=group))
        elif options and (env := _ENV.fullmatch(line)):
            options[-1] = replace(options[-1], env=env[1])
        elif options:
            options[-1] = replace(options[-1], text=f"{options[-1].text} {line.strip()}".strip())
    table = OptionTable(tuple(options))
    if "model" not in table:
        raise OptionError("the --help text lists no --model: that isn't llama-server")
    return table


def _parse_header(line: str) -> Option:
    """Parse `-c,   --ctx-size N     size of …`; before a description on the same line are three blanks."""
    text = ""
    if line[_DESCRIPTION_COLUMN - 3 : _DESCRIPTION_COLUMN].isspace():
        line, text = line[:_DESCRIPTION_COLUMN], line[_DESCRIPTION_COLUMN:].strip()
    names: list[str] = []
    position = 0
    while match := _NAME.match(line, position):
        names.append(match[1])
        position = match.end()
    hint = line[position:].strip()
    arity = len(_BRACKETED.sub("<>", hint).split())
    positive = len(names) if arity else _count_positive(names)
    return Option(tuple(names[:positive]), tuple(names[positive:]), arity, hint=hint, text=text)


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
