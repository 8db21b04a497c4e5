"""Engine options that aren't a preset's to set, each with the reason that is shown when it is ignored."""

import re
from collections.abc import Mapping

from llamastead.supervisor.registry.options import Option, OptionTable

_LISTEN = "instances listen where Llamastead says, with keys of their own"
_OF_THE_HERD = "it belongs on Llamastead's own command line"
_TOOLS = "tools that act on this machine stay off, as their routes answer"
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
    "reuse-port": _LISTEN,
    "path": _OF_THE_HERD,
    "ui": _OF_THE_HERD,
    "ui-config": _OF_THE_HERD,
    "ui-config-file": _OF_THE_HERD,
    "cors-origins": _OF_THE_HERD,
    "cors-methods": _OF_THE_HERD,
    "cors-headers": _OF_THE_HERD,
    "cors-credentials": _OF_THE_HERD,
    "webui": _OF_THE_HERD,
    "webui-config": _OF_THE_HERD,
    "webui-config-file": _OF_THE_HERD,
    "tools": _TOOLS,
    "tools-runtime": _TOOLS,
    "mcp-servers-config": _TOOLS,
    "mcp-servers-json": _TOOLS,
    "agent": _TOOLS,
    "ui-mcp-proxy": _TOOLS,
    "webui-mcp-proxy": _TOOLS,
}

# Choose a model: in the environment they would give every instance the same one.
_MODEL_OPTIONS = frozenset({"model", "model-url", "hf-repo", "hf-file", "docker-repo"})
# On the command line they belong to the model that stands there.
OF_ONE_MODEL = frozenset(
    {"model", "hf-repo", "hf-file", "mmproj", "mmproj-url", "alias", "model-draft", "hf-repo-draft"}
    | {
        "lora",
        "lora-scaled",
        "control-vector",
        "control-vector-scaled",
        "model-vocoder",
        "hf-repo-v",
        "hf-file-v",
    }
)
# Print something and end.
ACTIONS = frozenset({"usage", "version", "cache-list", "completion-bash", "list-devices"})
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
SILENCING: Mapping[str, str] = dict.fromkeys(
    ("log-disable", "log-jsonl"), "the log is what tells why a model ended and what memory it took"
)


_SAMPLING = "sampling params"
_FROM_HUB = frozenset(
    {"hf-repo", "hf-file", "hf-repo-draft", "alias", "tags", "pooling", "jinja", "batch-size", "ubatch-size"}
    | {"cache-reuse", "chat-template-kwargs", "mmap", "load-mode", "ctx-size", "parallel", "flash-attn"}
    | {
        "cache-type-k",
        "cache-type-v",
        "mmproj-auto",
        "embeddings",
        "reranking",
        "reasoning-budget",
        "spec-type",
    }
)


def may_come_from_hub(option: Option) -> bool:
    """Whether a preset of the hub may set an option: none that names files or devices of this machine."""
    return option.canonical in _FROM_HUB or (option.group == _SAMPLING and "file" not in option.canonical)


def is_reserved_variable(name: str, table: OptionTable) -> bool:
    """Whether an environment variable would undo what Llamastead decides for its instances."""
    option = table.of_variable(name)
    return name.startswith("LLAMA_SERVER_") or (option is not None and option.canonical in RESERVED)


def selects_model(canonical: str) -> bool:
    """Whether an option says which model an instance loads."""
    return canonical in _MODEL_OPTIONS or _SET_UP.fullmatch(canonical) is not None


def why_not_for_all(canonical: str) -> str:
    """Say why an option's variable does not reach instances; for one that does not."""
    ignored = {**RESERVED, **NOT_FOR_ALL, **SILENCING}
    return ignored.get(canonical, "it names one model: give it on the command line, or in a preset")


def is_for_instances(canonical: str) -> bool:
    """Whether an environment variable of this option may reach instances."""
    ours = {*RESERVED, *NOT_FOR_ALL, *SILENCING, *ACTIONS, "timeout"}
    return canonical not in ours and not selects_model(canonical)
