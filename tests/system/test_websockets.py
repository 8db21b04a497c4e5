"""WebSockets on a herd: through two gateways to stub engines that speak it."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from herd import KEYS, PATIENCE_S, until
from pair import Pair, pair, sections
from websockets.asyncio.client import ClientConnection, connect

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Pair]:
    """Two gateways of stub engines, one of which fits; sockets are soon silent."""
    made = sections("talks", "wants", "brief")
    async with pair(made, "--models-max", "1", env={"LLAMASTEAD_SOCKET_IDLE": "3"}) as one:
        yield one


def dial(both: Pair, model: str, gateway: int = 0, path: str = "/v1/realtime") -> connect:
    """Return a socket to be opened, for a model at a gateway."""
    return connect(f"ws://127.0.0.1:{both.made.ports[gateway]}{path}?model={model}", proxy=None)


async def said_back(client: ClientConnection, message: str | bytes) -> None:
    """Say something and hear it."""
    await client.send(message)
    assert await client.recv() == message


async def claims(both: Pair, model: str) -> int:
    """Return how many claims a model's instance has."""
    async with both.made.redis() as redis:
        return int(await redis.hlen(KEYS.leases((await both.made.instance(model))["id"])))


async def test_c168_a_socket_loads_its_model_and_keeps_it(both: Pair) -> None:
    """Open sockets through both gateways as the first call to a cold model: loaded once, and not stopped for
    another model while messages pass; then the other one is served."""
    async with dial(both, "talks", 0) as one, dial(both, "talks", 1, "/any/where") as two:
        await said_back(one, "hello ü")
        await said_back(two, b"\x00\x01" * 40_000)
        assert await both.loads("talks") == 1
        other = asyncio.create_task(both.chat("wants"))

        async def wants_waits() -> bool:
            # Sockets that say nothing for as long as that may take on a busy machine would be silent ones.
            await said_back(one, "still here")
            await said_back(two, "here, too")
            return bool((await both.entry("wants")).get("reason") == "busy")

        await until(wants_waits, "the other one to wait")
        for _ in range(5):
            await said_back(one, "still here")
        assert not other.done()
    assert (await other).status_code == 200
    closes = [entry for entry in both.journal("talks") if entry["event"] == "socket_closed"]
    assert [entry["code"] for entry in closes] == [1000, 1000]
    await both.settled()


async def test_a_silent_socket_gives_its_model_up(both: Pair) -> None:
    """Say nothing for the limit while another model wants the room: it gets it, the socket is told why."""
    async with dial(both, "talks") as silent:
        await said_back(silent, "hello")
        assert await claims(both, "talks") == 1
        assert (await both.chat("wants")).status_code == 200
        await silent.wait_closed()
    assert silent.close_code == 1012
    assert "silent" in (silent.close_reason or "")
    await both.settled()


async def test_a_silent_socket_speaks_again(both: Pair) -> None:
    """Say nothing until the claim is gone, then speak: the claim is back, the same engine answers."""
    async with dial(both, "brief") as client:
        await said_back(client, "one")

        async def free() -> bool:
            return await claims(both, "brief") == 0

        await until(free, "the claim to go back")
        await said_back(client, "two")
        assert await claims(both, "brief") == 1
    assert both.events("brief").count("socket") == 1
    await both.settled()


async def test_an_engine_that_breaks_off_ends_the_socket(both: Pair) -> None:
    """The engine drops the connection: the client gets 1011, nothing stays claimed."""
    async with dial(both, "brief") as client:
        await client.send("die")
        await client.wait_closed()
        assert client.close_code == 1011
    await both.settled()


async def test_a_gateway_that_leaves_closes_its_sockets(both: Pair) -> None:
    """Stop a gateway with an open socket: the client is told to come back, and the gateway ends in time."""
    await both.made.gateway("gateway-3")
    client = await dial(both, "brief", 2).__aenter__()
    await said_back(client, "hello")
    assert both.made.roles["gateway-3"].process is not None
    both.made.roles["gateway-3"].process.terminate()
    await client.wait_closed()
    assert client.close_code == 1012
    assert await asyncio.wait_for(both.made.roles["gateway-3"].process.wait(), PATIENCE_S) == 0
    await both.settled()
