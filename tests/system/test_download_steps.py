"""A worker's process killed between the steps of a download."""

import asyncio
from pathlib import Path

from download_stand import Stand, content, stand
from fault_orders import FaultOrders
from herd import until

POINTS = ("keep_plan.before", "keep_plan.after", "beat_job.after", "end_job.before")
FILES = ("fetch.checked", "fetch.named", "place.linked")


async def test_a_job_killed_between_its_steps_costs_a_download_at_most_a_second_order(tmp_path: Path) -> None:
    """C181: KILL the process that comes by each step of a download's jobs: it comes whole by itself, or its
    end is told with the reason and the next order brings it; nothing of it is left over.
    """
    orders = FaultOrders(tmp_path / "faults")
    async with stand(orders.env) as made:
        await until(made.workers, "a worker")
        for number, point in enumerate((*POINTS, *FILES)):
            await struck_at(made, orders, point, f"step{number}")
        assert [path for path in made.cache.rglob("*") if "incomplete" in path.name] == []

        async def forgotten() -> bool:
            async with made.made.redis() as redis:
                return not [key async for key in redis.scan_iter(match="llamastead:download:*")]

        # A model is listed as soon as it is whole, and its download forgotten after that.
        await until(forgotten, "no record of a download")


async def struck_at(made: Stand, orders: FaultOrders, point: str, stem: str) -> None:
    """Order a download whose job dies at a point, and once more if that was its end."""
    repo, name = f"org/{stem}", f"org/{stem}:Q4_K_M"
    made.hub.add(repo, {f"{stem}-Q4_K_M.gguf": content(len(stem) + int(stem[-1]))})
    await made.at_rest()  # so that the job which comes by is this download's
    orders.order(point)
    ordered = asyncio.create_task(made.pull(repo))
    pid = await orders.hit(point)
    await until(lambda: not Path(f"/proc/{pid}").exists(), "its death")
    told = await ordered
    if told.status_code == 200:
        ends = {"download_failed", "download_finished"}
        await until(lambda: ends & {*made.events(repo)}, f"the end after {point}", 90.0)
    if told.status_code != 200 or "download_failed" in made.events(repo):
        assert told.status_code == 200 or "killed by signal 9" in told.text, told.text
        assert (await made.pull(repo)).status_code == 200
    await made.listed(name)
