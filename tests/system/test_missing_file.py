"""A model whose file is gone costs nobody else their place."""

from typing import Any

from herd import herd, until
from inside import QUICK, ask, ready, served


async def test_a_model_without_its_file_sends_nobody_away() -> None:
    """One place, taken by A: B, whose file was never there, is refused with the file's name, twice; A goes on
    in the same process. B's file comes, and it is served in A's place.
    """
    async with herd(QUICK) as made:
        made.add_models("a")
        preset = made.run_dir.parent / "models.ini"
        lines = [f"[{name}]\nmodel = {made.models / name}.gguf\nthreads = 1\n" for name in ("a", "b")]
        preset.write_text("".join(lines))
        await made.up("--models-preset", str(preset), "--models-max", "1")
        async with made.client() as client:
            await served(client, "a")
            before = await ready(made, "a")
            for _ in range(2):
                answer = await client.post("/v1/completions", json=ask("b"))
                assert answer.status_code == 500
                assert f"{made.models / 'b'}.gguf not found" in answer.json()["error"]["message"]

            async def told() -> dict[str, Any]:
                status = await made.status("b")
                return status if "failed" in status else {}

            status = await until(told, "b to be listed as failed")
            assert (status["value"], status["failed"], status["exit_code"]) == ("unloaded", True, None)
            assert status["reason"] == f"{made.models / 'b'}.gguf not found"
            await served(client, "a")
            assert (await ready(made, "a"))["pid"] == before["pid"]
            made.add_models("b")
            assert (await client.post("/models/load", json={"model": "b"})).status_code == 200
            await ready(made, "b")
            await served(client, "b")
            assert "failed" not in await made.status("b")
        await made.nothing_counted()
