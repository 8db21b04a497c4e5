"""A new version takes over from an older one while models answer."""

import asyncio
import json
import signal
import sys
from pathlib import Path

from herd import Herd, until
from inside import (
    DONE,
    apart,
    is_gone,
    leader,
    leases,
    loads,
    next_leader,
    ready,
    real,
    served,
    streaming,
)

OLD = Path(__file__).with_name("version_one.py")


def spoken(made: Herd, instance: str) -> int:
    """Return the version of the protocol that an instance's holder speaks."""
    return int(json.loads((made.run_dir / "i" / instance / "record.json").read_text())["v"])


async def nobody_at(made: Herd, instance: str) -> bool:
    """Return whether an instance has no lease."""
    return not await leases(made, instance)


async def test_a_supervisor_of_the_earlier_protocol_is_replaced_under_load() -> None:
    """Load two models under a supervisor and holders of protocol version 1. While one streams and the other
    is asked all the time, replace the supervisor by today's: no request fails, the stream ends whole, both
    processes go on; then today's supervisor stops the old holders' engines in order and starts its own.
    """
    async with apart() as made:
        words = ("supervisor", *real(made, "a", "b", "c"), "--models-max", "2")
        old = await made.role("old", *words, prefix=(sys.executable, str(OLD), str(made.run_dir.parent)))
        await made.gateway("gateway")
        async with made.client() as client:
            await served(client, "b")
            async with streaming(made, "a") as stream:
                before = {name: await ready(made, name) for name in ("a", "b")}
                assert {spoken(made, found["id"]) for found in before.values()} == {1}
                number = (await leader(made))["number"]
                over = asyncio.Event()

                async def asking() -> int:
                    count = 0
                    while not over.is_set():
                        await served(client, "b")
                        count += 1
                    return count

                load = asyncio.create_task(asking())
                assert await old.signal(signal.SIGUSR1) == 0
                await made.role("new", *words)
                await next_leader(made, number)
                assert (await stream.rest()).endswith(DONE)
            over.set()
            assert await load > 0
            after = {name: await ready(made, name) for name in ("a", "b")}
            assert {n: f["pid"] for n, f in after.items()} == {n: f["pid"] for n, f in before.items()}
            gone = before["a"]["id"]
            await until(lambda: nobody_at(made, gone), "A's lease to end")
            await served(client, "b")  # so that A is the one used least recently
            await served(client, "c")
            assert await loads(made, "a") == 1
            await until(lambda: is_gone(made, gone), "the idle one of the old holders to go")
            assert spoken(made, (await ready(made, "c"))["id"]) == 2
            assert "ended, exit code 0" in (made.run_dir / "logs" / "a.log").read_text()
        await made.nothing_counted()
