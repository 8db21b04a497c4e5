"""A herd whose supervisors are struck at fault points, over and over, and what must hold after each."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx
from fault_orders import FaultOrders
from herd import KEYS, Herd, instance_pids, until
from inside import QUICK, apart, ask, is_alive, leader
from pair import sections
from tiny import stub_engine

CLOCKS = QUICK | {
    "LLAMASTEAD_LEADER_TTL": "2",
    "LLAMASTEAD_LEADER_RENEW": "0.3",
    "LLAMASTEAD_MAX_WAIT": "0.2",
    "LLAMASTEAD_ADMISSION_TIMEOUT": "20",  # an order is answered by the next leader, on a busy machine too
}
PRESET = (
    sections("a", "b")
    + sections("sleeper", sleep_idle_seconds="1")
    + "[broken]\nmodel = {models}/broken.gguf\n"
)
# Everything that may stay in Redis without an end, and nothing else may.
ENDLESS = ("herd", "leadership", "models", "aliases", "model:", "instances", "instance:", "queue", "tickets:")
NO_END = -1  # as Redis says it; what has gone meanwhile is another word
ENDLESS += (
    "leases:",
    "gateways",
    "commands",
    "events",
    "devices:",
    "held:",
    "measurement:",
    "metadata:",
    "jobs",
    "rq:",
)


@dataclass
class Stage:
    """One gateway, a leader and a standby, room for one model. `orders` strikes whoever comes by."""

    made: Herd
    orders: FaultOrders
    client: httpx.AsyncClient
    words: list[str]
    _names: count = field(default_factory=lambda: count(1))

    async def supervisor(self) -> None:
        """Start one more supervisor."""
        await self.made.role(f"s{next(self._names)}", "supervisor", *self.words)

    async def asked(self, model: str) -> httpx.Response:
        """Ask a model for a short answer."""
        return await self.client.post("/v1/completions", json=ask(model))

    async def led(self, after: int = 0) -> dict[str, str]:
        """Wait until somebody leads, with a number above `after`, who has opened the herd; return who."""

        async def look() -> dict[str, str]:
            found = await leader(self.made)
            return found if found.get("ready") == "1" and int(found["number"]) > after else {}

        return dict(await until(look, "a leader that is ready"))

    async def instances(self) -> dict[str, dict[str, str]]:
        """Return all instances that Redis knows, by id."""
        async with self.made.redis() as redis:
            names = await redis.zrange(KEYS.instances, 0, -1)
            found = {name: await redis.hgetall(KEYS.instance(name)) for name in names}
        return {name: fields for name, fields in found.items() if fields}  # others ended meanwhile

    async def loads(self) -> dict[str, int]:
        """Return how often each model was loaded so far."""
        async with self.made.redis() as redis:
            names = await redis.zrange(KEYS.models, 0, -1)
            return {name: int(await redis.hget(KEYS.model(name), "loads") or 0) for name in names}

    async def right(self) -> None:
        """Check what must hold once a fault is over.

        Nothing is counted; Redis, processes and folders tell the same instances, at most one; no command is
        left; nothing is without an end that should have one.
        """
        await self.led()
        await self.made.nothing_counted()
        told: object = None

        async def agree() -> bool:
            nonlocal told
            facts = await self.instances()
            pids = sorted(
                int(each["pid"]) for each in facts.values() if each["state"] in ("ready", "sleeping")
            )
            folders = {
                path.name
                for path in (self.made.run_dir / "i").iterdir()
                if not path.name.startswith("spare-")
            }
            told = (facts, pids, instance_pids(self.made.run_dir), folders)
            return pids == instance_pids(self.made.run_dir) and set(facts) == folders and len(facts) <= 1

        try:
            await until(agree, "Redis, processes and folders to agree")
        except AssertionError as failure:
            raise AssertionError(f"{failure}: {told}") from None
        async with self.made.redis() as redis:
            await until(lambda: self._no_command_left(redis), "commands to be done")
            for key in [key async for key in redis.scan_iter(match="*")]:
                known = key.removeprefix("llamastead:").startswith(ENDLESS)
                assert known or await redis.pttl(key) != NO_END, f"{key} has no end"

    async def _no_command_left(self, redis: object) -> bool:
        return int(await redis.xlen(KEYS.commands)) == 0  # type: ignore[attr-defined]

    def cut(self) -> list[Path]:
        """Return the marks of engines that were stopped while they served."""
        return list(self.made.models.glob("*.serving.*"))

    async def struck(self, point: str, before: dict[str, str]) -> int:
        """Wait until a point is hit, and check that it was the process that led before."""
        pid = await self.orders.hit(point)
        assert pid == int(before["pid"]), (pid, before)
        return pid

    def forget(self, point: str) -> None:
        """Forget who was struck at a point, so that it can be hit again."""
        for path in self.orders.folder.glob(f"{point}.hit.*"):
            path.unlink()

    def role_of(self, pid: int) -> str:
        """Return the name of the role that has a pid."""
        return next(name for name, role in self.made.roles.items() if role.pid == pid)

    def running(self) -> int:
        """Return how many supervisors run."""
        return sum(is_alive(r.pid) for name, r in self.made.roles.items() if name.startswith("s"))


@contextlib.asynccontextmanager
async def stage(env: Mapping[str, str] = {}) -> AsyncIterator[Stage]:
    """Yield a herd of stub engines with a leader, a standby and a gateway, all obeying fault orders."""
    async with apart({**CLOCKS, **env}) as made:
        orders = FaultOrders(made.run_dir.parent / "orders")
        made.env.update(orders.env)
        made.add_models("a", "b", "sleeper", "broken")
        (made.models / "broken.gguf.json").write_text('{"crash": "loading", "crash_text": "error: broken"}')
        preset = made.run_dir.parent / "models.ini"
        preset.write_text(PRESET.replace("{models}", str(made.models)))
        words = ["--models-preset", str(preset), "--engine", str(stub_engine(made.run_dir.parent))]
        await made.gateway("g1")
        async with made.client() as client:
            staged = Stage(made, orders, client, [*words, "--models-max", "1"])
            await staged.supervisor()
            await staged.led()
            await staged.supervisor()
            assert (await staged.asked("a")).status_code == 200
            yield staged


async def is_in_state(staged: Stage, model: str, state: str) -> bool:
    """Return whether a model's instance is in a state, as Redis has it."""
    return (await staged.made.instance(model)).get("state") == state


def wake(pid: int) -> None:
    """Have a paused process go on."""
    os.kill(pid, signal.SIGCONT)


async def swap(staged: Stage) -> None:
    """Hold a stream of `a` while `b` is asked for: a drain, a stop, a start and a load, all answered."""
    gate = staged.made.models / "gate"
    gate.unlink(missing_ok=True)
    body = ask("a", stream=True)
    async with staged.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        pieces = answer.aiter_raw()
        whole = await anext(pieces)
        other = asyncio.create_task(staged.asked("b"))
        await until(lambda: is_in_state(staged, "a", "draining"), "a to be drained while it streams")
        gate.touch()
        whole += b"".join([piece async for piece in pieces])
        assert whole.endswith(b"data: [DONE]\n\n")
    assert (await other).status_code == 200
