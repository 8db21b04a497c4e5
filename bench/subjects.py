"""What is measured: the engine itself, and routers and proxies before engines like it, each a process."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.client import HOST, ask, get
from bench.proc import command_line
from llamastead.up.processes import descendants_of

ENGINE_ARGS = ("--parallel", "32", "--ctx-size", "16384", "--threads", "1")
START_S = 60.0
STOP_S = 20.0
_ROLES = ("gateway", "supervisor", "worker")

# An engine closes a kept connection after 100 requests or 5 s.
_NGINX = """\
daemon off; worker_processes 1; user root; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_max_body_size 64m; client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy; fastcgi_temp_path {folder}/nginx-1;
  uwsgi_temp_path {folder}/nginx-2; scgi_temp_path {folder}/nginx-3;
  upstream engine {{
    server 127.0.0.1:{upstream};
    keepalive 64; keepalive_requests 90; keepalive_timeout 4s;
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
_CADDY = """\
{{
  admin off
  auto_https off
}}
http://:{port} {{
  bind 127.0.0.1
  reverse_proxy 127.0.0.1:{upstream} {{
    flush_interval -1
  }}
}}
"""


@dataclass
class Subject:
    """Something that listens on `port`; `parts` are the pids between client and engine, by role, now."""

    name: str
    port: int
    parts: Callable[[], Mapping[str, Sequence[int]]]
    run_dir: Path | None = None

    def pids(self) -> list[int]:
        """Return all pids whose work is counted."""
        return [pid for pids in self.parts().values() for pid in pids]


@dataclass
class Workshop:
    """Where subjects are made: the engine, a folder of models, and a scratch folder with a short path."""

    engine: Path
    models: Path
    folder: Path
    limits: Sequence[str] = ("--models-max", "1")

    @contextlib.asynccontextmanager
    async def direct(self) -> AsyncIterator[Subject]:
        """Run the engine alone, on one of the models."""
        model = min(self.models.glob("*.gguf"))
        port = _free_port()
        words = [self.engine, "--model", model, "--host", HOST, "--port", port, *ENGINE_ARGS]
        async with self._running("direct", words, port):
            yield Subject("direct", port, dict)

    @contextlib.asynccontextmanager
    async def router(self, *more: object) -> AsyncIterator[Subject]:
        """Run llama-server's own router."""
        port = _free_port()
        words = [self.engine, *self._sources(more), *self.limits, "--host", HOST, "--port", port]
        async with self._running("router", [*words, *ENGINE_ARGS], port) as pid:
            yield Subject("router", port, lambda: {"router": [pid]})

    @contextlib.asynccontextmanager
    async def llamastead(self, *more: object, name: str = "llamastead") -> AsyncIterator[Subject]:
        """Run a whole herd, with an embedded Redis."""
        port = _free_port()
        run_dir = Path(tempfile.mkdtemp(prefix="r", dir=self.folder))
        words = [sys.executable, "-m", "llamastead", "up", *self._sources(more), *self.limits]
        words += ["--engine", self.engine, "--run-dir", run_dir, "--min-residence", "0", "--port", port]
        async with self._running(name, [*words, *ENGINE_ARGS], port, "/readyz") as pid:
            # A gateway is ready for its own part; models are there once the supervisor has read them.
            await until_listed(name, port, 1)
            yield Subject(name, port, lambda: herd_parts(pid), run_dir)

    @contextlib.asynccontextmanager
    async def proxy(self, name: str, upstream: int) -> AsyncIterator[Subject]:
        """Run `nginx`, `caddy` or `httpx` as a plain proxy of the engine on port `upstream`."""
        port = _free_port()
        words: list[object]
        match name:
            case "nginx":
                config = self.folder / "nginx.conf"
                config.write_text(_NGINX.format(folder=self.folder, port=port, upstream=upstream))
                words = ["nginx", "-p", self.folder, "-c", config, "-e", self.folder / "nginx.log"]
            case "caddy":
                config = self.folder / "Caddyfile"
                config.write_text(_CADDY.format(port=port, upstream=upstream))
                words = ["caddy", "run", "--config", config, "--adapter", "caddyfile"]
            case _:
                words = [sys.executable, "-m", "bench.httpx_proxy", port, upstream]
        async with self._running(name, words, port) as pid:
            yield Subject(name, port, lambda: {name: [pid, *descendants_of(pid, set())]})

    def _sources(self, more: Iterable[object]) -> list[object]:
        given = list(more)
        return given if "--models-preset" in given else ["--models-dir", self.models, *given]

    @contextlib.asynccontextmanager
    async def _running(
        self, name: str, words: Sequence[object], port: int, healthy: str = "/health"
    ) -> AsyncIterator[int]:
        """Run a command until the context ends; yield its pid once `healthy` answers 200."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *map(str, words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environment(),
                start_new_session=True,
            )
        try:
            if not await answers(port, healthy, lambda: process.returncode is None):
                raise RuntimeError(f"{name} did not start; its last words:\n{log.read_text()[-2000:]}")
            yield process.pid
        finally:
            await _stop(process)

    def _environment(self) -> dict[str, str]:
        """Return an environment in which nobody finds other models, settings or state."""
        ours = ("LLAMA_", "LLAMASTEAD_", "RQ_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        empty = str(self.folder / "empty")
        return kept | dict.fromkeys(("LLAMA_CACHE", "HF_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), empty)


def installed(name: str) -> bool:
    """Tell whether a program is on PATH."""
    return shutil.which(name) is not None


def herd_parts(up: int) -> dict[str, list[int]]:
    """Return the processes below `llamastead up` by role; engines are none of ours."""
    parts: dict[str, list[int]] = {"up": [up]}
    for pid in descendants_of(up, set()):
        words = command_line(pid)
        if not words or "llama-server" in words[0]:
            continue
        rest = "redis" if "valkey" in words[0] or "redis" in words[0] else "holder"
        role = next((name for name in _ROLES if name in words), rest)
        parts.setdefault(role, []).append(pid)
    return parts


async def answers(port: int, path: str, alive: Callable[[], bool], patience_s: float = START_S) -> bool:
    """Wait until GET `path` is answered 200; False when that takes too long or `alive` says no."""
    until = time.monotonic() + patience_s
    while alive() and time.monotonic() < until:
        with contextlib.suppress(OSError):
            if (await ask(port, get(path))).status == 200:
                return True
        await asyncio.sleep(0.002)
    return False


async def until_listed(name: str, port: int, models: int) -> None:
    """Wait until so many models are listed; TimeoutError when they are not."""
    until = time.monotonic() + START_S
    while len((await ask(port, get("/v1/models"))).entries()) < models:
        if time.monotonic() > until:
            raise TimeoutError(f"{name} did not list {models} models within {START_S:.0f} s")
        await asyncio.sleep(0.02)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a process politely, then whatever is left of it and below it."""
    if process.returncode is not None:
        return
    below = descendants_of(process.pid, set())
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        below |= descendants_of(process.pid, set()) | {process.pid}
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
