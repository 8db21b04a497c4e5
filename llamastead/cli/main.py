"""The command `llamastead`: its subcommands, and errors in one line that says what to do next."""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from llamastead.cli import downloads, memory, models, roles
from llamastead.cli.check import check
from llamastead.cli.client import ClientError, add_client_flags
from llamastead.cli.doctor import doctor
from llamastead.cli.drill import drill
from llamastead.cli.events import events
from llamastead.cli.flags import NEAR, Parser, UsageError, add_setting_flags, given_settings, split_words
from llamastead.cli.output import complain
from llamastead.cli.redis_shell import redis_shell
from llamastead.cli.report import report
from llamastead.shared.ports import ListenError
from llamastead.shared.settings import Settings, SettingsError, load_settings
from llamastead.shared.store.errors import StoreUnreachable
from llamastead.supervisor.engine import EngineError
from llamastead.supervisor.registry.model import RegistryError
from llamastead.up.folder import StartError

USAGE = 2
CONFIG = 78  # EX_CONFIG: starting again can't help
INTERRUPTED = 130
# Words of other programs, and what they are called here.
OTHERS = {
    **dict.fromkeys(("serve", "start", "server"), "up"),
    **dict.fromkeys(("status", "list", "ls", "models", "show"), "ps"),
    **dict.fromkeys(("stop", "kill"), "unload"),
    **dict.fromkeys(("download", "install"), "pull"),
    **dict.fromkeys(("remove", "delete"), "rm"),
    **dict.fromkeys(("log", "tail"), "logs"),
    **dict.fromkeys(("validate", "config"), "check"),
}
ABOUT = "Many llama.cpp models behind one port: loaded on demand, never cutting a running answer."
EXAMPLES = """examples:
  llamastead up --models-dir ~/models            serve a folder of GGUF files on 127.0.0.1:8080
  llamastead up --models-preset models.ini -c 8192 -ngl 99
  llamastead pull ggml-org/gemma-3-4b-it-GGUF    bring a model from the Hugging Face hub
  llamastead ps                                  what is loaded
  llamastead logs -f                             what the running models say
  llamastead doctor                              can this machine run it, and if not, why

each command has its own --help."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    words = list(sys.argv[1:] if words is None else words)
    try:
        return _run(words)
    except UsageError as error:
        complain(str(error))
        return USAGE
    except (SettingsError, EngineError, RegistryError) as error:
        complain(str(error))
        return CONFIG
    except (StartError, ListenError, StoreUnreachable, ClientError) as error:
        complain(str(error))
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # whoever read us has left; the interpreter's own complaint helps nobody
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(words: list[str]) -> int:
    parser, commands = _parsers()
    name = words[0] if words else ""
    if name in roles.ROLES:
        return roles.run(name, commands[name], words[1:])
    if name == "redis":
        return _redis(commands[name], words[1:])
    if name == "check":
        return _check(commands[name], words[1:])
    if name and not name.startswith("-") and name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        meant = OTHERS.get(name) or next(iter(close), "")
        hint = f"; did you mean `llamastead {meant}`?" if meant else ""
        raise UsageError(f"there is no command '{name}'{hint} (see `llamastead --help`)")
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        raise UsageError(_unknown(commands.get(name, parser), unknown))
    if "run" not in parsed:
        parser.print_help()
        return USAGE
    run: Callable[[argparse.Namespace], int] = parsed.run
    return run(parsed)


def _unknown(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """Say which words a command does not know, and the flag that the first may have been meant for."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    close = difflib.get_close_matches(words[0].partition("=")[0], flags, n=1, cutoff=NEAR)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"unrecognized arguments: {' '.join(words)}{hint} (see `{parser.prog} --help`)"


def _redis(parser: argparse.ArgumentParser, words: list[str]) -> int:
    """Take our flags only before the first other word: what follows is redis-cli's, whatever it is called."""
    ours, rest = split_words(parser, words, leading=True)
    return redis_shell(load_settings(given_settings(parser.parse_args(ours))), rest)


def _check(parser: argparse.ArgumentParser, words: list[str]) -> int:
    """Take our flags out; what is left is an option for all instances, as for `up`."""
    ours, rest = split_words(parser, words)
    parsed = parser.parse_args(ours)
    return check(given_settings(parsed), rest, parsed)


def _with_settings(run: Callable[[Settings, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    return lambda parsed: run(load_settings(given_settings(parsed)), parsed)


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, Parser]]:
    parser = Parser(prog="llamastead", description=ABOUT, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"llamastead {version('llamastead')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)

    def add(
        name: str, text: str, epilog: str, run: Callable[[argparse.Namespace], int] | None = None
    ) -> Parser:
        made: Parser = commands.add_parser(name, help=text, description=text, epilog=f"examples:\n{epilog}")
        made.set_defaults(run=run)
        return made

    for role, (text, epilog) in roles.ROLES.items():
        roles.add_flags(role, add(role, text, epilog))

    made = add(
        "ps", "show all models, those in memory first", "  llamastead ps\n  llamastead ps --json", models.ps
    )
    _client(made)
    made = add("load", "load models and wait until they are", "  llamastead load gemma qwen", models.load)
    made.add_argument("models", nargs="+", metavar="MODEL")
    made.add_argument("--no-wait", action="store_true", help="return once the load is under way")
    _client(made, json=False)
    made = add(
        "unload",
        "unload models once they are idle",
        "  llamastead unload gemma\n  llamastead unload --all",
        models.unload,
    )
    made.add_argument("models", nargs="*", metavar="MODEL")
    made.add_argument("--all", action="store_true", help="all that are loaded")
    made.add_argument("--force", action="store_true", help="cut running answers")
    made.add_argument("--no-wait", action="store_true", help="return once the order is given")
    _client(made, json=False)
    made = add(
        "reload",
        "read preset file, folders and cache again; what runs goes on with its old settings",
        "  llamastead reload\n  llamastead reload --apply",
        models.reload,
    )
    made.add_argument(
        "--apply",
        action="store_true",
        help="restart what runs with old settings, once idle",
    )
    _client(made)
    made = add(
        "pull",
        "bring a model from the Hugging Face hub; Ctrl-C calls it off, --no-wait leaves it to the herd",
        "  llamastead pull ggml-org/gemma-3-4b-it-GGUF            the usual quantisation\n"
        "  llamastead pull ggml-org/gemma-3-4b-it-GGUF:Q8_0 --no-wait\n"
        "  llamastead pull ggml-org/gemma-3-4b-it-GGUF --json     a line of JSON for each step",
        downloads.pull,
    )
    made.add_argument("model", metavar="REPO[:QUANT]")
    made.add_argument("--no-wait", action="store_true", help="return once it is under way")
    _client(made)
    made = add(
        "rm",
        "remove models of the hub cache, their files included",
        "  llamastead rm ggml-org/gemma-3-4b-it-GGUF:Q8_0",
        downloads.rm,
    )
    made.add_argument("models", nargs="+", metavar="MODEL")
    _client(made)
    made = add(
        "logs", "print what models wrote", "  llamastead logs gemma\n  llamastead logs -f", models.logs
    )
    made.add_argument("model", nargs="?", metavar="MODEL", help="default: all that run")
    _follow(made, 100)
    _client(made, json=False)
    made = add(
        "queue",
        "show who waits for which model",
        "  llamastead queue\n  llamastead queue --json",
        models.show_queue,
    )
    _client(made)
    made = add(
        "devices",
        "show the memory of each device and who holds it",
        "  llamastead devices\n  llamastead devices --json",
        memory.devices,
    )
    _client(made)
    made = add(
        "measure",
        "show what a model takes, once it is measured",
        "  llamastead measure gemma\n  llamastead measure gemma --load",
        memory.measure,
    )
    made.add_argument("model", metavar="MODEL")
    made.add_argument("--load", action="store_true", help="load it too, for what it really takes")
    made.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="how long to wait (default 60)"
    )
    _client(made)
    made = add(
        "events",
        "print what happened in the herd, from its Redis",
        "  llamastead events -f\n  llamastead events -n 1000 --json",
        _with_settings(events),
    )
    _follow(made, 50)
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    add_setting_flags(made, ("redis_url", "redis_prefix", "run_dir"))
    made = add(
        "drill",
        "ask for models in a known order and write down what is loaded, stopped and how long it takes",
        "  llamastead drill A B C A        with room for two: who makes room, who is cold\n"
        "  llamastead drill A B A+C -o drill.json    A and C at once",
        drill,
    )
    made.add_argument("sequence", nargs="+", metavar="MODEL", help="a step; A+B asks for A and B at once")
    _output(made, "the record")
    _client(made)
    made = add(
        "report",
        "write what an operator signs: presets, engine, limits, memory, and a drill's steps",
        "  llamastead report -o report.md\n  llamastead report drill.json --json",
        report,
    )
    made.add_argument(
        "record",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="of `drill` (default: the last of the run folder)",
    )
    _output(made, "the report")
    _client(made)
    made = add(
        "doctor",
        "check whether this machine can run a herd",
        "  llamastead doctor\n  llamastead doctor --models-preset models.ini",
        _with_settings(doctor),
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    add_setting_flags(made, ("engine", "models_dir", "models_preset", "redis_url", "run_dir"))
    made = add(
        "check",
        "show what presets, folders and cache mean: each model's arguments and where each is from",
        "  llamastead check --models-preset models.ini\n"
        "  llamastead check --models-dir ~/models -c 8192 --json",
    )
    made.usage = "llamastead check [OPTION]... [OPTION OF LLAMA-SERVER]..."
    made.add_argument("--of", action="append", metavar="MODEL", help="show only this one; may be repeated")
    made.add_argument("--json", action="store_true", help="print JSON")
    add_setting_flags(made, ("engine", "models_dir", "models_preset"))
    made = add(
        "redis",
        "open redis-cli on the herd's Redis, or run one command there",
        "  llamastead redis\n  llamastead redis HGETALL llamastead:herd",
    )
    made.usage = "llamastead redis [OPTION]... [WORD OF REDIS-CLI]..."
    add_setting_flags(made, ("redis_url", "run_dir"))
    return parser, dict(commands.choices)


def _client(parser: Parser, json: bool = True) -> None:
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    add_client_flags(parser)


def _output(parser: Parser, what: str) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"write {what} there")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a number from 1 on, not '{text}'")


def _follow(parser: Parser, lines: int) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes")
    parser.add_argument(
        "-n", "--lines", type=_count, default=lines, metavar="N", help=f"how many (default {lines})"
    )
