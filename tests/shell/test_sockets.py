"""WebSockets through the gateway: a real uvicorn, a real client, and a scripted instance on a unix socket."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from app_kit import NotingProxy
from byte_path_kit import Setting, proxy_for
from served_kit import Server
from waiting import PATIENCE_S
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response

from llamastead.gateway.app import App
from llamastead.gateway.auth import Keys
from llamastead.gateway.edge import EdgeProtocol, SocketProtocol
from llamastead.gateway.sockets import MESSAGE_BYTES, Sockets
from llamastead.shared.errors import ApiError
from llamastead.shared.settings import Settings
from llamastead.shared.words import UseKind

Handler = Callable[[ServerConnection], Awaitable[None]]


async def echo(connection: ServerConnection) -> None:
    """Say everything back; close with what `close CODE REASON` says."""
    async for message in connection:
        if isinstance(message, str) and message.startswith("close "):
            _, code, reason = message.split(" ", 2)
            await connection.close(int(code), reason)
        else:
            await connection.send(message)


class FakeGateway:
    """As much of a gateway as an application needs to serve sockets."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.catalog = self.store = None


@asynccontextmanager
async def served(setting: Setting, *keys: str, **settings: Any) -> AsyncIterator[str]:
    """Serve the application on a loopback port; yield its address. With keys `probe` is one."""
    made = Settings(**settings)
    sockets = Sockets(setting.proxy, setting.admission, made)
    known = Keys(keys, probe=("probe",) if keys else ())
    app = App(FakeGateway(made), NotingProxy(), known, sockets)  # type: ignore[arg-type]
    config = uvicorn.Config(
        app,
        http=EdgeProtocol,
        ws=SocketProtocol,
        lifespan="off",
        log_config=None,
        ws_max_size=MESSAGE_BYTES,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
            await setting.pools.close()


@asynccontextmanager
async def instance(path: Path, handler: Handler = echo, **more: Any) -> AsyncIterator[list[ServerConnection]]:
    """Run an instance that speaks WebSocket; yield the connections it had."""
    had: list[ServerConnection] = []

    async def noting(connection: ServerConnection) -> None:
        had.append(connection)
        await handler(connection)

    async with unix_serve(noting, path, compression=None, max_size=None, close_timeout=1, **more):
        yield had


async def refused(address: str, target: str, **more: Any) -> tuple[int, Any]:
    """Open a socket that is refused; return status and error."""
    with pytest.raises(InvalidStatus) as refusal:
        await connect(f"ws://{address}{target}", proxy=None, **more)
    response = refusal.value.response
    return response.status_code, json.loads(response.body or b"{}")["error"]


async def closed(client: ClientConnection) -> tuple[int, str]:
    """Read until the socket closes; return code and reason."""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionClosed):
            async for _ in client:
                pass
    assert client.close_code is not None
    return client.close_code, client.close_reason or ""


async def test_messages_pass_both_ways(path: Path) -> None:
    """Text, bytes and a large message; path, query and headers as sent, but for what is the gateway's own."""
    setting = proxy_for(f"unix:{path}")
    async with instance(path) as had, served(setting, "client-key") as address:
        headers = {"Authorization": "Bearer client-key", "X-Trace": "t1", "Cookie": "c=1"}
        async with connect(
            f"ws://{address}/v1/realtime?model=n&a=b%20c",
            additional_headers=headers,
            max_size=None,
            proxy=None,
        ) as client:
            for message in ("text ü", b"\x00\xff", b"x" * (4 << 20), ""):
                await client.send(message)
                assert await client.recv() == message
            assert client.response is not None
            assert client.response.headers["x-llamastead-instance"] == "host-1-0"
            assert client.response.headers["x-llamastead-path"] == "hot"
            assert setting.admission.open_claims == 1
        request = had[0].request
        assert request is not None
        assert request.path == "/v1/realtime?model=n&a=b%20c"
        assert request.headers.get_all("Authorization") == ["Bearer instance-key"]
        assert request.headers["X-Trace"] == "t1"
        assert "Cookie" not in request.headers
        assert setting.admission.asked[0][:2] == ("m", UseKind.INFERENCE)
        await had[0].wait_closed()
    assert setting.admission.open_claims == 0


@pytest.mark.parametrize("code", [1000, 1001, 1011, 3000, 4999])
async def test_close_codes_pass_both_ways(path: Path, code: int) -> None:
    """Close from either side with a code and a reason: the other side gets both."""
    setting = proxy_for(f"unix:{path}")
    async with instance(path) as had, served(setting) as address:
        client = await connect(f"ws://{address}/x?model=m", proxy=None)
        await client.close(code, "the client's ü")
        async with asyncio.timeout(PATIENCE_S):
            await had[0].wait_closed()
        assert (had[0].close_code, had[0].close_reason) == (code, "the client's ü")
        client = await connect(f"ws://{address}/x?model=m", proxy=None)
        await client.send(f"close {code} the server's")
        assert await closed(client) == (code, "the server's")
    assert setting.admission.open_claims == 0


async def test_a_client_that_vanishes_is_told_as_going_away(path: Path) -> None:
    """Reset the client's connection: the instance's socket closes with 1001 and the claim goes back."""
    setting = proxy_for(f"unix:{path}")
    async with instance(path) as had, served(setting) as address:
        client = await connect(f"ws://{address}/x?model=m", proxy=None)
        client.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            await had[0].wait_closed()
        assert had[0].close_code in (1000, 1001)
    assert setting.admission.open_claims == 0


async def test_an_instance_that_dies_is_told_as_an_error(path: Path) -> None:
    """The instance breaks off without a close: 1011, and the claim goes back."""

    async def dies(connection: ServerConnection) -> None:
        await connection.recv()
        connection.transport.abort()

    setting = proxy_for(f"unix:{path}")
    async with instance(path, dies), served(setting) as address:
        client = await connect(f"ws://{address}/x?model=m", proxy=None)
        await client.send("now")
        code, reason = await closed(client)
        assert (code, "broke off" in reason) == (1011, True)
    assert setting.admission.open_claims == 0


async def test_subprotocols_are_offered_and_chosen_by_the_instance(path: Path) -> None:
    """Offer two: the instance sees both in order and chooses the second; offer one it has not: none."""
    setting = proxy_for(f"unix:{path}")
    async with (
        instance(path, subprotocols=["second"]) as had,
        served(setting) as address,
    ):
        offered = ["first", "second"]
        async with connect(f"ws://{address}/x?model=m", subprotocols=offered, proxy=None) as client:  # type: ignore[arg-type]
            assert client.subprotocol == "second"
        assert had[0].request is not None
        assert had[0].request.headers["Sec-WebSocket-Protocol"] == "first, second"


async def test_c168_what_is_refused_is_refused_before_the_upgrade(path: Path) -> None:
    """No key, no model, an unknown one, autoload off, one of our own paths, a full queue: HTTP answers with
    their own status, and nothing is claimed but by what may load."""
    setting = proxy_for(f"unix:{path}", autoload=False)
    async with served(setting, "key") as address:
        key = {"additional_headers": {"X-Api-Key": "key"}}
        assert (await refused(address, "/x?model=m"))[0] == 401
        assert await refused(address, "/x?model=m", additional_headers={"X-Api-Key": "no"}) == (
            401,
            {"code": 401, "message": "Invalid API Key", "type": "authentication_error"},
        )
        status, error = await refused(address, "/x", **key)
        assert (status, error["message"]) == (400, "model name is missing from the request")
        assert (await refused(address, "/x?model=nope", **key))[0] == 400
        status, error = await refused(address, "/x?model=cold", **key)
        assert (status, error["message"]) == (400, "model is not loaded")
        assert (await refused(address, "/models?model=m", **key))[0] == 404
        assert setting.admission.asked == []
        setting.admission.refusal = ApiError(429, "too many wait", retry_after=5)
        assert (await refused(address, "/x?model=cold&autoload=true", **key))[0] == 429


async def test_c168_any_path_may_be_the_first_that_loads(path: Path) -> None:
    """The first call to a model that is not loaded is a socket, wherever: it is asked for."""
    setting = proxy_for(f"unix:{path}")
    async with instance(path), served(setting) as address:
        for target in ("/v1/realtime", "/some/where/else", "/v1/chat/completions"):
            async with connect(f"ws://{address}{target}?model=cold", proxy=None) as client:
                await client.send("hello")
                assert await client.recv() == "hello"
    assert [model for model, _, _ in setting.admission.asked] == ["cold"] * 3


async def test_an_instances_refusal_passes(path: Path) -> None:
    """The instance has no socket there: its status and its words come as an HTTP answer."""

    def refuse(connection: ServerConnection, _: Request) -> Response:
        return connection.respond(404, "no socket here")

    setting = proxy_for(f"unix:{path}")
    async with instance(path, process_request=refuse), served(setting) as address:
        status, error = await refused(address, "/x?model=m")
        assert (status, error["message"]) == (404, "no socket here")
    assert setting.admission.open_claims == 0


async def test_an_address_that_refuses_is_traded(short_tmp: Path, path: Path) -> None:
    """The first address has nobody: the claim is traded for the next, which answers."""
    setting = proxy_for(f"unix:{short_tmp}/gone.sock", f"unix:{path}")
    async with (
        instance(path),
        served(setting) as address,
        connect(f"ws://{address}/x?model=m", proxy=None) as client,
    ):
        await client.send("hello")
        assert await client.recv() == "hello"
    assert len(setting.admission.claims) == 2
    assert setting.admission.open_claims == 0


async def test_a_traded_claim_is_given_back_where_the_next_address_refuses(
    short_tmp: Path, path: Path
) -> None:
    """The first address has nobody, the second has no socket there: neither claim is kept."""

    def refuse(connection: ServerConnection, _: Request) -> Response:
        return connection.respond(404, "no socket here")

    setting = proxy_for(f"unix:{short_tmp}/gone.sock", f"unix:{path}")
    async with instance(path, process_request=refuse), served(setting) as address:
        status, _ = await refused(address, "/x?model=m")
        assert status == 404
    assert len(setting.admission.claims) == 2
    assert setting.admission.open_claims == 0


@pytest.mark.parametrize("target", [b"/x\xc3\xbc?model=m", b"/x?model=m&a=\xff"])
async def test_an_address_that_is_no_ascii_is_passed_on_or_refused(path: Path, target: bytes) -> None:
    """Open a socket at an address with raw bytes in it: an HTTP answer comes, and nothing is kept."""
    setting = proxy_for(f"unix:{path}")
    async with instance(path), served(setting) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        async with asyncio.timeout(PATIENCE_S):
            line = await reader.readline()
        writer.close()
        assert line.split(b" ")[1] in (b"101", b"400")
    assert setting.admission.open_claims == 0


@pytest.mark.parametrize(
    "more",
    [
        b"Content-Length: 5\r\n\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"Cookie: %s\r\n\r\n" % (b"a" * 9000),
        b"".join(b"X-%d: 1\r\n" % number for number in range(200)) + b"\r\n",
    ],
    ids=["body", "chunks", "a long cookie", "many headers"],
)
async def test_an_opening_that_is_not_taken_is_answered(path: Path, more: bytes) -> None:
    """Open a socket with a body, with a cookie of 9 KB, with 200 headers: 400 at once, nothing is kept."""
    setting = proxy_for(f"unix:{path}")
    async with instance(path), served(setting) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /x?model=m HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" + more
        )
        async with asyncio.timeout(PATIENCE_S):
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
    assert head.split(b" ")[1] == b"400"
    assert "opens no WebSocket" in json.loads(body)["error"]["message"]
    assert setting.admission.asked == []


async def test_a_client_that_leaves_before_the_upgrade_gives_its_ticket_back(path: Path) -> None:
    """Close the connection while the socket waits for its model."""
    setting = proxy_for(f"unix:{path}")
    setting.admission.held = asyncio.Event()
    async with served(setting) as address:
        opening = asyncio.create_task(connect(f"ws://{address}/x?model=m", proxy=None).__aenter__())
        await setting.admission.waiting.wait()
        opening.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await setting.admission.given_back.wait()


async def test_a_silent_socket_holds_no_claim_and_takes_one_again(path: Path) -> None:
    """Say nothing for the limit: the claim goes back, the socket stays; the next message takes another."""
    setting = proxy_for(f"unix:{path}")
    setting.admission.same_instance = True
    claims = setting.admission.claims
    async with (
        instance(path),
        served(setting, socket_idle=2.0) as address,  # longer than a busy machine takes for an echo
        connect(f"ws://{address}/x?model=m", proxy=None) as client,
    ):
        await client.send("one")
        assert await client.recv() == "one"
        before = len(claims)
        async with asyncio.timeout(PATIENCE_S):
            await claims[-1].gone.wait()
        await client.send("two")
        assert await client.recv() == "two"
        assert [claim.instance for claim in claims] == ["host-1-0"] * (before + 1)
    assert setting.admission.open_claims == 0


async def test_c84_a_silent_socket_that_may_not_load_may_not_do_so_when_it_speaks_again(path: Path) -> None:
    """Open a socket whose header forbids a load, and one whose key does, and let the claim go: the next
    message asks for a claim with the same word.
    """
    setting = proxy_for(f"unix:{path}")
    setting.admission.same_instance = True
    claims = setting.admission.claims
    async with instance(path), served(setting, "key", socket_idle=0.1) as address:
        for headers in ({"X-Llamastead-Autoload": "false", "X-Api-Key": "key"}, {"X-Api-Key": "probe"}):
            before = len(claims)
            async with connect(f"ws://{address}/x?model=m", proxy=None, additional_headers=headers) as client:
                async with asyncio.timeout(PATIENCE_S):
                    await claims[-1].gone.wait()
                await client.send("hello")
                assert await client.recv() == "hello"
            assert len(claims) >= before + 2
            for told in setting.admission.no_loads[before:]:
                assert told is not None
                assert told.error.status == 503
    assert setting.admission.open_claims == 0


async def test_a_silent_socket_whose_instance_was_replaced_is_closed(path: Path) -> None:
    """Say nothing while the model moves to another instance: the next message gets a close with 1012."""
    setting = proxy_for(f"unix:{path}")
    async with instance(path), served(setting, socket_idle=0.1) as address:
        client = await connect(f"ws://{address}/x?model=m", proxy=None)
        async with asyncio.timeout(PATIENCE_S):
            await setting.admission.claims[0].gone.wait()
        await client.send("two")
        code, reason = await closed(client)
        assert (code, "anew" in reason) == (1012, True)
    assert setting.admission.open_claims == 0


async def test_a_socket_has_an_upper_bound(path: Path) -> None:
    """A socket that lives too long is closed with a reason that names the setting, at both sides."""
    setting = proxy_for(f"unix:{path}")
    async with instance(path) as had, served(setting, socket_limit=0.2) as address:
        client = await connect(f"ws://{address}/x?model=m", proxy=None)
        code, reason = await closed(client)
        assert (code, "socket-limit" in reason) == (1001, True)
        async with asyncio.timeout(PATIENCE_S):
            await had[0].wait_closed()
    assert setting.admission.open_claims == 0


@pytest.mark.parametrize("slow", ["client", "instance"])
async def test_who_reads_slowly_holds_back_the_other(path: Path, slow: str) -> None:
    """One side sends without end, the other reads nothing: the sender is held back after bounded bytes."""
    sent, stalled, quiet = 0, asyncio.Event(), asyncio.Event()

    async def flood(connection: Any) -> None:
        nonlocal sent
        while True:
            try:
                async with asyncio.timeout(3):  # enough for one, also on a busy machine
                    await connection.send(b"x" * (1 << 20))
            except TimeoutError:
                stalled.set()
                return
            sent += 1

    async def handler(connection: ServerConnection) -> None:
        await (flood(connection) if slow == "client" else quiet.wait())
        await quiet.wait()

    setting = proxy_for(f"unix:{path}")
    async with instance(path, handler, max_queue=1), served(setting) as address:
        client = await connect(
            f"ws://{address}/x?model=m", max_queue=1, max_size=None, proxy=None, compression=None
        )
        if slow == "instance":
            await flood(client)
        async with asyncio.timeout(PATIENCE_S):
            await stalled.wait()
        assert 0 < sent < 64
        client.transport.abort()
        quiet.set()
