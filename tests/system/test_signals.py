"""What SIGHUP does to a whole herd of real processes."""

import os
import signal
from pathlib import Path

from herd import KEYS, Herd, herd, instance_pids, processes_naming, until
from tiny import tiny_model


async def names(made: Herd) -> list[str]:
    """Return the ids in GET /models."""
    async with made.client() as client:
        return [entry["id"] for entry in (await client.get("/models")).json()["data"]]


async def at_rest(made: Herd) -> bool:
    """Return whether `a` is measured and the worker idle: until then processes of its jobs come and go."""
    async with made.client() as client:
        memory = (await client.get("/v1/models/a")).json().get("memory") or {}
    async with made.redis() as redis:
        workers = await redis.zrange(KEYS.workers, 0, -1)
        states = [await redis.hget(KEYS.worker(name), "state") for name in workers]
        under_way = await redis.zcard(KEYS.jobs)
    return (memory.get("source"), states, under_way) == ("measured", ["idle"], 0)


def heeds_hangup(pid: int) -> bool:
    """Return whether a process catches or ignores SIGHUP, as ours do once they have begun."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigIgn:"))]
    return any(mask >> (signal.SIGHUP - 1) & 1 for mask in masks)


async def test_c111_sighup_ends_none_of_our_processes(tmp_path: Path) -> None:
    """With a model loaded send SIGHUP ten times to each of our processes: all stay, a new file is listed."""
    tiny_model(tmp_path / "a.gguf", 1)
    async with herd() as made:
        up = await made.up("--models-dir", str(tmp_path))
        async with made.client() as client:
            answer = await client.post("/completion", json={"model": "a", "prompt": "x", "n_predict": 1})
            assert answer.status_code == 200
        await until(lambda: at_rest(made), "the worker to be done")
        # Until then there is one more engine, which hands them out and ends.
        await until(lambda: list((made.run_dir / "web-ui").glob("*/index.json")), "the web UI's pages")
        engines = instance_pids(made.run_dir)
        assert len(engines) == 1

        def settled() -> list[int]:
            # The holder for the next load is started after a load; a signal in its first moment would end it.
            others = [pid for pid in processes_naming(made.run_dir) if pid not in {*engines, up.pid}]
            return [up.pid, *others] if all(map(heeds_hangup, (up.pid, *others))) else []

        ours = await until(settled, "all of our processes to mind SIGHUP")
        assert len(ours) >= 6  # up, Valkey, supervisor, worker, gateway, the instance's holder
        tiny_model(tmp_path / "b.gguf", 2)
        for _ in range(10):
            for pid in ours:
                os.kill(pid, signal.SIGHUP)

        async def listed() -> bool:
            return await names(made) == ["a", "b"]

        await until(listed, "the new model to be listed")
        assert [pid for pid in (*ours, *engines) if not Path(f"/proc/{pid}").exists()] == []
        assert await up.signal(signal.SIGTERM) == 0
        assert processes_naming(made.run_dir) == []
        assert [path for path in made.run_dir.rglob("*") if path.is_socket()] == []
