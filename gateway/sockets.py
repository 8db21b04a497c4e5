"""WebSockets: a client's and one to its model's instance, messages and closes passed between them both ways.

The socket's claim is given back while neither side says anything for long, and taken again with the next
message; the socket itself stays open as long as the instance does.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from llamastead.gateway.body import ClientGone, Receive
from llamastead.gateway.headers import our_headers, socket_headers
from llamastead.gateway.pings import Send
from llamastead.gateway.proxy import ADDRESS_TRIES, Proxy, wrong_key
from llamastead.gateway.seams import Admission, Claim, NoLoad, Scope, request_id
from llamastead.gateway.upstream import AddressRefused
from llamastead.gateway.watch import ClientWatch
from llamastead.shared.addresses import TcpAddress, UnixAddress, outlives_its_instance, parse_address
from llamastead.shared.errors import ApiError
from llamastead.shared.settings import Settings
from llamastead.shared.words import UseKind

log = logging.getLogger(__name__)

MESSAGE_BYTES = 16 * 1024 * 1024
"""The largest message either way."""

_CLOSE_S = 1.0  # an instance on this network has to answer a close; what it still says is for nobody
_HELD_MESSAGES = 2  # of the instance, before reading from it pauses
_GOING_AWAY, _INTERNAL, _RESTART = 1001, 1011, 1012
# What a close is told as where no close with a code came.
_UNSAID: Mapping[int, int] = {1005: 1000, 1006: _GOING_AWAY}


class Sockets:
    """ASGI endpoint for every WebSocket that an instance answers."""

    def __init__(self, proxy: Proxy, admission: Admission[Any], settings: Settings) -> None:
        """`proxy` finds the model and says whether it may be loaded."""
        self._proxy = proxy
        self._admission = admission
        self._idle_s = settings.socket_idle
        self._limit_s = settings.socket_limit
        self._connect_s, self._open_s = settings.connect_timeout, settings.first_byte_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket to its end. Requires: authenticated, connect received, state as for HTTP.

        Raises ApiError before the socket is accepted.
        """
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        model = await self._proxy.find_model(None, query)
        self._proxy.check_loading(model, scope, query)
        loop = asyncio.get_running_loop()
        claim, instance = None, None
        no_load = partial(self._proxy.no_load, scope, query)
        try:
            async with ClientWatch(receive, loop):
                claim = await self._admission.acquire(
                    model.name, UseKind.INFERENCE, request_id(scope), no_load
                )
                claim, instance = await self._connect(claim, scope, model.name, no_load)
            headers = our_headers(claim, request_id(scope))
            await send({"type": "websocket.accept", "subprotocol": instance.subprotocol, "headers": headers})
            await _Pair(self._admission, model.name, no_load, claim, instance, scope, receive, send).run(
                self._idle_s, self._limit_s
            )
        except (ClientGone, OSError):
            log.debug("client gone", extra={"request_id": request_id(scope)})
        finally:
            if claim is not None:
                claim.close()
            if instance is not None:
                await instance.close(_GOING_AWAY)

    async def _connect(
        self, claim: Claim, scope: Scope, model: str, no_load: Callable[[], NoLoad | None]
    ) -> tuple[Claim, ClientConnection]:
        """Return the socket at the claimed instance, or at the one that takes its place, and its claim."""
        key_refused = False
        try:
            for _ in range(ADDRESS_TRIES):
                try:
                    return claim, await self._open(claim, scope)
                except _KeyRefused:
                    if key_refused or not outlives_its_instance(claim.address):
                        raise wrong_key(claim) from None
                    # Its instance has ended, and another one listens there. Twice it is the key.
                    key_refused = True
                except AddressRefused:
                    pass
                claim = await self._admission.refused(claim, no_load)
            raise ApiError(503, f"no instance of '{model}' could be reached", retry_after=1)
        except BaseException:
            # Whoever called knows only the claim that was traded in.
            claim.close()
            raise

    async def _open(self, claim: Claim, scope: Scope) -> ClientConnection:
        target = scope["raw_path"].decode("ascii")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("ascii")
        options: dict[str, Any] = {
            "additional_headers": socket_headers(scope["headers"], claim.key, request_id(scope)),
            "subprotocols": [Subprotocol(name) for name in scope["subprotocols"]] or None,
            "user_agent_header": None,
            "compression": None,
            "proxy": None,
            "open_timeout": self._open_s if self._open_s > 0 else None,
            "close_timeout": _CLOSE_S,
            "ping_interval": None,
            "max_size": MESSAGE_BYTES,
            "max_queue": _HELD_MESSAGES,
        }
        try:
            match parse_address(claim.address):
                case UnixAddress(path):
                    return await unix_connect(path, f"ws://localhost{target}", **options)
                case TcpAddress() as where:
                    async with asyncio.timeout(self._connect_s if self._connect_s > 0 else None):
                        return await connect(f"ws://{where.authority}{target}", **options)
        except InvalidStatus as refusal:
            if refusal.response.status_code == 401:
                raise _KeyRefused from None
            raise _as_error(refusal) from None
        except (ConnectionRefusedError, FileNotFoundError) as problem:
            raise AddressRefused(str(problem)) from None
        except (InvalidHandshake, EOFError, OSError) as problem:
            _log_failure(claim, scope, problem)
            raise ApiError(502, f"the model's server opened no WebSocket: {problem}") from problem


class _KeyRefused(Exception):  # noqa: N818
    """Who listens at the address wants another key."""


class _Pair:
    """Two open sockets and the claim they share; `no_load` goes for taking it again, too."""

    def __init__(
        self,
        admission: Admission[Any],
        model: str,
        no_load: Callable[[], NoLoad | None],
        claim: Claim,
        instance: ClientConnection,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._admission = admission
        self._model = model
        self._no_load = no_load
        self._claim: Claim | None = claim
        self._instance_id = claim.instance
        self._instance = instance
        self._scope = scope
        self._receive = receive
        self._send = send
        self._spoke_at = 0.0
        self._claiming = asyncio.Lock()

    async def run(self, idle_s: float, limit_s: float) -> None:
        """Pass messages until either side closes, the instance goes, or the socket is `limit_s` old."""
        loop = asyncio.get_running_loop()
        self._spoke_at = loop.time()
        parts = [self._from_client(), self._from_instance()]
        if idle_s > 0:
            parts.append(self._watch_silence(idle_s))
        tasks = [loop.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=limit_s if limit_s > 0 else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                await self._close(_GOING_AWAY, f"open for {limit_s:g} s (socket-limit)")
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            if self._claim is not None:
                self._claim.close()
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, OSError | ConnectionClosed):
                raise end

    async def _from_client(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code") or 1005
                await self._instance.close(_UNSAID.get(code, code), message.get("reason") or "")
                return
            if not await self._speaks():
                return
            text = message.get("text")
            await self._instance.send(message["bytes"] if text is None else text)

    async def _from_instance(self) -> None:
        try:
            while True:
                message = await self._instance.recv()
                if not await self._speaks():
                    return
                kind = "text" if isinstance(message, str) else "bytes"
                await self._send({"type": "websocket.send", kind: message})
        except ConnectionClosed as end:
            sent = end.rcvd or end.sent
            if sent is not None:
                await self._close(_UNSAID.get(sent.code, sent.code), sent.reason)
            elif self._claim is None:
                await self._close(_RESTART, "the model was stopped while this socket was silent")
            else:
                _log_failure(self._claim, self._scope, end)
                await self._close(_INTERNAL, "the model's server broke off")

    async def _speaks(self) -> bool:
        """Note a message, and take a claim again where none is held. False: the instance is not to be had."""
        self._spoke_at = asyncio.get_running_loop().time()
        if self._claim is not None:
            return True
        async with self._claiming:
            if self._claim is None:
                try:
                    claim = await self._admission.acquire(
                        self._model, UseKind.INFERENCE, request_id(self._scope), self._no_load
                    )
                except ApiError as refusal:
                    await self._close(_RESTART, refusal.message)
                    return False
                if claim.instance != self._instance_id:
                    claim.close()
                    await self._close(_RESTART, "the model was loaded anew while this socket was silent")
                    return False
                self._claim = claim
        return True

    async def _watch_silence(self, idle_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            left = self._spoke_at + idle_s - loop.time()
            if left <= 0:
                if self._claim is not None:
                    claim, self._claim = self._claim, None
                    claim.close()
                left = idle_s
            await asyncio.sleep(left)

    async def _close(self, code: int, reason: str) -> None:
        # A reason has 123 bytes in a close.
        short = reason.encode()[:123].decode(errors="ignore")
        with suppress(RuntimeError):  # the client closed meanwhile
            await self._send({"type": "websocket.close", "code": code, "reason": short})


def _as_error(refusal: InvalidStatus) -> ApiError:
    """Return what an instance said instead of opening a socket."""
    said = (refusal.response.body or b"").decode(errors="replace")[:1000]
    return ApiError(
        refusal.response.status_code, said or f"the model's server answered {refusal.response.status_code}"
    )


def _log_failure(claim: Claim, scope: Scope, problem: Exception) -> None:
    log.warning(
        "instance failed a socket",
        extra={"instance": claim.instance, "request_id": request_id(scope), "problem": str(problem)},
    )
