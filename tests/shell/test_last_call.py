"""A listening socket that is about to close, seen from its clients."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from byte_path_kit import proxy_for
from gateway_kit import until
from served_kit import gateway

from llamastead.gateway import edge
from llamastead.gateway.edge import EdgeProtocol
from llamastead.gateway.last_call import accept_waiting
from llamastead.gateway.runtime import Gateway
from llamastead.gateway.server import Server

ASKED = b"POST /completion HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}"


def test_everybody_in_the_queue_is_accepted_and_nobody_is_waited_for() -> None:
    """Three clients connect and one of them sends; all are accepted at once, what was sent is there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        clients[1].sendall(b"hello")
        accepted = accept_waiting(listener)
        listener.close()
        assert [each.getpeername() for each in accepted] == [each.getsockname() for each in clients]
        assert accepted[1].recv(16) == b"hello"
        for each in clients + accepted:
            each.close()


def test_an_empty_queue_gives_nobody() -> None:
    """Without any client the call returns at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert accept_waiting(listener) == []


async def test_who_waits_in_the_queue_when_a_gateway_leaves_is_answered() -> None:
    """Send a request that nobody accepted yet, then have the server leave: it is answered all the same."""
    ended: list[str] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, http=EdgeProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    streams = SimpleNamespace(close=lambda: ended.append("streams"))
    server = Server(config, cast("Gateway", SimpleNamespace(events=streams)))
    server.lifespan, server.servers = config.lifespan_class(config), []
    listener = socket.create_server(("127.0.0.1", 0))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await writer.drain()
    await server.shutdown([listener])
    assert (await reader.readline()).split()[1] == b"204"
    assert ended == ["streams"]
    writer.close()
    await writer.wait_closed()


async def test_who_has_connected_just_before_a_gateway_leaves_is_answered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ask once, connect again without asking, then have all connections shut down: the one that asked is
    closed; the new one is answered, and closed behind the answer.
    """
    monkeypatch.setattr(edge, "FIRST_REQUEST_S", 3600.0)
    async with gateway(proxy_for("unix:/nonexistent/e.sock")) as served:
        old, new = await served.client(), await served.client()
        await old.send(ASKED)
        assert (await old.answer()).line.split()[1] == b"400"  # it names no model
        await until(lambda: len(served.server.server_state.connections) == 2, "both connections")
        for connection in list(served.server.server_state.connections):
            connection.shutdown()
        assert await old.rest() == b""
        await new.send(ASKED)
        answer = await new.answer()
        assert (answer.line.split()[1], answer.header(b"connection")) == (b"400", [b"close"])
        assert await new.rest() == b""


@pytest.mark.parametrize("sent", [b"", ASKED[:10]])
async def test_who_never_asks_keeps_no_gateway_that_leaves(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Connect, send nothing or half a head, and have the connection shut down: it is closed in a moment."""
    monkeypatch.setattr(edge, "FIRST_REQUEST_S", 0.05)
    async with gateway(proxy_for("unix:/nonexistent/e.sock")) as served:
        client = await served.client()
        await client.send(sent)
        await until(lambda: len(served.server.server_state.connections) == 1, "the connection")
        # What is sent and not read when a connection closes would reset it.
        await until(lambda: served.connection()._in_head == bool(sent), "what it sends")
        served.connection().shutdown()
        assert await client.rest() == b""
