"""What SIGHUP does to a whole herd of real processes."""

import os
import signal
from pathlib import Path

from herd import Herd, herd, instance_pids, processes_naming, until
from tiny import tiny_model


async def names(made: Herd) -> list[str]:
    """Return the ids in GET /models."""
    async with made.client() as client:
        return [entry["id"] for entry in (await client.get("/models")).json()["data"]]


async def test_c111_sighup_ends_none_of_our_processes(tmp_path: Path) -> None:
    """With a model loaded send SIGHUP ten times to each of our processes: all stay, a new file is listed."""
    tiny_model(tmp_path / "a.gguf", 1)
    async with herd() as made:
        up = await made.up("--models-dir", str(tmp_path))
        async with made.client() as client:
            answer = await client.post("/completion", json={"model": "a", "prompt": "x", "n_predict": 1})
            assert answer.status_code == 200
        engines = instance_pids(made.run_dir)
        ours = [up.pid, *(pid for pid in processes_naming(made.run_dir) if pid not in {*engines, up.pid})]
        assert len(engines) == 1
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
