"""Ports of instances that have ended and that other instances have got, which want keys of their own."""

from pathlib import Path

import pytest
from byte_path_kit import (
    Call,
    answering,
    instance,
    instance_on_port,
    proxy_for,
)
from test_sockets import instance as instance_with_sockets
from test_sockets import refused, served
from websockets.asyncio.client import connect

from llamastead.gateway.body import MEMORY_BYTES
from llamastead.gateway.sessions import LOST, Sessions
from llamastead.gateway.upstream import Pools
from llamastead.shared.errors import ApiError

REFUSAL = b"Invalid API Key"
WRONG_KEY = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n%s" % (len(REFUSAL), REFUSAL)


@pytest.mark.parametrize("size", [0, 2 * MEMORY_BYTES])
async def test_a_request_at_a_port_that_another_instance_has_got_is_asked_anew(
    short_tmp: Path, size: int
) -> None:
    """Claim a port where another instance refuses our key: the claim is traded, the whole body goes to the
    next address, and the engine is not blamed.
    """
    body = b'{"model":"m","x":"' + b"y" * size + b'"}'
    async with (
        instance_on_port(answering(WRONG_KEY)) as other,
        instance(short_tmp / "e.sock", answering()) as made,
    ):
        setting = proxy_for(other.address, made.address)
        call = await Call(setting.proxy, body=body).done()
        assert (call.status, made.received[0].body) == (200, body)
        assert (len(setting.admission.claims), setting.admission.open_claims) == (2, 0)
        assert [claim.statuses for claim in setting.admission.claims] == [[], [200]]
        assert list(setting.pools.counts()) == ["host-1-1"]
        await setting.pools.close()


async def test_a_key_that_is_refused_twice_is_ours_to_mend() -> None:
    """Nothing but ports that refuse our key: asked twice, then told whose mistake it is."""
    async with instance_on_port(answering(WRONG_KEY)) as other:
        setting = proxy_for(other.address)
        with pytest.raises(ApiError, match="the herd secrets differ") as told:
            await Call(setting.proxy).done()
        assert (told.value.status, len(setting.admission.claims), setting.admission.open_claims) == (
            502,
            2,
            0,
        )
        await setting.pools.close()


async def test_a_socket_that_refuses_our_key_is_asked_once(short_tmp: Path) -> None:
    """A unix socket is nobody else's: its refusal is told at once."""
    async with instance(short_tmp / "e.sock", answering(WRONG_KEY)) as made:
        setting = proxy_for(made.address)
        with pytest.raises(ApiError, match="the herd secrets differ"):
            await Call(setting.proxy).done()
        assert (len(made.received), setting.admission.open_claims) == (1, 0)
        await setting.pools.close()


async def test_a_websocket_at_a_port_that_another_instance_has_got_is_opened_elsewhere(
    short_tmp: Path,
) -> None:
    """Open a WebSocket where another instance refuses our key: it opens at the next address; where all refuse
    it, the client hears that its own key is not meant.
    """
    async with (
        instance_on_port(answering(WRONG_KEY)) as other,
        instance_with_sockets(short_tmp / "e.sock"),
    ):
        setting = proxy_for(other.address, f"unix:{short_tmp}/e.sock")
        async with (
            served(setting) as address,
            connect(f"ws://{address}/x?model=m", proxy=None) as client,
        ):
            await client.send("hello")
            assert await client.recv() == "hello"
        assert (len(setting.admission.claims), setting.admission.open_claims) == (2, 0)
        setting = proxy_for(other.address)
        async with served(setting) as address:
            status, error = await refused(address, "/x?model=m")
        assert (status, "the herd secrets differ" in error["message"]) == (502, True)
        assert (len(setting.admission.claims), setting.admission.open_claims) == (2, 0)


async def test_a_conversation_at_a_port_that_another_instance_has_got_is_lost() -> None:
    """Ask for a conversation where another instance refuses our key: it ended with its own instance."""
    pools = Pools()
    sessions = Sessions(None, pools, lambda instance, nonce: "key")  # type: ignore[arg-type]
    async with instance_on_port(answering(WRONG_KEY)) as other:
        fields = {"address": other.address, "nonce": "n"}
        with pytest.raises(LOST):
            await sessions.replay("i1", fields, "c", "")
        await pools.close()
