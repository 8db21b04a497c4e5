"""What each source says of each model, checked against the option table and not yet merged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamastead.shared.disk import raise_shortage
from llamastead.shared.hub_cache import HubCache, canonical_tag, split_name
from llamastead.supervisor.registry import keys
from llamastead.supervisor.registry.files import model_name, scan_models_dir
from llamastead.supervisor.registry.ini import GLOBAL_SECTION, Section, Setting, parse_ini
from llamastead.supervisor.registry.model import Problem, RegistryError, Severity
from llamastead.supervisor.registry.options import FALSE, TRUE, OptionError, OptionTable
from llamastead.supervisor.registry.reserved import (
    NOT_FOR_ALL,
    OF_ONE_MODEL,
    RESERVED,
    SILENCING,
    is_reserved_variable,
    may_come_from_hub,
    selects_model,
)

COMMAND_LINE = "command line"
HUB_CACHE = "hub cache"


@dataclass
class Layer:
    """One source's word on one model. `fields` are ModelEntry fields; `where` is its `file:line` or path.

    `plain` is the name that llama-server gives it, if that is another. `origins` says of each key where it is
    said, in words for people.
    """

    where: str
    options: dict[str, str] = field(default_factory=dict)
    router_keys: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    plain: str = ""
    origins: dict[str, str] = field(default_factory=dict)


def canonical_name(section: str) -> str:
    """Return the model name of a section: what follows its last colon is a quantisation tag, in capitals.

    `org/repo:q4_k_m` is the model `org/repo:Q4_K_M` of the cache.
    """
    repository, colon, tag = section.rpartition(":")
    return f"{repository}:{canonical_tag(tag)}" if colon and tag else section


def read_arguments(
    words: Sequence[str], table: OptionTable, problems: list[Problem]
) -> tuple[dict[str, str], dict[str, Layer]]:
    """Return the command line's options for all instances by canonical name, and the model it names, if any.

    That one (-m, -hf) is loaded at start. Raises RegistryError naming the argument at fault.
    """
    try:
        options = table.parse(words)
    except OptionError as error:
        raise RegistryError(f"command line: {error}") from None
    for name in options:
        if selects_model(name) and name not in OF_ONE_MODEL:
            raise RegistryError(f"{COMMAND_LINE}: --{name} fetches a model by itself: name it with -m or -hf")
        if expected := table[name].doubt(options[name]):
            raise RegistryError(f"command line: --{name} {options[name]}: {expected}")
    ignored = {**RESERVED, **SILENCING, "log-file": NOT_FOR_ALL["log-file"]}
    options = _without(options, ignored, COMMAND_LINE, problems)
    if not options.get("model") and not options.get("hf-repo"):
        return _without(options, NOT_FOR_ALL, COMMAND_LINE, problems), {}
    own = {name: value for name, value in options.items() if name in OF_ONE_MODEL}
    names = [name.strip() for name in own.get("alias", "").split(",") if name.strip()]
    repository = own.get("hf-repo")
    by_itself = canonical_name(repository) if repository else model_name(Path(own["model"]))
    layer = Layer(
        COMMAND_LINE,
        own | ({"alias": ",".join(names[1:])} if names else {}),
        {"load-on-startup": "true"},
        {"may_be_presets": bool(repository and not split_name(repository)[1] and "hf-file" not in own)},
        origins=dict.fromkeys((*own, "load-on-startup"), COMMAND_LINE),
    )
    rest = {name: value for name, value in options.items() if name not in OF_ONE_MODEL}
    return rest, {names[0] if names else by_itself: layer}


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
        layers[model.name] = Layer(str(model.path), options, origins=dict.fromkeys(options, "models folder"))
    return layers


def read_cache(cache: HubCache, problems: list[Problem]) -> dict[str, Layer]:
    """Return the models of the hub cache."""
    layers: dict[str, Layer] = {}
    for repository in cache.repositories.values():
        models = repository.models()
        names = {model.name for model in models}
        for model in models:
            layer = Layer(str(model.path), {"hf-repo": model.name}, origins={"hf-repo": HUB_CACHE})
            if model.plain not in names:
                names.add(model.plain)
                layer.plain = model.plain
            layers[model.name] = layer
            if model.twins:
                message = f"{model.name} is {model.path.name}; not listed: {', '.join(model.twins)}"
                problems.append(Problem(Severity.NOTE, str(repository.snapshot), message))
        if repository.broken:
            message = f"links to nothing are skipped: {', '.join(repository.broken)}"
            problems.append(Problem(Severity.WARNING, str(repository.snapshot), message))
    return layers


def read_preset(
    file: Path, table: OptionTable, problems: list[Problem], *, remote: bool = False
) -> dict[str, Layer]:
    """Return the sections of a preset file by model name, `[*]` among them.

    A `remote` one came from the hub: what could run or reach something else on this machine is ignored.
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
        report = _SectionReport(str(file), section.name, problems, errors, remote)
        _read_section(section, layer, report, table)
    if errors:
        raise RegistryError("\n".join(errors))
    return layers


def _read_text(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise_shortage(error)
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
    remote: bool = False

    def warn(self, setting: Setting, message: str) -> None:
        self._add(Severity.WARNING, setting, message)

    def doom(self, setting: Setting, message: str) -> None:
        self._add(Severity.ERROR, setting, message)

    def _add(self, severity: Severity, setting: Setting, message: str) -> None:
        model = "" if self.section == GLOBAL_SECTION else canonical_name(self.section)
        self.problems.append(Problem(severity, f"{self.file}:{setting.line}", message, model))

    def place(self, setting: Setting) -> str:
        shared = f" in [{GLOBAL_SECTION}]" if self.section == GLOBAL_SECTION else ""
        return f"{self.file}:{setting.line}{shared}"

    def fail(self, setting: Setting, message: str, hint: str = "") -> None:
        self.errors.append(f"{self.file}:{setting.line}: {message} in section [{self.section}]{hint}")


def _read_section(section: Section, layer: Layer, report: _SectionReport, table: OptionTable) -> None:
    said: dict[str, str] = {}
    for setting in section.settings:
        if setting.key == "version":
            continue
        if setting.key in keys.ROUTER_KEYS:
            layer.router_keys[setting.key] = setting.value
            layer.origins[setting.key] = report.place(setting)
            if expected := keys.odd_router_value(setting.key, setting.value):
                report.warn(setting, f"{setting.key} = {setting.value}: {expected}")
        elif report.remote and setting.key in keys.LOCAL_KEYS:
            report.warn(setting, f"{setting.key} is ignored here: a preset from the hub may not set it")
        elif setting.key in keys.OWN_KEYS:
            try:
                layer.fields |= keys.own_field(setting.key, setting.value)
                layer.origins[setting.key] = report.place(setting)
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
        hint = keys.hint_of_foreign_key(setting.key) or (f"; did you mean '{near}'?" if near else "")
        report.fail(setting, f"option '{setting.key}' not recognized", hint)
        return
    if option.arity > 1:
        report.fail(setting, f"option '{setting.key}' takes {option.arity} values and can't stand")
        return
    ignored = RESERVED.get(option.canonical)
    if not ignored and option.canonical == "alias" and report.section == GLOBAL_SECTION:
        ignored = NOT_FOR_ALL["alias"]
    if report.remote and not may_come_from_hub(option):
        ignored = "a preset from the hub may not set it"
    if ignored:
        report.warn(setting, f"{setting.key} is ignored here: {ignored}")
        return
    if why := SILENCING.get(option.canonical):
        report.warn(setting, f"{setting.key} has no effect: {why}")
    if not option.arity and setting.value not in TRUE | FALSE:
        report.warn(
            setting, f"{setting.key} = {setting.value}: neither true nor false; read as llama-server reads it"
        )
    # Of an option's several names llama-server takes the last in byte order, not in the file's order.
    if setting.key >= said.get(option.canonical, ""):
        said[option.canonical] = setting.key
        layer.options[option.canonical] = option.value_of_key(setting.key, setting.value)
        layer.origins[option.canonical] = report.place(setting)
        if expected := option.doubt(setting.value):
            report.doom(setting, f"{setting.key} = {setting.value}: {expected}")


def _without(
    options: Mapping[str, str], ignored: Mapping[str, str], where: str, problems: list[Problem]
) -> dict[str, str]:
    problems += [
        Problem(Severity.WARNING, where, f"--{name} is ignored here: {ignored[name]}")
        for name in options
        if name in ignored
    ]
    return {name: value for name, value in options.items() if name not in ignored}
