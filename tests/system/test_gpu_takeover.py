"""A supervisor that dies over a GPU full of its models: the next one knows them for its own."""

import asyncio
import os
import signal
from pathlib import Path

from gpu_herd import BIG, NEEDS_COMPILER, gpu_herd
from herd import KEYS, Herd, until
from inside import DONE, ask, is_alive, kill, leader, loads, next_leader, ready, served, waits

from llamastead.supervisor.holder_record import read_record

pytestmark = NEEDS_COMPILER


async def is_in_state(made: Herd, model: str, state: str) -> bool:
    """Return whether a model's instance is in a state."""
    return (await made.instance(model)).get("state") == state


async def test_who_waits_for_room_on_a_gpu_outlives_the_supervisor(tmp_path: Path) -> None:
    """KILL the supervisor while A streams on most of the GPU, C loads beside it, and B waits for A's room:
    nobody is told that B is too big beside others; A ends whole, and all are served.
    """
    gate = tmp_path / "gate"
    async with gpu_herd(tmp_path, BIG, LLAMASTEAD_MAX_WAIT="600") as gpus:
        gpus.add("a", 20, token_gate=str(gate))
        gpus.add("b", 16)
        gpus.add("c", 1, load_gate=str(gate))
        await gpus.up()
        await gpus.measured("a", "b", "c")
        made = gpus.herd
        async with (
            made.client() as client,
            client.stream("POST", "/v1/completions", json=ask("a", stream=True)) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            pieces = answer.aiter_raw()
            whole = await anext(pieces)
            loading = asyncio.create_task(served(client, "c"))
            await until(lambda: is_in_state(made, "c", "loading"), "c to load")
            waiting = asyncio.create_task(served(client, "b"))
            await until(lambda: waits(made, "b"), "b to wait")
            old = await until(lambda: leader(made), "a leader")
            kill(int(old["pid"]))
            await next_leader(made, old["number"])

            async def known() -> bool:
                account = (await gpus.accounts()).get("gpu0", {})
                return set(account.get("held", ())) == {"a", "c"} and account["external"] == 0

            await until(known, "the next one to show what is whose")
            assert not waiting.done()
            gate.touch()
            whole += b"".join([piece async for piece in pieces])
            assert whole.endswith(DONE)
            await asyncio.gather(loading, waiting)
        assert (await loads(made, "a"), await loads(made, "c")) == (1, 1)
        await made.nothing_counted()


async def test_what_a_hung_holder_left_is_ours_though_redis_forgot_it(tmp_path: Path) -> None:
    """STOP the holder of A, which has most of the GPU, lose A's record and KILL the supervisor: the next one
    ends A, whose bytes show as used for a while, and are nobody else's; B gets them.
    """
    async with gpu_herd(tmp_path, BIG, FAKE_NVML_LAG="8000") as gpus:
        gpus.add("a", 20)
        gpus.add("b", 16)
        await gpus.up()
        await gpus.measured("a", "b")
        made = gpus.herd
        async with made.client() as client:
            await served(client, "a")
            instance = (await ready(made, "a"))["id"]
            record = read_record(made.run_dir / "i" / instance)
            assert record is not None
            assert record.holder_pid
            old = await until(lambda: leader(made), "a leader")
            os.kill(record.holder_pid, signal.SIGSTOP)
            kill(int(old["pid"]))
            async with made.redis() as redis:
                assert await redis.delete(KEYS.instance(instance)) == 1
                assert await redis.zrem(KEYS.instances, instance) == 1
            waiting = asyncio.create_task(client.post("/v1/completions", json=ask("b")))
            await next_leader(made, old["number"])

            async def awaited() -> bool:
                account = (await gpus.accounts()).get("gpu0", {})
                return set(account.get("releasing", ())) == {"a"} and account["external"] == 0

            await until(awaited, "the bytes of A to be awaited")
            answer = await waiting
            assert answer.status_code == 200, answer.text
            await until(lambda: not is_alive(record.holder_pid), "the hung holder to be gone")
        await made.nothing_counted()
