"""What each source says of each model, checked against the option table and not yet merged."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamastead.supervisor.registry import keys
from llamastead.supervisor.registry.files import scan_models_dir
from llamastead.supervisor.registry.ini import GLOBAL_SECTION, Section, Setting, parse_ini
from llamastead.supervisor.registry.model import Problem, RegistryError, Severity
from llamastead.supervisor.registry.options import FALSE, TRUE, OptionError, OptionTable
from llamastead.supervisor.registry.reserved import NOT_FOR_ALL, RESERVED, is_reserved_variable, selects_model

_TAG_END = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)


@dataclass
class Layer:
    """One source's word on one model. `fields` are ModelEntry fields; `where` is its `file:line` or path."""

    where: str
    options: dict[str, str] = field(default_factory=dict)
    router_keys: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


def canonical_name(section: str) -> str:
    """Return the model name of a section: what follows its last colon is a quantisation tag, in capitals.

    As in llama-server `org/repo:ud-q4_k_xl` is `org/repo:Q4_K_XL`.
    """
    repository, colon, tag = section.rpartition(":")
    if not (colon and tag):
        return section
    end = _TAG_END.search(tag)
    return f"{repository}:{(end[1] if end else tag).upper()}"


def read_arguments(words: Sequence[str], table: OptionTable, problems: list[Problem]) -> dict[str, str]:
    """Return the canonical options of the command line. Raises RegistryError naming the argument at fault."""
    try:
        options = table.parse(words)
    except OptionError as error:
        raise RegistryError(f"command line: {error}") from None
    for name in options:
        if selects_model(name):
            raise RegistryError(
                f"command line: --{name} names one model; give a preset file (--models-preset) or a folder "
                "of models (--models-dir)"
            )
    return _without(options, {**RESERVED, **NOT_FOR_ALL}, "command line", problems)


def read_folder(folder: Path, table: OptionTable, problems: list[Problem]) -> dict[str, Layer]:
    """Return the models of a models folder. Raises RegistryError when it can't be read."""
    models, odd = scan_models_dir(folder)
    problems += odd
    layers: dict[str, Layer] = {}
    for model in models:
        if model.name in layers:
            message = f"not listed: {layers[model.name].where} has the name {model.name} already"
            problems.append(Problem(Severity.WARNING, str(model.path), message))
            continue
        paths = {"model": model.path, "mmproj": model.mmproj, "model-draft": model.draft}
        options = {name: str(path) for name, path in paths.items() if path is not None and name in table}
        layers[model.name] = Layer(str(model.path), options)
    return layers


def read_preset(file: Path, table: OptionTable, problems: list[Problem]) -> dict[str, Layer]:
    """Return the sections of a preset file by model name, `[*]` among them.

    Raises RegistryError with every fault's `file:line`.
    """
    sections, odd = parse_ini(_read_text(file), str(file))
    problems += odd
    layers: dict[str, Layer] = {}
    errors: list[str] = []
    for section in sections.values():
        name = canonical_name(section.name)
        layer = Layer(f"{file}:{section.line}")
        if name in layers:
            errors.append(f"{layer.where}: [{section.name}] is the model of {layers[name].where} again")
        layers[name] = layer
        _read_section(section, layer, _SectionReport(str(file), section.name, problems, errors), table)
    if errors:
        raise RegistryError("\n".join(errors))
    return layers


def _read_text(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RegistryError(f"preset file {file} can't be read: {error.strerror}") from None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RegistryError(f"{file}:{line}: not UTF-8 text") from None


@dataclass(frozen=True)
class _SectionReport:
    """Where the faults of a section are written down."""

    file: str
    section: str
    problems: list[Problem]
    errors: list[str]

    def warn(self, setting: Setting, message: str) -> None:
        self.problems.append(Problem(Severity.WARNING, f"{self.file}:{setting.line}", message))

    def fail(self, setting: Setting, message: str, hint: str = "") -> None:
        self.errors.append(f"{self.file}:{setting.line}: {message} in section [{self.section}]{hint}")


def _read_section(section: Section, layer: Layer, report: _SectionReport, table: OptionTable) -> None:
    said: dict[str, str] = {}
    for setting in section.settings:
        if setting.key == "version":
            continue
        if setting.key in keys.ROUTER_KEYS:
            layer.router_keys[setting.key] = setting.value
            if expected := keys.odd_router_value(setting.key, setting.value):
                report.warn(setting, f"{setting.key} = {setting.value}: {expected}")
        elif setting.key in keys.OWN_KEYS:
            try:
                layer.fields |= keys.own_field(setting.key, setting.value)
            except ValueError as error:
                report.fail(setting, f"{setting.key} = {setting.value}: {error}")
            for name in layer.fields.get("env", ()) if setting.key == "env" else ():
                if is_reserved_variable(name, table):
                    report.fail(setting, f"env may not set {name}")
        else:
            _read_option(setting, layer, report, table, said)


def _read_option(
    setting: Setting, layer: Layer, report: _SectionReport, table: OptionTable, said: dict[str, str]
) -> None:
    """Take an engine option into `layer`; `said` remembers by which of its names it was set."""
    option = table.of_key(setting.key)
    if option is None:
        near = table.nearest_key(setting.key, (*keys.OWN_KEYS, *keys.ROUTER_KEYS))
        hint = f"; did you mean '{near}'?" if near else ""
        report.fail(setting, f"option '{setting.key}' not recognized", hint)
        return
    if option.arity > 1:
        report.fail(setting, f"option '{setting.key}' takes {option.arity} values and can't stand")
        return
    ignored = RESERVED.get(option.canonical)
    if not ignored and option.canonical == "alias" and report.section == GLOBAL_SECTION:
        ignored = NOT_FOR_ALL["alias"]
    if ignored:
        report.warn(setting, f"{setting.key} is ignored here: {ignored}")
        return
    if not option.arity and setting.value not in TRUE | FALSE:
        report.warn(
            setting, f"{setting.key} = {setting.value}: neither true nor false; read as llama-server reads it"
        )
    # Of an option's several names llama-server takes the last in byte order, not in the file's order.
    if setting.key >= said.get(option.canonical, ""):
        said[option.canonical] = setting.key
        layer.options[option.canonical] = option.value_of_key(setting.key, setting.value)


def _without(
    options: Mapping[str, str], ignored: Mapping[str, str], where: str, problems: list[Problem]
) -> dict[str, str]:
    problems += [
        Problem(Severity.WARNING, where, f"--{name} is ignored here: {ignored[name]}")
        for name in options
        if name in ignored
    ]
    return {name: value for name, value in options.items() if name not in ignored}
