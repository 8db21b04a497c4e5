"""Commands that run a role of the herd in the foreground: up, gateway, supervisor, worker."""

import argparse
import logging
import signal
from collections.abc import Mapping, Sequence

from llamastead.cli.flags import (
    UsageError,
    add_setting_flags,
    given_settings,
    split_words,
)
from llamastead.shared import log
from llamastead.shared.faults import VARIABLE, faults_folder
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
_ALL = frozenset({"run_dir", "redis_url", "redis_prefix", "host_id", "log_level", "log_format"})
# Role → the settings that mean something to it. The others are taken, too: one set of flags may serve all.
SETTINGS: Mapping[str, frozenset[str]] = {
    "up": frozenset(Settings.model_fields),
    "gateway": _ALL
    | {"host", "port", "reuse_port", "workers", "stop_timeout", "drain_wait"}
    | {"api_keys", "api_key_file", "admin_keys", "probe_keys", "ssl_key_file", "ssl_cert_file"}
    | {"api_prefix", "static_path", "ui_config", "ui_config_file"}
    | {"cors_origins", "cors_methods", "cors_headers", "cors_credentials"}
    | {"models_max", "models_autoload", "queue_timeout", "ping_delay", "ping_interval"}
    | {"timeout", "connect_timeout", "first_byte_timeout", "idle_timeout", "total_timeout"}
    | {"detach_limit", "socket_idle", "socket_limit"},
    "supervisor": _ALL
    | {"models_dir", "models_preset", "models_max", "models_memory_margin", "models_autoload"}
    | {"device_memory", "engine", "ui", "instance_listen", "instance_ports", "orphan_grace", "stop_timeout"}
    | {"max_wait", "min_residence", "unload_after", "queue_limit", "queue_limit_total", "queue_timeout"}
    | {"detach_limit", "stall_timeout"},
    "worker": _ALL,
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
    if role != "up":
        parser.description = f"{parser.description}. Settings of other roles are taken and mean nothing here."
    add_setting_flags(parser, shown=SETTINGS[role])


def run(role: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run a role until it ends and return its exit code. Raises what keeps it from starting."""
    ours, rest = split_words(parser, words)
    parsed = parser.parse_args(ours)
    given = given_settings(parsed)
    if rest and role not in INSTANCES_TOO:
        raise UsageError(f"`llamastead {role}` has no option {rest[0]} (see `llamastead {role} --help`)")
    settings = load_settings(given)
    if rest:
        from llamastead.cli.engine_words import ended_by, with_engine_words
        from llamastead.supervisor.engine import find_engine

        engine = find_engine(settings.engine)
        if (code := ended_by(rest, engine)) is not None:
            return code
        settings = with_engine_words(given, rest, engine)
    log.setup(settings.log_level, settings.log_format, role)
    if folder := faults_folder():
        logging.getLogger(__name__).warning("faults may be ordered in %s (%s)", folder, VARIABLE)
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
