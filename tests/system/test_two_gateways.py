"""The roles apart: two gateways, a supervisor and a worker, each a process, on one Valkey with a password."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis as blocking_redis
from herd import KEYS, QUICK, Herd, free_port, herd, processes_naming, until
from looks import words_of
from tiny import stub_engine
from valkey_server import start_valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PASSWORD = "the-word-of-redis"
PRESET = """\
[*]
ctx-size = 512
threads = 1
[first]
model = {models}/first.gguf
[second]
model = {models}/second.gguf
[third]
model = {models}/third.gguf
[slow]
model = {models}/slow.gguf
engine = {stub}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart() -> AsyncIterator[Herd]:
    """Two gateways, a supervisor and a worker, started in an order in which nobody waits for anybody."""
    async with herd(QUICK) as made:
        folder = made.run_dir.parent
        port = free_port()
        server = start_valkey(folder, "--save", "", "--bind", "127.0.0.1", "--port", str(port))
        try:
            with blocking_redis.Redis(unix_socket_path=f"{folder}/valkey.sock") as client:
                client.config_set("requirepass", PASSWORD)
            url = f"redis://default:{PASSWORD}@127.0.0.1:{port}/0"
            made.redis_url = made.env["LLAMASTEAD_REDIS_URL"] = url
            made.add_models("first", "second", "third", "slow")
            preset = folder / "models.ini"
            preset.write_text(PRESET.format(models=made.models, stub=stub_engine(folder)))
            await made.role("worker", "worker")
            await asyncio.gather(made.gateway("gateway-1"), made.gateway("gateway-2"))
            await made.role("supervisor", "supervisor", "--models-preset", str(preset), "--models-max", "2")
            await until(lambda: serves(made, 0), "models at the first gateway")
            await until(lambda: serves(made, 1), "models at the second gateway")
            yield made
        finally:
            await made.stop()
            server.terminate()
            server.wait(10)


async def serves(made: Herd, gateway: int) -> bool:
    """Return whether a gateway knows the herd's models."""
    async with made.client(gateway) as client:
        return len((await client.get("/models")).json()["data"]) == 4


async def loads(made: Herd, model: str) -> int:
    """Return how often a model was loaded so far."""
    async with made.redis() as redis:
        return int(await redis.hget(KEYS.model(model), "loads") or 0)


async def test_both_gateways_serve_the_same_herd(apart: Herd) -> None:
    """Load a model through one gateway and use it through the other: hot, same instance, same list."""
    async with apart.client(0) as one, apart.client(1) as two:
        cold = await one.post("/v1/chat/completions", json={"model": "first", **CHAT})
        hot = await two.post("/v1/chat/completions", json={"model": "first", **CHAT})
        assert (cold.status_code, hot.status_code) == (200, 200)
        assert (cold.headers["x-llamastead-path"], hot.headers["x-llamastead-path"]) == ("cold", "hot")
        assert cold.headers["x-llamastead-instance"] == hot.headers["x-llamastead-instance"]

        async def alike() -> bool:
            lists = [(await client.get("/models")).json()["data"] for client in (one, two)]
            words = [[(m["id"], m["status"]["value"]) for m in models] for models in lists]
            return words[0] == words[1] and ("first", "loaded") in words[0]

        await until(alike, "the same list at both gateways")
    await apart.nothing_counted()


async def test_requests_for_one_cold_model_through_both_gateways_cause_one_load(apart: Herd) -> None:
    """Send twenty requests at once for a cold model, half through each gateway: one load, one instance."""
    async with apart.client(0) as one, apart.client(1) as two:
        answers = await asyncio.gather(
            *(
                client.post("/v1/chat/completions", json={"model": "second", **CHAT})
                for _ in range(10)
                for client in (one, two)
            )
        )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-llamastead-instance"] for answer in answers}) == 1
    assert "cold" in {answer.headers["x-llamastead-path"] for answer in answers}
    assert await loads(apart, "second") == 1
    await apart.nothing_counted()


async def test_a_client_that_leaves_gives_its_ticket_back(apart: Herd) -> None:
    """Wait for a model that does not get ready through both gateways and leave: the tickets go one by one."""
    (apart.models / "slow.gguf.json").write_text('{"hang": "loading"}')

    async def tickets() -> int:
        async with apart.redis() as redis:
            return int(await redis.hlen(KEYS.tickets("slow")))

    async def is_count(count: int) -> bool:
        return await tickets() == count

    async with apart.client(0) as one, apart.client(1) as two:
        waits = [
            asyncio.create_task(client.post("/v1/chat/completions", json={"model": "slow", **CHAT}))
            for client in (one, two)
        ]
        await until(lambda: is_count(2), "two tickets")
        queue: dict[str, Any] = (await one.get("/queue")).json()
        assert queue["waiting"] == 2
        assert [entry["model"] for entry in queue["queue"]] == ["slow"]
        for left, wait in ((1, waits[0]), (0, waits[1])):
            wait.cancel()
            await asyncio.wait([wait])
            await until(lambda left=left: is_count(left), f"{left} tickets")
        assert (await one.get("/queue")).json() == {"queue": [], "waiting": 0}
        # The load that nobody waits for any more stands in nobody's way.
        answer = await two.post("/v1/chat/completions", json={"model": "third", **CHAT})
        assert answer.status_code == 200, answer.text
    await apart.nothing_counted()


async def test_c45_a_lost_event_is_made_good_by_the_next_look(apart: Herd) -> None:
    """Pause a gateway while a model loads and trim its events away: it shows it as loaded all the same."""
    await apart.unload("first")
    paused = apart.roles["gateway-2"].pid
    async with apart.client(0) as one, apart.client(1) as two, apart.redis() as redis:
        os.kill(paused, signal.SIGSTOP)
        try:
            assert (await one.post("/models/load", json={"model": "first"})).status_code == 200

            async def loaded() -> bool:
                return (await apart.status("first"))["value"] == "loaded"

            await until(loaded, "first loaded at the other gateway")
            # What the paused one was sent before is older than READY; the rest is gone for good.
            await redis.xtrim(KEYS.events, maxlen=0, approximate=False)
        finally:
            os.kill(paused, signal.SIGCONT)

        async def converged() -> bool:
            entry = (await two.get("/v1/models/first")).json()
            return bool(entry["status"]["value"] == "loaded")

        await until(converged, "first loaded at the paused gateway")


async def test_the_worker_reads_what_the_supervisor_asked_for(apart: Herd) -> None:
    """Wait until a model that was never loaded shows what its file says."""

    async def metadata() -> Any:
        async with apart.client(1) as client:
            return (await client.get("/v1/models/slow")).json().get("metadata", {}).get("architecture")

    assert await until(metadata, "metadata") == "llama"


async def test_a_gateway_that_leaves_takes_only_its_own_clients_along(apart: Herd) -> None:
    """Stop the second gateway while a stream runs through it: the stream ends whole; the first goes on."""
    body = {"model": "first", "prompt": "once", "max_tokens": 300, "stream": True}
    async with apart.client(1) as two, two.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.aiter_raw()
        await anext(pieces)
        ending = asyncio.create_task(apart.roles["gateway-2"].signal(signal.SIGTERM))
        rest = b"".join([piece async for piece in pieces])
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await ending == 0
    async with apart.client(0) as one:
        again = await one.post("/v1/chat/completions", json={"model": "first", **CHAT})
        assert again.status_code == 200

    async def gateways() -> bool:
        async with apart.redis() as redis:
            return int(await redis.zcard(KEYS.gateways)) == 1

    await until(gateways, "one registered gateway")
    await apart.nothing_counted()


async def test_the_password_of_redis_shows_nowhere(apart: Herd) -> None:
    """Read what all processes printed and how they were called: the password is in none of it."""
    for role in apart.roles.values():
        assert PASSWORD not in role.output()
    for pid in processes_naming(apart.run_dir):
        with contextlib.suppress(OSError):  # a job's, which was over
            assert not any(PASSWORD in word for word in words_of(pid))
