"""From a model to a start order for its holder: command line, environment, files."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from llamastead.shared.addresses import Address, TcpAddress, UnixAddress
from llamastead.shared.files import missing, some_of
from llamastead.shared.secret import instance_key
from llamastead.shared.settings import NEVER_S
from llamastead.supervisor.engine import Engine
from llamastead.supervisor.logfiles import log_path
from llamastead.supervisor.placement import ANYWHERE, Spot
from llamastead.supervisor.registry.model import ModelEntry
from llamastead.supervisor.registry.options import OptionTable
from llamastead.supervisor.registry.render import command_words
from llamastead.supervisor.registry.reserved import SILENCING, is_for_instances, selects_model

SOCKET_PATH_BYTES = 107  # what a unix socket's address can hold
LOG_BYTES = 4 * 1024 * 1024  # of a model's log file, and as much again of the one before
VERBOSITY = 4  # from here on the engine tells its buffer sizes, its only word on the memory it took
# The engine's default of 8192 MiB per instance exhausts hosts that serve several models.
CACHE_RAM_MIB = 1024
# A stopped stream lets its worker go only at the next ping; the engine's default is 30 s.
SSE_PING_SECONDS = 5
# A kept connection occupies one of the engine's HTTP threads. It starts more of them only when none is idle
# at the moment a connection arrives, so what comes in one burst beyond its eight waits, /health too, until a
# kept one closes: for seconds.
HTTP_THREADS = 128

_PASSED = frozenset(
    {"PATH", "HOME", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH"}
    # Where and how an instance finds the model of `hf-repo`.
    | {"LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_TOKEN"}
    | {"HF_ENDPOINT", "MODEL_ENDPOINT", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    | {name for proxy in ("http_proxy", "https_proxy", "no_proxy") for name in (proxy, proxy.upper())}
)
DEVICE_PREFIXES = (
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "AMD_", "VK_", "GGML_"),
    *("ONEAPI_", "SYCL_", "ZE_", "ZES_"),
)
"""Variables that say which devices there are and how they are used; none of them is a secret."""
_PASSED_PREFIXES = (*DEVICE_PREFIXES, "LC_", "OMP_", "GOMP_")


class LaunchError(Exception):
    """This model can't be started as configured; the message says why and what to do."""


class LaunchSettings(Protocol):
    """The settings that a launch needs, in seconds."""

    @property
    def stop_timeout(self) -> float: ...
    @property
    def orphan_grace(self) -> float: ...


@dataclass(frozen=True)
class InstanceSpec:
    """Everything a holder needs to start one instance; `message` is the `spec` of its `start` order.

    `address` is where it listens; `socket` is its unix socket, or where that would be, in its folder.
    `spec_hash` tells what is started apart from what another spec would start, without holding the key.
    `place` is the device it is put on whole, `needs` what is booked for it: kept by its holder for a
    supervisor whose Redis has lost that.
    """

    instance: str
    model: str
    nonce: str
    revision: str
    spec_hash: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    socket: str
    address: str
    stop_timeout_s: float
    orphan_grace_s: float
    log_path: str
    log_bytes: int
    place: str = ""
    needs: Mapping[str, int] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The instance's folder in the run folder."""
        return Path(self.socket).parent

    def message(self) -> dict[str, Any]:
        """Return the spec as JSON-ready values."""
        return {**asdict(self), "argv": list(self.argv), "env": dict(self.env), "needs": dict(self.needs)}


def build_spec(
    entry: ModelEntry,
    engine: Engine,
    instance: str,
    nonce: str,
    run_dir: Path,
    herd_secret: bytes,
    settings: LaunchSettings,
    environ: Mapping[str, str],
    *,
    context: int | None = None,
    spot: Spot = ANYWHERE,
    spared_mib: Mapping[str, int] = {},
    fit: bool = True,
    cache_ram_mib: int = CACHE_RAM_MIB,
    listen: TcpAddress | None = None,
) -> InstanceSpec:
    """Return how to start `entry` as `instance`. Nothing on disk is changed.

    `engine` is the one of the entry if it names its own; `environ` is the supervisor's environment; `context`
    is what memory allows where the entry leaves that open, `spot` which devices it is shown,
    `spared_mib` what is to stay free of those, by the ledger's names,
    `fit` whether the engine is to fit what is left open into memory;
    `cache_ram_mib` is for entries that say nothing;
    `listen` is where on TCP it listens instead of its unix socket.
    Raises LaunchError for a model without a model or with files missing, an option that this engine lacks, a
    socket path that is too long.
    """
    folder = run_dir / "i" / instance
    socket = str(folder / "e.sock")
    address: Address = listen or UnixAddress(socket)
    if len(os.fsencode(socket)) > SOCKET_PATH_BYTES:
        raise LaunchError(f"{socket} is too long for a unix socket; use a shorter --run-dir")
    if not any(map(selects_model, entry.options)):
        raise LaunchError(f"[{entry.name}] names no model; add `model = PATH` to its section")
    # The engine would only find out after it has read the weights.
    if gone := missing(entry.files[1:]):
        raise LaunchError(f"{entry.name} can't be loaded: {some_of(gone)} not found")
    if unknown := [name for name in entry.options if name not in engine.options]:
        raise LaunchError(f"{engine.path} of [{entry.name}] has no option --{unknown[0]}")
    options = instance_options(entry, engine.options, address, environ, cache_ram_mib)
    options = spot.placed(options)
    if not fit and "fit" in engine.options and engine.options["fit"].env not in environ:
        options.setdefault("fit", "off")
    if "fit-target" in engine.options and engine.options["fit-target"].env not in environ:
        # Its own default would have it leave out layers for a margin that is not ours.
        left = [str(spared_mib[own]) for own in spot.names.values() if own in spared_mib]
        if left:
            options.setdefault("fit-target", ",".join(left if len({*left}) > 1 else left[:1]))
    if context is not None and options.get("ctx-size", "0") == "0":
        options["ctx-size"] = str(context)
    words = command_words(options, engine.options)
    argv = (str(engine.path), *words)
    env = {**spot.environment(instance_environment(environ, engine.options), engine.options), **entry.env}
    env["XDG_CONFIG_HOME"] = str(
        folder / "config"
    )  # never made: the engine finds no settings of its own there
    spec_hash = hashlib.sha256(json.dumps([argv, sorted(env.items())]).encode()).hexdigest()[:16]
    env["LLAMA_API_KEY"] = instance_key(herd_secret, instance, nonce)
    return InstanceSpec(
        instance=instance,
        model=entry.name,
        nonce=nonce,
        revision=entry.revision,
        spec_hash=spec_hash,
        argv=argv,
        env=env,
        cwd=str(Path.cwd()),
        socket=socket,
        address=str(address),
        stop_timeout_s=settings.stop_timeout if entry.stop_timeout is None else entry.stop_timeout,
        orphan_grace_s=settings.orphan_grace,
        log_path=str(log_path(run_dir, entry.name)),
        log_bytes=LOG_BYTES,
    )


def instance_options(
    entry: ModelEntry,
    table: OptionTable,
    address: Address,
    environ: Mapping[str, str],
    cache_ram_mib: int = CACHE_RAM_MIB,
) -> dict[str, str]:
    """Return the entry's options with what Llamastead forces, and what it only sets where nobody has."""
    defaults = {
        "cache-ram": str(cache_ram_mib),
        "sse-ping-interval": str(SSE_PING_SECONDS),
        "threads-http": str(HTTP_THREADS),
    }
    unsaid = {
        name: value for name, value in defaults.items() if name in table and table[name].env not in environ
    }
    where = (
        {"host": address.path}
        if isinstance(address, UnixAddress)
        else {"host": address.host, "port": str(address.port)}
    )
    forced = {
        **where,
        "alias": entry.name,
        "metrics": "1",
        "log-verbosity": str(_verbosity(entry.options.get("log-verbosity"))),
        "log-colors": "off",
        "cors-origins": "localhost",
    }
    options = {name: value for name, value in entry.start_options.items() if name not in SILENCING}
    if options.get("timeout") in ("0", "-1"):  # no limit here; the engine would give up at once
        options["timeout"] = f"{NEVER_S:.0f}"
    return unsaid | options | {name: value for name, value in forced.items() if name in table}


def _verbosity(asked: str | None) -> int:
    try:
        return max(VERBOSITY, int(asked or VERBOSITY))
    except ValueError:
        return VERBOSITY


def instance_environment(environ: Mapping[str, str], table: OptionTable) -> dict[str, str]:
    """Return what of the supervisor's environment reaches an instance, and the switches of a managed child.

    Of the engine's own variables only those pass that set an option of instances: no address, key,
    certificate, nor anything of the router or of one model.
    """
    passed = {name: value for name, value in environ.items() if _passes(name, table)}
    return {
        **passed,
        "LLAMA_SERVER_ROUTER_PORT": "0",
        "GGML_NO_BACKTRACE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which the ledger names GPUs
    }


def _passes(name: str, table: OptionTable) -> bool:
    if name in _PASSED or name.startswith(_PASSED_PREFIXES):
        return True
    option = table.of_variable(name)
    return option is not None and is_for_instances(option.canonical)
