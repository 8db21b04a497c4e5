"""Engine options that aren't a preset's to set, each with the reason that is shown when it is ignored."""

import re
from collections.abc import Mapping

from llamastead.supervisor.registry.options import OptionTable

_LISTEN = "instances listen where Llamastead says, with keys of their own"
_OF_THE_HERD = "it belongs on Llamastead's own command line"
_ONE_FILE = "all instances would write to one file; Llamastead keeps a log per model"

# Never reach an instance, whoever says them: options of the listening side and of the router itself.
RESERVED: Mapping[str, str] = {
    "host": _LISTEN,
    "port": _LISTEN,
    "api-prefix": _LISTEN,
    "api-key": _LISTEN,
    "api-key-file": _LISTEN,
    "ssl-key-file": _LISTEN,
    "ssl-cert-file": _LISTEN,
    "models-dir": _OF_THE_HERD,
    "models-preset": _OF_THE_HERD,
    "models-max": _OF_THE_HERD,
    "models-memory-margin": _OF_THE_HERD,
    "models-autoload": _OF_THE_HERD,
}

# Choose a model: on the command line or in the environment they would give every instance the same one.
_MODEL_OPTIONS = frozenset({"model", "model-url", "hf-repo", "hf-file", "docker-repo"})
# Flags that stand for a whole set-up with its model: --gpt-oss-20b-default, --fim-qwen-7b-spec.
_SET_UP = re.compile(r"(?!spec-).+-(?:default|spec)")

# Make no sense for all instances at once.
NOT_FOR_ALL: Mapping[str, str] = {
    "alias": "a name can only belong to one model",
    "mmproj": "a projector belongs to one model",
    "mmproj-url": "a projector belongs to one model",
    "log-file": _ONE_FILE,
}

# Would take away the log lines that tell why an instance ended and what memory it took.
SILENCING = frozenset({"log-disable", "log-jsonl"})


def is_reserved_variable(name: str, table: OptionTable) -> bool:
    """Whether an environment variable would undo what Llamastead decides for its instances."""
    option = table.of_variable(name)
    return name.startswith("LLAMA_SERVER_") or (option is not None and option.canonical in RESERVED)


def selects_model(canonical: str) -> bool:
    """Whether an option says which model an instance loads."""
    return canonical in _MODEL_OPTIONS or _SET_UP.fullmatch(canonical) is not None


def is_for_instances(canonical: str) -> bool:
    """Whether an environment variable of this option may reach instances."""
    return canonical not in {*RESERVED, *NOT_FOR_ALL, *SILENCING} and not selects_model(canonical)
