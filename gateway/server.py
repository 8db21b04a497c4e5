"""One gateway process as an HTTP server: accepts, serves, and leaves in a fixed order."""

import asyncio
import contextlib
import ipaddress
import logging
import math
import signal
import socket
from collections.abc import Iterator

import uvicorn

from llamastead.gateway.app import App
from llamastead.gateway.edge import EdgeProtocol, SocketProtocol, look_at_clients
from llamastead.gateway.files import most_clients
from llamastead.gateway.keyfile import follow_key_file, read_keys
from llamastead.gateway.last_call import HEARD_S, accept_waiting
from llamastead.gateway.proxy import Proxy
from llamastead.gateway.runtime import Gateway, open_gateway
from llamastead.gateway.sockets import MESSAGE_BYTES, Sockets
from llamastead.shared.settings import Settings

log = logging.getLogger(__name__)

CUT_PATIENCE_S = 1.0
KEEP_ALIVE_S = 75
TICK_S = 1.0  # uvicorn's ten a second are half of what an idle gateway does


class Server(uvicorn.Server):
    """uvicorn's server with our own signals and our own order of leaving.

    First signal: readiness says 503; after the drain-wait nothing new is accepted, endless event streams end,
    requests in flight have until the stop-timeout, then they are cut. Second signal: they are cut now.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._leave = asyncio.Event()
        self.cut = 0

    def ask_stop(self) -> None:
        """Begin to leave; asked again, leave at once."""
        if self._gateway.draining.is_set():
            self.force_exit = True
            self._exit()
            return
        self._gateway.draining.set()
        asyncio.get_running_loop().call_later(self._gateway.settings.drain_wait, self._exit)

    def _exit(self) -> None:
        self.should_exit = True
        self._leave.set()

    async def main_loop(self) -> None:
        """Have the header `date` written every second, until it is time to leave."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._leave.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`, which only notes them."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leave; `cut` is then the number of requests that did not end by themselves."""
        loop = asyncio.get_running_loop()
        newcomers = [newcomer for listener in sockets or () for newcomer in accept_waiting(listener)]
        for server in self.servers:
            server.close()
        for newcomer in newcomers:
            await loop.connect_accepted_socket(self._protocol, newcomer, ssl=self.config.ssl)
        # uvicorn closes connections without a request: not one whose request is on its way.
        await asyncio.sleep(HEARD_S)
        self._gateway.events.close()
        await super().shutdown(sockets)
        self.cut = len(self.server_state.tasks)
        for task in list(self.server_state.tasks):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_PATIENCE_S):
                await asyncio.gather(*self.server_state.tasks, return_exceptions=True)

    def _protocol(self) -> EdgeProtocol:
        return EdgeProtocol(config=self.config, server_state=self.server_state, app_state={})


async def serve(settings: Settings, listeners: list[socket.socket]) -> int:
    """Serve until a signal asks to stop; return the exit status: 1 when requests had to be cut."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # what it tells at start and end, we tell
    keys = read_keys(settings)
    clients = most_clients()
    async with open_gateway(settings) as gateway:
        gateway.pools.most = max(1, clients // 2)  # whatever one instance takes, the others have room
        parts = (gateway.catalog, gateway.admission, gateway.pools, settings)
        proxy = Proxy(*parts, gateway.conversations, gateway.tally)
        config = uvicorn.Config(
            App(gateway, proxy, keys, Sockets(proxy, gateway.admission, settings)),
            loop="none",
            http=EdgeProtocol,
            ws=SocketProtocol,
            ws_max_size=MESSAGE_BYTES,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            ssl_keyfile=settings.ssl_key_file,
            ssl_certfile=settings.ssl_cert_file,
            limit_concurrency=clients,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(settings.stop_timeout),
        )
        server = Server(config, gateway)
        gateway.clients.connections, gateway.clients.limit = server.server_state.connections, clients
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.ask_stop)
        where = ", ".join(map(_address, listeners))
        log.info("gateway listens", extra={"gateway": gateway.id, "address": where})
        if not keys.inference and any(reaches_others(one.getsockname()) for one in listeners):
            log.warning("no key is asked for, and other machines may reach this address: set --api-key")
        async with asyncio.TaskGroup() as tasks:
            beside = (
                tasks.create_task(follow_key_file(settings, keys)),
                tasks.create_task(look_at_clients(server.server_state.connections)),
            )
            await server.serve(listeners)
            for task in beside:
                task.cancel()
        await gateway.pools.close()
    if server.cut:
        log.warning("requests were cut", extra={"requests": server.cut})
    return 1 if server.cut else 0


def reaches_others(name: object) -> bool:
    """Return whether a socket of this name is for other machines too: on TCP, and not on loopback."""
    return isinstance(name, tuple) and not ipaddress.ip_address(name[0].partition("%")[0]).is_loopback


def _address(listener: socket.socket) -> str:
    name = listener.getsockname()
    return name if isinstance(name, str) else f"{name[0]}:{name[1]}"
