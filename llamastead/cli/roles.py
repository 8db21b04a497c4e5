"""Commands that run a role of the herd in the foreground: up, gateway, supervisor, worker."""

import argparse
import signal
from collections.abc import Sequence

from llamastead.cli.flags import (
    UsageError,
    add_setting_flags,
    check_engine_words,
    given_settings,
    setting_flags,
    split_words,
)
from llamastead.shared import log
from llamastead.shared.settings import Settings, load_settings

# Role → what it is, and examples.
ROLES = {
    "up": (
        "run the whole herd of this machine: Redis unless given, supervisor, worker, gateways",
        """  llamastead up --models-dir ~/models
  llamastead up --models-preset models.ini --models-max 2 --port 9000
  llamastead up --models-dir ~/models -c 8192 --jinja    llama-server options go to all instances
  llamastead up --only supervisor --redis-url redis://redis:6379""",
    ),
    "gateway": (
        "run a gateway: any number of them serve one herd",
        "  llamastead gateway --port 8081 --redis-url redis://redis:6379 --workers 4",
    ),
    "supervisor": (
        "run the supervisor: it decides, and starts and stops instances",
        "  llamastead supervisor --models-dir /models --redis-url redis://redis:6379",
    ),
    "worker": ("run a worker for long jobs", "  llamastead worker --redis-url redis://redis:6379"),
}
INSTANCES_TOO = ("up", "supervisor")  # these pass llama-server options on


def add_flags(role: str, parser: argparse.ArgumentParser) -> None:
    """Add a role's flags."""
    if role == "up":
        parser.add_argument(
            "--only", choices=("supervisor", "worker", "gateway"), help="keep just this role running"
        )
    if role in INSTANCES_TOO:
        parser.usage = f"llamastead {role} [OPTION]... [OPTION OF LLAMA-SERVER]..."
        parser.description = (
            f"{parser.description}. Any other option of llama-server is passed on to all instances."
        )
    add_setting_flags(parser)


def run(role: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run a role until it ends and return its exit code. Raises what keeps it from starting."""
    ours, rest = split_words(parser, words)
    parsed = parser.parse_args(ours)
    given = given_settings(parsed)
    settings = load_settings({**given, "instance_args": tuple(rest)} if rest else given)
    if rest and role not in INSTANCES_TOO:
        raise UsageError(f"`llamastead {role}` has no option {rest[0]} (see `llamastead {role} --help`)")
    if rest:
        from llamastead.supervisor.engine import find_engine

        check_engine_words(rest, find_engine(settings.engine).options, setting_flags())
    log.setup(settings.log_level, settings.log_format, role)
    # Until the role has its own handler: a SIGHUP never ends a process of ours.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return _start(role, settings, parsed)


def _start(role: str, settings: Settings, parsed: argparse.Namespace) -> int:
    # Imported when needed: a role should not load the code of the others.
    match role:
        case "up":
            from llamastead.up.main import run as run_up

            return run_up(settings, parsed.only)
        case "gateway":
            from llamastead.gateway.main import run as run_gateway

            return run_gateway(settings, settings.workers)
        case "supervisor":
            from llamastead.supervisor.main import run as run_supervisor

            settings.check_socket_paths()
            return run_supervisor(settings)
        case _:
            from llamastead.measure_worker.main import run as run_worker

            return run_worker(settings)
