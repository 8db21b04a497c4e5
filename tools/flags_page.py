"""docs/flags.md: what each flag of llama-server means to Llamastead, made from the engine's option table.

python tools/flags_page.py > docs/flags.md
"""

import sys
from pathlib import Path

from llamastead.shared.settings import Settings, flag_of
from llamastead.shared.settings_fields import field_extra
from llamastead.supervisor.engine import find_engine
from llamastead.supervisor.launch import CACHE_RAM_MIB, HTTP_THREADS, SSE_PING_SECONDS, VERBOSITY
from llamastead.supervisor.registry.options import Option, OptionTable, parse_help
from llamastead.supervisor.registry.reserved import (
    ACTIONS,
    NOT_FOR_ALL,
    OF_ONE_MODEL,
    RESERVED,
    SILENCING,
    selects_model,
)

HEAD = """\
# Flags of llama-server

Made by `tools/flags_page.py` from the option table of the installed engine (b10068) and from what b11434 has
besides; a test keeps it current. An engine newer than that may have more flags: they are read from its
`--help`, and what is not named here is passed on to all instances.

`llamastead up` takes every flag of `llama-server`, in each of its spellings (long, short, negated), and its
environment variable where that is a setting or for all models; of the others a warning says at start that
they are ignored. Each is one of these:

- **setting**: it shapes the gateway or the herd, as it shapes `llama-server`'s router;
- **all models**: it is passed on to every instance, above what presets say; as a variable, below what they
  say;
- **model**: with `-m` or `-hf` it belongs to the one model that these register and load at start; without
  them it is passed on to every instance, as by `llama-server`'s router, or ignored, with a warning, where
  that is said;
- **prints**: it prints something and ends;
- **ignored**: it has no effect, for the reason that is given, and a warning says so at start;
- **refused**: the start ends with the reason.

Relative paths mean the folder in which `llamastead` is started. Values that the engine refuses (`-c lots`,
`--prio 9`) end the start: it is asked; in a preset file they are reported with their line (`llamastead
check`) and only that model fails. Time-outs of 0 and -1 mean no limit.

| flag | variable | is | what it does here |
|---|---|---|---|
"""
SETTINGS = {
    "timeout": "for `--first-byte-timeout` and `--idle-timeout`, where these aren't set",
    "host": "where the gateway listens; several by commas; a path that ends in `.sock` is a unix socket",
    "ui": "whether `/` serves the engine's own web UI",
}
NEWER = Path(__file__).with_name("newer_flags.txt")
"""What `--help` of b11434 says of options that b10068 lacks; `# gone:` names those that it has no more."""
MORE = """
## Newer engines

What b11434 has besides:

| flag | variable | is | what it does here |
|---|---|---|---|
"""
GONE = """
It no longer has {names}: there they are unknown, as with `llama-server` itself.
"""
PASSED = {
    "cache-ram": f"set to a share of the host's memory (at most {CACHE_RAM_MIB} MiB) where nobody sets it",
    "sse-ping-interval": f"{SSE_PING_SECONDS} where nobody sets it",
    "threads-http": f"{HTTP_THREADS} where nobody sets it",
    "log-verbosity": f"at least {VERBOSITY}: from there on the engine tells what memory it took",
    "metrics": "on for every instance: the herd's page is made of it",
    "log-colors": "off for every instance",
    "hf-token": "reaches instances by their environment, never by their command line",
    "offline": "instances whose files are cached need no network in any case",
}


def page(table: OptionTable) -> str:
    """Return the page for this option table."""
    fields = {field_extra(info)["env"]: name for name, info in Settings.model_fields.items()}
    rows = [_row(option, fields) for option in table.options]
    text = NEWER.read_text()
    newer = [_row(option, fields) for option in parse_help(text).options if option.canonical != "model"]
    gone = next(line for line in text.splitlines() if line.startswith("# gone: ")).removeprefix("# gone: ")
    names = ", ".join(f"`{name}`" for name in gone.split())
    return HEAD + "\n".join(rows) + "\n" + MORE + "\n".join(newer) + "\n" + GONE.format(names=names)


def _row(option: Option, fields: dict[str, str]) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.names, *option.negations))
    kind, effect = _meaning(option, fields)
    variable = f"`{option.env}`" if option.env else ""
    return f"| {names} | {variable} | {kind} | {effect} |"


def _meaning(option: Option, fields: dict[str, str]) -> tuple[str, str]:
    name = option.canonical
    if name in ACTIONS:
        return (
            "prints",
            "" if name != "usage" else "`llamastead up --help` is Llamastead's own",
        )
    if option.env and option.env in fields:
        setting = fields[option.env]
        return "setting", SETTINGS.get(setting, str(Settings.model_fields[setting].description))
    if name in {flag.removeprefix("--") for field in Settings.model_fields if (flag := flag_of(field))}:
        return "setting", SETTINGS.get(name, "")
    if "has been removed" in option.text:
        return "refused", "by the engine: it was removed"
    if option.arity > 1:
        return "refused", "it takes several values and can't be passed on"
    if name in OF_ONE_MODEL:
        return "model", f"ignored without those: {NOT_FOR_ALL[name]}" if name in NOT_FOR_ALL else ""
    if selects_model(name):
        return "refused", "it fetches a model by itself: name it with `-m` or `-hf`"
    ignored = {**RESERVED, **NOT_FOR_ALL, **SILENCING}
    if name in ignored:
        return "ignored", ignored[name]
    return "all models", PASSED.get(name, "")


if __name__ == "__main__":
    sys.stdout.write(page(find_engine(None).options))
