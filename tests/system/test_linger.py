"""A gateway keeps an unused lease for a while, but not when somebody waits for the room."""

from herd import herd
from inside import QUICK, ask, leases, ready, real


async def test_a_swap_does_not_wait_for_a_lease_that_nobody_uses() -> None:
    """Let leases linger for an hour and busy models never drain: A is used, then B is asked for through
    another gateway: A's lease is given back for it, and B is served.
    """
    env = QUICK | {"LLAMASTEAD_LINGER": "3600", "LLAMASTEAD_QUEUE_TIMEOUT": "20"}
    async with herd(env) as made:
        await made.up(*real(made, "a", "b"), "--models-max", "1", "--max-wait", "3600", "--gateways", "1")
        await made.gateway("second")
        async with made.client(0) as one, made.client(1) as two:
            assert (await one.post("/v1/completions", json=ask("a"))).status_code == 200
            a = await ready(made, "a")
            assert await leases(made, a["id"])
            answer = await two.post("/v1/completions", json=ask("b"))
            assert answer.status_code == 200, answer.text
            assert not await leases(made, a["id"])
