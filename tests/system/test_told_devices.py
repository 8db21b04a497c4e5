"""GPUs that only the engine tells of: they have accounts all the same, or no limit and a warning."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from herd import QUICK, Herd, herd, until
from tiny import stub_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
GIB = 1 << 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[Herd]:
    """An engine that lists one card, two models for it, and one that uses a device it does not list."""
    listed = "Vulkan0: Radeon RX (16384 MiB, 15360 MiB free)"
    async with herd({**QUICK, "GGML_STUB_DEVICES": listed}) as found:
        found.add_models("a", "b", "stray")
        for name, device in (("a", "Vulkan0"), ("b", "Vulkan0"), ("stray", "SYCL0")):
            sizes = {device: [9000, 100, 100], "Host": [10, 0, 10]}
            (found.models / f"{name}.gguf.json").write_text(json.dumps({"memory_mib": sizes}))
        engine = str(stub_engine(found.models.parent))
        await found.up("--models-dir", str(found.models), "--engine", engine, "--models-max", "0")
        for name in ("a", "b", "stray"):
            await until(lambda name=name: is_measured(found, name), f"{name} to be measured")
        yield found


async def is_measured(made: Herd, model: str) -> bool:
    async with made.client() as client:
        memory = (await client.get(f"/v1/models/{model}")).json().get("memory") or {}
        return bool(memory.get("source") == "measured")


async def accounts(made: Herd) -> dict[str, dict[str, object]]:
    async with made.client() as client:
        return dict((await client.get("/props")).json()["llamastead"]["devices"])


async def chat(made: Herd, model: str) -> None:
    async with made.client() as client:
        answer = await client.post("/v1/chat/completions", json={"model": model, **CHAT}, timeout=60)
        assert answer.status_code == 200, answer.text


async def test_a_card_that_the_engine_lists_is_accounted_and_one_goes_for_the_other(made: Herd) -> None:
    """Two of 9 GiB on 16, of which others use 1: the second sends the first away; the account is marked."""
    await chat(made, "a")
    await chat(made, "b")

    async def only_b() -> dict[str, object]:
        account = (await accounts(made))["Vulkan0"]
        held = account["held"]
        return account if isinstance(held, dict) and list(held) == ["b"] else {}

    account = await until(only_b, "b alone to be held")
    assert (account["total"], account["external"]) == (16 * GIB, GIB)
    assert "only the engine tells of it" in str(account["problem"])
    assert "device can't be read well" in made.roles["up"].output()


async def test_a_device_that_nobody_tells_of_has_no_limit_and_a_warning(made: Herd) -> None:
    """It loads beside the others, nobody goes, and the log says what is not known."""
    await chat(made, "b")
    await chat(made, "stray")
    assert (await made.status("b"))["value"] == "loaded"

    def warned() -> bool:
        return "a model uses a device of unknown size" in made.roles["up"].output()

    await until(warned, "the warning")
    assert "SYCL0" not in await accounts(made)
