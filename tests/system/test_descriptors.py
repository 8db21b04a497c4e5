"""Processes of the herd that may open no more files: clear errors in time, and all is right afterwards."""

import time
from pathlib import Path

import pytest
from few_files import no_more_files
from herd import Herd, until
from inside import DONE, QUICK, apart, ask, programs_of, ready, served, streaming, stubbed

BOUND_S = 20.0
NONE_LEFT = "Too many open files"


@pytest.mark.parametrize("beyond", [0, 2])
async def test_a_supervisor_without_descriptors_says_so_and_goes_on(beyond: int) -> None:
    """Let the supervisor open no more files, or two, while a stream runs and models are asked for one after
    the other: each is served or told why not at once, the last ones are told. The stream ends whole, nothing
    is taken out of the list, and with files again all are served by the same process.
    """
    async with apart(QUICK) as made:
        others = ["b", "c", "d", "e"]
        gate = made.models / "gate"
        words = stubbed(made, "a", *others, token_gate=str(gate))
        # A folder of its own, which a reading of the registry has to open.
        folder = made.models / "inner"
        folder.mkdir()
        (made.models / "e.gguf").rename(folder / "e.gguf")
        role = await made.role("s1", "supervisor", *words, "--models-max", "5")
        await made.gateway("g1")
        async with made.client() as client:
            listed = [model["id"] for model in (await client.get("/models")).json()["data"]]
            async with streaming(made, "a") as stream:
                before = await ready(made, "a")
                gate.touch()
                with no_more_files(role.pid, beyond):
                    reloaded = await client.post("/models/reload", timeout=BOUND_S)
                    assert reloaded.status_code == 200 or NONE_LEFT in reloaded.text, reloaded.text
                    told = []
                    for model in ("b", "c", "d", "inner"):
                        began = time.monotonic()
                        told.append(await client.post("/v1/completions", json=ask(model), timeout=BOUND_S))
                        assert time.monotonic() - began < BOUND_S
                    for answer in told:
                        assert answer.status_code == 200 or NONE_LEFT in answer.text, answer.text
                    assert told[-1].status_code == 500
                    assert "ulimit -n" in told[-1].text
                assert (await stream.rest()).endswith(DONE)
            for model in ("a", "b", "c", "d", "inner"):
                await served(client, model)
            assert [model["id"] for model in (await client.get("/models")).json()["data"]] == listed
            assert (await ready(made, "a"))["pid"] == before["pid"]
        await made.nothing_counted()
        # The spare is started a moment after the last load.
        await until(lambda: (len(holders(role.pid)), len(folders(made))) == (6, 6), "one holder a folder")


def holders(supervisor: int) -> list[str]:
    """Return the command lines of a supervisor's holders."""
    return [line for line in programs_of(supervisor).values() if "/supervisor/holder" in line]


def folders(made: Herd) -> list[Path]:
    """Return the folders of instances and spares."""
    return list((made.run_dir / "i").iterdir())
