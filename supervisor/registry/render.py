"""A model's settings as llama-server's router words them in GET /models."""

from llamastead.supervisor.registry.model import ModelEntry
from llamastead.supervisor.registry.options import OptionTable


def wire_args(entry: ModelEntry, table: OptionTable, engine: str) -> list[str]:
    """Return `status.args`: the command line that the router would start, in its order and spelling."""
    options = {**entry.options, "host": "127.0.0.1", "port": "0", "alias": entry.name}
    if "log-jsonl" in table:  # routers of these builds keep colours out of their instances' logs
        options["log-colors"] = "off"
    return [engine, *command_words(options, table)]


def preset_text(entry: ModelEntry, table: OptionTable) -> str:
    """Return `status.preset`: the merged settings as a section of a preset file, an empty line at its end."""
    options = {name: value for name, value in entry.options.items() if name != "tags"}
    pairs = [(option.canonical, value) for option, value in table.ordered(options)]
    pairs += sorted(entry.router_keys.items())
    lines = [f"{name} = {value}".replace("\n", "\\\n") for name, value in pairs]
    return "\n".join([f"[{entry.name}]", *lines, "", ""])


def command_words(options: dict[str, str], table: OptionTable) -> list[str]:
    """Return canonical options as command-line words in llama-server's order."""
    return [word for option, value in table.ordered(options) for word in option.render(value)]
