"""`llamastead up`: the whole herd of one machine in the foreground, or one role of it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from llamastead.shared.ports import addresses_of, listen_on
from llamastead.shared.settings import Settings
from llamastead.shared.settings_fields import ENV_PREFIX
from llamastead.shared.store.connect import check, connect
from llamastead.shared.store.errors import StoreUnreachable
from llamastead.supervisor.engine import Engine, find_engine
from llamastead.supervisor.selftest import self_test
from llamastead.up.announce import Announcer
from llamastead.up.folder import GatewayNote, RunLock, StartError, prepare_run_folder, remove_sockets
from llamastead.up.loop import Loop
from llamastead.up.program import Program
from llamastead.up.valkey import await_answer, await_predecessor, valkey_program

ROLES = ("supervisor", "worker", "gateway")
ROLE_COMMAND = (sys.executable, "-m", "llamastead")
REDIS_PATIENCE_S = 5.0


def run(settings: Settings, only: str | None = None) -> int:
    """Run the herd, or the role `only`, until a signal ends it; return the exit code.

    Raises SettingsError, EngineError, ListenError or StartError when it can't start; nothing runs then.
    """
    roles = ROLES if only is None else (only,)
    prepare_run_folder(settings.run_dir)
    with contextlib.ExitStack() as taken:
        if "supervisor" in roles:  # a single gateway or worker may join the herd of another `up`
            settings.check_socket_paths()
            taken.callback(RunLock(settings.run_dir).release)
            taken.callback(remove_sockets, settings.run_dir)
        listeners = []
        if "gateway" in roles:
            settings.check_tls()
            listeners = listen_on(settings.host, settings.port, reuse_port=settings.reuse_port)
            for listener in listeners:
                taken.enter_context(listener)
        engine = _tried_engine(settings) if "supervisor" in roles else None
        return Up(settings, roles, listeners, engine).run()


class Up:
    """One run of `up`: its processes, and what it tells of them."""

    def __init__(
        self,
        settings: Settings,
        roles: tuple[str, ...],
        listeners: Sequence[socket.socket],
        engine: Engine | None,
    ) -> None:
        """`listeners` are what gateways accept on, none where none runs here; `engine` is None where no
        supervisor does.
        """
        self.settings = settings
        self.embeds_redis = settings.embedded_redis and roles == ROLES
        self.listeners = listeners
        self.note: GatewayNote | None = None
        self.loop = Loop(self._programs(roles), settings.stop_timeout)
        self.announcer = Announcer(settings, engine, [url_of(one, settings) for one in listeners])

    def run(self) -> int:
        """Run until stopped and return the exit code."""
        try:
            return asyncio.run(self._run())
        finally:
            self._stopping()

    async def _run(self) -> int:
        self.announcer.begin()
        if self.listeners:
            self.note = GatewayNote(self.settings, url_of(self.listeners[0], self.settings))
        if self.embeds_redis:
            await await_predecessor(self.settings)
        return await self.loop.run(self._redis_up, self._started, self._stopping)

    async def _redis_up(self) -> None:
        if self.embeds_redis:
            await await_answer(self.settings)
        url = self.settings.redis_url
        try:
            client = connect(url, socket_timeout=REDIS_PATIENCE_S, connect_timeout=REDIS_PATIENCE_S)
            try:
                self.announcer.warn(await check(client, url))
            finally:
                await client.aclose()
        except StoreUnreachable as error:
            raise StartError(str(error)) from None

    async def _started(self) -> None:
        await self.announcer.follow(lambda: self.loop.pid_of("supervisor"))

    def _stopping(self) -> None:
        for listener in self.listeners:
            listener.close()
        for place in addresses_of(self.settings.host) if self.listeners else ():
            if place.endswith(".sock"):
                Path(place).unlink(missing_ok=True)
        if self.note is not None:
            self.note.remove()

    def _programs(self, roles: tuple[str, ...]) -> list[Program]:
        inherited = {k: v for k, v in os.environ.items() if k != f"{ENV_PREFIX}LISTEN_FD"}
        env = inherited | self.settings.child_env()
        programs = [valkey_program(self.settings)] if self.embeds_redis else []
        if "supervisor" in roles:
            # KILL, not TERM: when `up` is killed its instances stay, for the next one to adopt.
            programs.append(_role("supervisor", "supervisor", env, signal.SIGKILL))
        if "worker" in roles:
            programs.append(_role("worker", "worker", env))
        if self.listeners:
            fds = tuple(listener.fileno() for listener in self.listeners)
            listening = env | {f"{ENV_PREFIX}LISTEN_FD": " ".join(map(str, fds))}
            names = [f"gateway-{k}" for k in range(1, self.settings.gateways + 1)]
            programs += [_role("gateway", name, listening, pass_fds=fds) for name in names]
        return programs


def url_of(listener: socket.socket, settings: Settings) -> str:
    """Return the URL under which this machine reaches a gateway, `unix:<path>` for a unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    scheme = "https" if settings.ssl_cert_file else "http"
    address, port = listener.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - what we listen on
    return f"{scheme}://[{local}]:{port}" if ":" in local else f"{scheme}://{local}:{port}"


def _role(
    role: str,
    name: str,
    env: dict[str, str],
    leash: signal.Signals = signal.SIGTERM,
    pass_fds: tuple[int, ...] = (),
) -> Program:
    return Program(role, name, (*ROLE_COMMAND, role), env, leash, pass_fds)


def _tried_engine(settings: Settings) -> Engine:
    engine = find_engine(settings.engine)
    self_test(engine, settings.run_dir)
    return engine
