"""What the tests of deaths do to a running herd and look at inside it: processes, leadership, streams."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from herd import KEYS, PATIENCE_S, Herd, herd, until
from looks import whole_lines
from redis.exceptions import RedisError
from tiny import stub_engine
from valkey_server import start_valkey

from llamastead.up.processes import descendants_of

QUICK = {
    f"LLAMASTEAD_{name}": value
    for name, value in {
        "LEADER_TTL": "3",
        "LEADER_RENEW": "0.5",
        "REREAD": "0.5",
        "HEARTBEAT": "0.2",
        "SUSPECT_AFTER": "1",
        "SWEPT_AFTER": "0.5",
        "MIN_RESIDENCE": "0",
    }.items()
}
"""The clocks of the protocol, scaled down."""

DONE = b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def apart(env: Mapping[str, str] = QUICK) -> AsyncIterator[Herd]:
    """Yield a herd whose roles are started one by one against a Valkey that is the test's own."""
    async with herd(env) as made:
        folder = made.run_dir.parent
        server = start_valkey(folder, "--save", "")
        made.redis_url = made.env["LLAMASTEAD_REDIS_URL"] = f"unix://{folder}/valkey.sock"
        try:
            yield made
        finally:
            await made.stop()
            server.terminate()
            server.wait(10)


def real(made: Herd, *names: str) -> list[str]:
    """Make tiny models of these names and return the arguments to serve them with the real engine.

    With one thread: on a busy machine two that wait for each other in spins are fifty times slower.
    """
    made.add_models(*names)
    return ["--models-dir", str(made.models), "--threads", "1"]


def stubbed(made: Herd, *names: str, **knobs: Any) -> list[str]:
    """Make models of these names and return the arguments to serve them with the stub, with these knobs."""
    made.add_models(*names)
    for name in names:
        (made.models / f"{name}.gguf.json").write_text(json.dumps(knobs))
    return ["--models-dir", str(made.models), "--engine", str(stub_engine(made.run_dir.parent))]


def started(made: Herd, model: str) -> list[int]:
    """Return the pids of all engines that the stub's journal says were started for a model."""
    entries = map(json.loads, whole_lines(made.models / f"{model}.gguf.journal"))
    return [entry["pid"] for entry in entries if entry["event"] == "start"]


async def leader(made: Herd) -> dict[str, str]:
    """Return who leads, {} while nobody does or Redis is away."""
    with contextlib.suppress(RedisError):
        async with made.redis() as redis:
            if await redis.exists(KEYS.leader):
                return dict(await redis.hgetall(KEYS.leadership))
    return {}


async def next_leader(made: Herd, number: str, patience_s: float = PATIENCE_S) -> dict[str, str]:
    """Wait for a leader whose number is above `number`, that has adopted all instances and opened the herd,
    which an emptied Redis does not have before; return it.
    """

    async def look() -> dict[str, str]:
        found = await leader(made)
        if int(found.get("number", 0)) <= int(number):
            return {}
        async with made.redis() as redis:
            names = await redis.zrange(KEYS.instances, 0, -1)
            epochs = {await redis.hget(KEYS.instance(name), "epoch") for name in names}
            is_open = await redis.exists(KEYS.herd)
        return found if is_open and epochs <= {found["number"]} else {}

    return dict(await until(look, f"a leader after number {number}", patience_s))


async def ready(made: Herd, model: str) -> dict[str, str]:
    """Wait until the model's instance is READY and return its record."""

    async def look() -> dict[str, str]:
        found = await made.instance(model)
        return found if found.get("state") == "ready" else {}

    return dict(await until(look, f"{model} to be ready"))


async def loads(made: Herd, model: str) -> int:
    """Return how often the model was loaded."""
    async with made.redis() as redis:
        return int(await redis.hget(KEYS.model(model), "loads") or 0)


async def leases(made: Herd, instance: str) -> dict[str, str]:
    """Return gateway → lease of an instance."""
    async with made.redis() as redis:
        return dict(await redis.hgetall(KEYS.leases(instance)))


async def waits(made: Herd, model: str) -> bool:
    """Return whether a request for the model stands in the queue."""
    async with made.redis() as redis:
        return bool(await redis.exists(KEYS.tickets(model)))


async def is_gone(made: Herd, instance: str) -> bool:
    """Return whether an instance has no record any more."""
    async with made.redis() as redis:
        return await redis.zscore(KEYS.instances, instance) is None


def ask(model: str, tokens: int = 4, **more: Any) -> dict[str, Any]:
    """Return the body of a completion request."""
    return {"model": model, "prompt": "once", "max_tokens": tokens, **more}


async def served(client: httpx.AsyncClient, model: str) -> httpx.Response:
    """Ask for a short completion and check that it is one."""
    answer = await client.post("/v1/completions", json=ask(model))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"]
    return answer


class Stream:
    """A long streamed completion that runs only as fast as it is read: it stands still until `rest`."""

    def __init__(self, response: httpx.Response) -> None:
        self._chunks = response.aiter_raw()

    async def first(self) -> bytes:
        """Read the first bytes."""
        return await anext(self._chunks)

    async def rest(self) -> bytes:
        """Read all that is left and return its end, which is where a stream says how it went."""
        end = b""
        async for chunk in self._chunks:
            end = (end + chunk)[-4096:]
        return end


def long_answer(model: str) -> dict[str, Any]:
    """Return the body of a request whose answer is never over before it is read, by way of `slow_reader`.

    Seven megabytes (each token comes with fifty alternatives) against a small receive buffer: the buffers in
    between swallow four, so the request is in the middle of its answer for as long as nobody reads on.
    """
    return ask(model, 2000, stream=True, logprobs=50)


def slow_reader() -> httpx.AsyncHTTPTransport:
    """Return a client's transport with a small receive buffer.

    Not a very small one: loopback sends 64 KiB at a time, or waits 200 ms for room.
    """
    small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)]
    return httpx.AsyncHTTPTransport(socket_options=small)


@contextlib.asynccontextmanager
async def streaming(made: Herd, model: str, gateway: int = 0) -> AsyncIterator[Stream]:
    """Yield a stream that has begun, and is in the middle of its answer until it is read on."""
    body = long_answer(model)
    async with (
        made.client(gateway, transport=slow_reader()) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        stream = Stream(response)
        await stream.first()
        yield stream


def kill(pid: int) -> None:
    """Send KILL to a process that the test's herd started."""
    assert pid > 1
    os.kill(pid, signal.SIGKILL)


def programs_of(pid: int) -> dict[int, str]:
    """Return all descendants of a process with their command lines."""
    found = {}
    for child in descendants_of(pid, set()):
        with contextlib.suppress(OSError):
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def sockets_below(folder: Path) -> list[Path]:
    """Return the unix sockets that lie below a folder."""
    return [path for path in folder.rglob("*") if path.is_socket()]


def stale_socket(path: Path) -> None:
    """Leave a socket file that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
