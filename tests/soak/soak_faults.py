"""The faults of the soak: each strikes something chosen by the seed, proves it, and mends it."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
from few_files import no_more_files
from full_disk import full
from herd import Role, until
from inside import is_alive, leader
from soak_stage import CONTEXTS, DOWNLOADS, MODELS, Stage

from llamastead.supervisor.holder_record import Record, instance_folders, read_record
from llamastead.up.processes import children_of

_SCRIPTS = ("acquire", "release", "heartbeat", "ready", "stop", "drain", "ended", "put_instance")
POINTS = (
    *(f"{script}.{when}" for script in _SCRIPTS for when in ("before", "after")),
    *("take_commands.after", "observe.after", "holder.forked", "holder.recorded"),
    *("holder.exit-said", "holder.reaped"),
)

LOSABLE = ("herd", "leader", "models", "aliases", "instance", "leases:", "queue", "tickets:", "gateway")
LOSABLE += ("inbox:", "commands", "events", "devices:", "held:")


@dataclass
class Injected:
    """One fault: what, whom, from when to when (monotonic), and whether it proved that it struck. `model` is
    that of the instance it struck, `dead` are the roles that it ended.
    """

    name: str
    target: str
    began: float
    ended: float = 0.0
    fired: bool = False
    model: str = ""
    dead: tuple[str, ...] = ()


class Faults:
    """Injects one fault after the other. `injected` is what was done."""

    def __init__(self, stage: Stage, seed: int, pause_s: float) -> None:
        self._stage = stage
        self._choice = random.Random(f"{seed}-faults")
        self._pause_s = pause_s
        self.stop = asyncio.Event()
        self.injected: list[Injected] = []
        self._deck: list[str] = []

    async def run(self) -> None:
        """Strike until told to stop; all kinds come up before one comes again."""
        while not self.stop.is_set():
            await self._rest(self._choice.uniform(0.3, 1.7) * self._pause_s)
            if self.stop.is_set():
                return
            if not self._deck:
                self._deck = sorted(KINDS)
                self._choice.shuffle(self._deck)
            name = self._deck.pop()
            fault = Injected(name, "", time.monotonic())
            self.injected.append(fault)
            await KINDS[name](self, fault)
            fault.dead += tuple(await self._stage.restart_the_dead())
            fault.ended = time.monotonic()

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stop.wait()

    def _pick(self, kind: str) -> Role:
        return self._choice.choice(self._stage.alive(kind))

    async def _leader(self) -> Role | None:
        pid = int((await leader(self._stage.made)).get("pid", 0))
        return next((role for role in self._stage.alive("s") if role.pid == pid), None)

    # Processes

    async def _kill(self, role: Role, fault: Injected) -> None:
        fault.target = role.name
        fault.dead += (role.name,)
        fault.fired = await role.signal(signal.SIGKILL) == -signal.SIGKILL
        await self._rest(self._choice.uniform(0.0, 1.5))
        await self._stage.start(role.name)

    async def _pause(self, role: Role, seconds: float, fault: Injected) -> None:
        fault.target = role.name
        os.kill(role.pid, signal.SIGSTOP)
        fault.fired = True
        await asyncio.sleep(seconds)
        os.kill(role.pid, signal.SIGCONT)

    async def kill_gateway(self, fault: Injected) -> None:
        """KILL a gateway and start it again."""
        await self._kill(self._pick("g"), fault)

    async def pause_gateway(self, fault: Injected) -> None:
        """STOP a gateway, short or beyond suspicion and sweep."""
        await self._pause(self._pick("g"), self._choice.choice((0.5, 2.5, 4.5)), fault)

    async def roll_gateway(self, fault: Injected) -> None:
        """TERM a gateway once another is ready, and start it anew."""
        role = self._pick("g")
        fault.target = role.name
        fault.fired = await role.signal(signal.SIGTERM) in (0, 1)
        await self._stage.start(role.name)
        await until(lambda: self._stage.accepts(role.name), f"{role.name} to be ready")

    async def kill_leader(self, fault: Injected) -> None:
        """KILL who leads."""
        role = await self._leader()
        if role is not None:
            await self._kill(role, fault)

    async def pause_leader(self, fault: Injected) -> None:
        """STOP who leads, within its lead or beyond."""
        role = await self._leader()
        if role is not None:
            await self._pause(role, self._choice.choice((0.5, 2.0, 5.0)), fault)

    async def kill_supervisors(self, fault: Injected) -> None:
        """KILL all supervisors at once."""
        for role in self._stage.alive("s"):
            await self._kill(role, fault)

    def _record(self) -> Record | None:
        records = [read_record(folder) for folder in instance_folders(self._stage.made.run_dir)]
        found = [record for record in records if record is not None and is_alive(record.engine_pid)]
        return self._choice.choice(found) if found else None

    async def _strike(
        self, fault: Injected, number: signal.Signals, *, holder: bool, pause_s: float = 0
    ) -> None:
        record = self._record()
        if record is None:
            return
        fault.target, fault.model = record.instance, record.model
        pid = record.holder_pid if holder else record.engine_pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            fault.fired = True
        if pause_s:
            await asyncio.sleep(pause_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def kill_instance(self, fault: Injected) -> None:
        """KILL an engine, whatever it does."""
        await self._strike(fault, signal.SIGKILL, holder=False)

    async def term_instance(self, fault: Injected) -> None:
        """TERM an engine from outside."""
        await self._strike(fault, signal.SIGTERM, holder=False)

    async def hang_instance(self, fault: Injected) -> None:
        """STOP an engine for good: it must be found."""
        await self._strike(fault, signal.SIGSTOP, holder=False)

    async def pause_instance(self, fault: Injected) -> None:
        """STOP an engine for an instant."""
        await self._strike(fault, signal.SIGSTOP, holder=False, pause_s=0.4)

    async def kill_holder(self, fault: Injected) -> None:
        """KILL a holder."""
        await self._strike(fault, signal.SIGKILL, holder=True)

    async def hang_holder(self, fault: Injected) -> None:
        """STOP a holder for good: it must be found when it is to stop."""
        await self._strike(fault, signal.SIGSTOP, holder=True)

    # What processes share: files, disk, clock

    async def no_files(self, fault: Injected) -> None:
        """Let a gateway, a supervisor or the worker open no more files for a while."""
        role = self._pick(self._choice.choice("gsw"))
        fault.target = role.name
        with contextlib.suppress(ProcessLookupError), no_more_files(role.pid, self._choice.choice((0, 2, 8))):
            fault.fired = True
            await asyncio.sleep(self._choice.choice((0.5, 3.0)))

    async def full_disk(self, fault: Injected) -> None:
        """Leave no room in the run folder for a while, where it has a file system of its own."""
        if not self._stage.has_disk:
            return
        with contextlib.suppress(AssertionError), full(self._stage.made.run_dir):
            fault.fired = True
            await asyncio.sleep(self._choice.choice((0.5, 3.0)))

    async def jump_clock(self, fault: Injected) -> None:
        """Set the clock of all roles and of Redis ahead or back for a while, and right again."""
        if self._stage.clock is None:
            return
        seconds = self._choice.choice((-7200, -30, 30, 7200))
        fault.target = f"{seconds:+} s"
        async with self._stage.made.redis() as redis:
            before = (await redis.time())[0]
            self._stage.clock.jump(seconds)
            fault.fired = abs((await redis.time())[0] - before - seconds) < 10
        await asyncio.sleep(self._choice.choice((0.5, 3.0)))
        self._stage.clock.jump(0)

    # The way to Redis, and Redis

    async def _wire(self, fault: Injected, spoil: str) -> None:
        ways = {"gateways": (self._stage.gates,), "supervisors": (self._stage.reigns,)}
        ways["both"] = (self._stage.gates, self._stage.reigns)
        fault.target = self._choice.choice(sorted(ways))
        seconds = self._choice.choice((0.5, 1.5, 4.0))
        for way in ways[fault.target]:
            if spoil == "delay":
                way.delay_s = self._choice.choice((0.1, 0.5, 2.0))
            else:
                getattr(way, spoil)()
        fault.fired = True
        await asyncio.sleep(seconds)
        for way in ways[fault.target]:
            way.heal()

    async def cut_redis(self, fault: Injected) -> None:
        """End all connections to Redis."""
        await self._wire(fault, "cut")

    async def stall_redis(self, fault: Injected) -> None:
        """Let nothing through to Redis for a while."""
        await self._wire(fault, "stall")

    async def refuse_redis(self, fault: Injected) -> None:
        """Make Redis unreachable for a while."""
        await self._wire(fault, "refuse")

    async def slow_redis(self, fault: Injected) -> None:
        """Make Redis slow for a while."""
        await self._wire(fault, "delay")

    async def empty_redis(self, fault: Injected) -> None:
        """Lose all of Redis's data."""
        async with self._stage.made.redis() as redis:
            fault.fired = bool(await redis.flushall())

    async def restart_redis(self, fault: Injected) -> None:
        """Restart Redis with its data."""
        async with self._stage.made.redis() as redis:
            await redis.save()
        await self._restart(fault)

    async def forget_redis(self, fault: Injected) -> None:
        """Restart Redis with data from long ago, or none."""
        await self._restart(fault)

    async def _restart(self, fault: Injected) -> None:
        self._stage.valkey.kill()
        fault.fired = await asyncio.to_thread(self._stage.valkey.wait) == -signal.SIGKILL
        await asyncio.sleep(self._choice.uniform(0.0, 1.0))
        await asyncio.to_thread(self._stage.start_valkey)

    async def full_redis(self, fault: Injected) -> None:
        """Have Redis refuse writes for want of memory."""
        async with self._stage.made.redis() as redis:
            fault.fired = bool(await redis.config_set("maxmemory", "1"))
            await asyncio.sleep(self._choice.choice((0.5, 3.0)))
            await redis.config_set("maxmemory", "0")

    async def replica_redis(self, fault: Injected) -> None:
        """Make Redis a replica that takes no writes, as one that was failed over is."""
        async with self._stage.made.redis() as redis:
            fault.fired = bool(await redis.replicaof("127.0.0.1", 1))
            await asyncio.sleep(self._choice.choice((0.5, 3.0)))
            await redis.replicaof("NO", "ONE")

    async def lose_key(self, fault: Injected) -> None:
        """Delete one key of the herd, as a policy that evicts does; not a model's, which is unknown then."""
        async with self._stage.made.redis() as redis:
            keys = [key async for key in redis.scan_iter(match="*")]
            found = sorted(key for key in keys if key.removeprefix("llamastead:").startswith(LOSABLE))
            if found:
                fault.target = self._choice.choice(found)
                fault.fired = await redis.delete(fault.target) == 1

    # Points, and people

    async def point(self, fault: Injected) -> None:
        """Kill whoever comes by a fault point first, and start it again."""
        fault.target = self._choice.choice(POINTS)
        self._stage.orders.order(fault.target)
        before = set(self._stage.orders.struck(fault.target))

        async def struck() -> bool:
            return bool(set(self._stage.orders.struck(fault.target)) - before)

        try:
            await until(struck, "somebody to come by", 5.0)
            fault.fired = True
        except AssertionError:
            self._stage.orders.withdraw(fault.target)
        await asyncio.sleep(0.2)  # for the end of whom it struck

    async def kill_worker(self, fault: Injected) -> None:
        """KILL the worker and start it again."""
        await self._kill(self._pick("w"), fault)

    async def roll_worker(self, fault: Injected) -> None:
        """TERM the worker and start it anew."""
        role = self._pick("w")
        fault.target = role.name
        fault.fired = await role.signal(signal.SIGTERM) == 0
        await self._stage.start(role.name)

    async def kill_job(self, fault: Injected) -> None:
        """KILL the process in which the worker downloads."""
        await self._pull(fault, "its process killed")

    async def pull(self, fault: Injected) -> None:
        """Order a download, hold it back, and call it off, or let it come to its end and remove it."""
        await self._pull(fault, self._choice.choice(("called off", "to its end")))

    async def _pull(self, fault: Injected, then: str) -> None:
        repository = self._choice.choice(DOWNLOADS)
        fault.target = f"{repository}, {then}"
        name, port = f"{repository}:Q4_K_M", self._choice.choice(sorted(self._stage.port_of.values()))
        held = self._stage.hub.fault("/cdn/", hold=1 << 20)
        base = f"http://127.0.0.1:{port}"
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(base_url=base, timeout=20.0) as client:
                self._stage.called_off.discard(repository)
                told = await client.post("/models", json={"model": name})
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.to_thread(held.held.wait, 5.0), 6.0)
                fault.fired = told.status_code == 200 and held.held.is_set()
                if then == "its process killed":
                    fault.fired = self._kill_jobs() and fault.fired
                if then != "called off":
                    held.release.set()
                    await self._rest(2.0)
                ended = await client.delete("/models", params={"model": name})
                if ended.status_code == 200:
                    self._stage.called_off.add(repository)
        held.release.set()
        self._stage.hub.faults.remove(held)

    def _kill_jobs(self) -> bool:
        killed = False
        for role in self._stage.alive("w"):
            for pid in children_of({role.pid}):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed = True
        return killed

    async def change_presets(self, fault: Injected) -> None:
        """Write the preset file anew, with another context for some models: they are measured anew."""
        context = self._choice.choice(CONTEXTS)
        fault.target = f"ctx-size = {context}"
        self._stage.write_presets(context)
        fault.fired = True

    async def order(self, fault: Injected) -> None:
        """Order a load or an unload, or a reload of the registry."""
        name, port = self._choice.choice(sorted(self._stage.port_of.items()))
        verb, model = self._choice.choice(("load", "unload")), self._choice.choice(MODELS)
        fault.target = f"{verb} {model} at {name}"
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=20.0) as client:
                await client.post(f"http://127.0.0.1:{port}/models/{verb}", json={"model": model})
                fault.fired = True
        for role in self._stage.alive("s"):
            role.process.send_signal(signal.SIGHUP)


KINDS: dict[str, Callable[[Faults, Injected], Awaitable[None]]] = {
    name: method
    for name, method in vars(Faults).items()
    if not name.startswith("_") and name not in ("run",) and callable(method)
}
