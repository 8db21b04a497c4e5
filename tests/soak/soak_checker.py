"""The judge of the soak. It asks nobody of the herd: it reads Redis, /proc, journals and the clients' log."""

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from herd import KEYS, instance_pids, processes_naming, until
from redis.exceptions import RedisError
from soak_faults import Injected
from soak_stage import MODELS_MAX, NAMES, STOP_TIMEOUT_S, STUBS, TOKEN_S, Stage
from soak_traffic import BOUND_S, TALK_TOKENS, Outcome

EVERY_S = 0.2
HOLDER = b"/supervisor/holder"
ENDLESS = (
    "herd",
    "leadership",
    "models",
    "aliases",
    "model:",
    "instances",
    "instance:",
    "gateways",
    "commands",
)
ENDLESS += ("jobs", "workers", "events", "devices:", "held:", "measurement:", "metadata:", "rq:")
BEFORE_S = 30.0
# Three probes, five seconds apart, find an engine that hangs; a hung holder shows when its engine must stop.
HANG_S = 30.0
AT_ONCE_S = 5.0
# Redis back with data of before names instances that are gone: the next leader finds that out when it takes
# over, which takes a lead's time and ten seconds for the answer of a holder that hangs.
OLD_DATA = ("restart_redis", "forget_redis")
OLD_DATA_S = 20.0
AWAY = (
    "cut_redis",
    "stall_redis",
    "refuse_redis",
    "slow_redis",
    "full_redis",
    "replica_redis",
    "restart_redis",
)
EMPTIED = ("empty_redis", "forget_redis", "restart_redis")
# By a clock that is set ahead it forgets what has an end.
FORGETS = (*EMPTIED, "jump_clock")
# What a model takes is guessed until it is measured anew, as with other presets it is.
UNMEASURED = (*EMPTIED, "change_presets")
GUESSES_S = 30.0
# What no fault makes right.
NEVER = ("the herd secrets differ", "is too big", "not found", "Invalid API Key", "Traceback")
GROWTH_MIB, GROWTH_FILES = 40, 24


@dataclass
class Size:
    """What a process takes: resident MiB and open files."""

    mib: float
    files: int


@dataclass
class Checker:
    """Looks on all the time (`run`), then judges; `breaches` are sentences, none is what is wanted."""

    stage: Stage
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    breaches: list[str] = field(default_factory=list)
    looks: int = 0
    most_instances: int = 0
    most_booked: float = 0.0
    _held: dict[str, int] = field(default_factory=dict)
    faults: list[Injected] = field(default_factory=list)

    async def run(self) -> None:
        """Look every so often at what must never be, until told to stop."""
        while not self.stop.is_set():
            self.looks += 1
            running = engines(self.stage)
            self.most_instances = max(self.most_instances, len(running))
            if len(running) > MODELS_MAX:
                self._breach(f"{len(running)} engines run, {MODELS_MAX} may")
            with contextlib.suppress(RedisError, OSError):
                await self._look_at_redis()
            await asyncio.sleep(EVERY_S)

    def _breach(self, text: str) -> None:
        if text not in self.breaches:
            self.breaches.append(text)

    async def _look_at_redis(self) -> None:
        async with self.stage.made.redis() as redis:
            known = await redis.zcard(KEYS.instances)
            if known > MODELS_MAX and not self._follows(OLD_DATA, OLD_DATA_S):
                self._breach(f"Redis knows {known} instances, {MODELS_MAX} may be")
            async for key in redis.scan_iter(match=KEYS.devices("*")):
                for name, account in (await redis.hgetall(key)).items():
                    facts = json.loads(account)
                    held = sum(facts.get("held", {}).values())
                    room = (facts.get("total") or 0) - facts.get("margin", 0)
                    # What was guessed too low is paid back when somebody wants the room.
                    more = held > self._held.get(name, 0)
                    self._held[name] = held
                    if (
                        facts.get("total")
                        and held > room
                        and more
                        and not self._follows(UNMEASURED, GUESSES_S)
                    ):
                        self._breach(f"{name} is booked beyond its margin: {account}")
                    if name.startswith("gpu"):
                        self.most_booked = max(self.most_booked, held / room)

    def _follows(self, names: tuple[str, ...], seconds: float) -> bool:
        """Whether a fault of these names goes on, or is over for no more than so long."""
        now = time.monotonic()
        return any(f.name in names and now - (f.ended or now) < seconds for f in self.faults)

    # Afterwards

    def judge_outcomes(self, outcomes: Iterable[Outcome], faults: list[Injected]) -> Counter[str]:
        """Check each request's end against the faults around it; return how many ended how."""
        counts: Counter[str] = Counter()
        for outcome in outcomes:
            label = f"{outcome.result} {outcome.status}" if outcome.result == "refused" else outcome.result
            counts[label] += 1
            if outcome.result in ("stuck", "truncated"):
                self._breach(f"a request is {outcome.result}: {outcome}")
            if outcome.ended - outcome.began > BOUND_S:
                self._breach(f"a request took too long: {outcome}")
            near = [f for f in faults if outcome.began - BEFORE_S <= f.began <= outcome.ended]
            if outcome.result == "cut" and not any(self._may_cut(f, outcome) for f in near):
                self._breach(f"a request was cut without cause: {outcome}")
            if outcome.result == "broken" and not any(self._may_break(f, outcome) for f in near):
                self._breach(f"a stream was broken without cause: {outcome}")
            if outcome.result == "lost" and not (
                self._was_said(outcome) or any(self._may_lose(f, outcome) for f in near)
            ):
                self._breach(f"a conversation was lost without cause: {outcome}")
            if outcome.result == "refused" and outcome.status not in (500, 502, 503):
                self._breach(f"a request was refused with a wrong status: {outcome}")
            if outcome.result == "refused" and (not near or any(word in outcome.detail for word in NEVER)):
                self._breach(f"a request was refused without cause: {outcome}")
        return counts

    @staticmethod
    def _may_cut(fault: Injected, outcome: Outcome) -> bool:
        """The death of the gateway itself leaves a client without a word, and else only its want of files:
        the event loop hangs up on whom it has none for.
        """
        if fault.name == "no_files" and fault.target == outcome.gateway:
            return outcome.began <= fault.ended and fault.began <= outcome.ended
        within = outcome.began - AT_ONCE_S <= fault.ended and fault.began <= outcome.ended
        return within and outcome.gateway in fault.dead

    @staticmethod
    def _may_break(fault: Injected, outcome: Outcome) -> bool:
        """The death of its gateway or of its own instance breaks a stream, and nothing else does."""
        ended = fault.ended or fault.began
        at_once = outcome.began - AT_ONCE_S <= ended and fault.began <= outcome.ended
        if at_once and {outcome.gateway, outcome.beside} & set(fault.dead):
            return True
        if fault.name == "roll_gateway":  # it gives what it serves so long, and then no longer
            here = fault.target in (outcome.gateway, outcome.beside)
            return here and fault.began + STOP_TIMEOUT_S <= outcome.ended and outcome.began <= ended
        if fault.name == "point":  # those of a holder strike an instance that the order can't choose
            return at_once and fault.fired and fault.target.startswith("holder.")
        if fault.model != outcome.model:
            return False
        return at_once or (fault.name.startswith("hang_") and outcome.ended - fault.began <= HANG_S)

    @classmethod
    def _may_lose(cls, fault: Injected, outcome: Outcome) -> bool:
        """A conversation goes with its instance, or with the memory of Redis; begun while Redis is away it is
        answered as one that nobody can come back to.
        """
        if fault.name in AWAY and fault.began <= outcome.first_byte_at and outcome.began <= fault.ended:
            return True
        forgot = fault.name in (*FORGETS, "lose_key") and outcome.began - AT_ONCE_S <= fault.ended
        return (forgot and fault.began <= outcome.ended) or cls._may_break(fault, outcome)

    @staticmethod
    def _was_said(outcome: Outcome) -> bool:
        """Whether it may have been said to its end when it was asked for: then nothing keeps its instance."""
        took_s = TALK_TOKENS * TOKEN_S if outcome.model in STUBS else 0.0
        return outcome.ended > outcome.first_byte_at + took_s

    def judge_folders(self) -> None:
        """Check that no part is left of a download whose calling off was confirmed."""
        cache = self.stage.folder / "cache"
        gone = [cache / f"models--{name.replace('/', '--')}" for name in self.stage.called_off]
        parts = [str(path) for folder in gone for path in folder.rglob("*.incomplete")]
        if parts:
            self._breach(f"parts of downloads are left: {parts}")

    def judge_journals(self) -> None:
        """Check that no engine was told to stop while it served."""
        for model in STUBS:
            path = self.stage.made.models / f"{model}.gguf.journal"
            entries = map(json.loads, path.read_text().splitlines() if path.exists() else ())
            ended_by_others: set[int] = set()
            for entry in entries:
                if entry["event"] == "term":
                    ended_by_others.add(entry["pid"])
                elif (
                    entry["event"] == "exit_line" and entry["serving"] and entry["pid"] not in ended_by_others
                ):
                    self._breach(f"{model} was stopped while it served: {entry}")

    async def judge_rest(self, before: dict[str, Size]) -> None:
        """Check that nothing is left over once nobody asks any more."""
        await self._agree(self._nothing_counted, "a claim or a ticket is left", 20)
        await self._agree(self._same_everywhere, "Redis, processes and folders don't agree", 40)
        await self._agree(self._jobs_under_way, "a job does not end", 120)
        await self._agree(self._known_processes, "a process is left over", 30)
        async with self.stage.made.redis() as redis:
            async for key in redis.scan_iter(match="*"):
                name = key.removeprefix("llamastead:")
                if not name.startswith(ENDLESS) and await redis.pttl(key) == -1:
                    self._breach(f"{key} has no end")
        for name, now in sizes(self.stage).items():
            was = before.get(name[0], now)
            if now.mib > was.mib + GROWTH_MIB or now.files > was.files + GROWTH_FILES:
                self._breach(f"{name} grew from {was} to {now}")

    async def _agree(self, look: object, what: str, patience_s: float) -> None:
        told: list[object] = []

        async def right() -> bool:
            told[:] = [await look()]  # type: ignore[operator]
            return not told[0]

        try:
            await until(right, what, patience_s)
        except AssertionError:
            self._breach(f"{what}: {told}")

    async def _nothing_counted(self) -> object:
        async with self.stage.made.redis() as redis:
            commands = await redis.xlen(KEYS.commands)
            gateways = await redis.zcard(KEYS.gateways)
        left = await self.stage.made.counted()
        told = {**left, **({"commands": commands} if commands else {})}
        right = gateways == len(self.stage.port_of)
        return told | ({} if right else {"gateways": gateways})

    async def _jobs_under_way(self) -> object:
        async with self.stage.made.redis() as redis:
            names = await redis.zrange(KEYS.jobs, 0, -1)
            return {name: await redis.hgetall(KEYS.job(name)) for name in names}

    async def _same_everywhere(self) -> object:
        async with self.stage.made.redis() as redis:
            names = await redis.zrange(KEYS.instances, 0, -1)
            facts = [await redis.hgetall(KEYS.instance(name)) for name in names]
        told = sorted(int(each.get("pid") or 0) for each in facts)
        folders = {path.name for path in (self.stage.made.run_dir / "i").iterdir()}
        left = {name for name in folders if not name.startswith("spare-")}
        seen = engines(self.stage)
        same = told == seen and left == set(names)
        return None if same else {"redis": facts, "processes": seen, "folders": sorted(folders)}

    async def _known_processes(self) -> object:
        roles = {role.pid for kind in "gsw" for role in self.stage.alive(kind)}
        known, unknown = set(engines(self.stage)), []
        for pid in processes_naming(self.stage.made.run_dir):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                # A holder is where its folder is.
                ours = Path(f"/proc/{pid}/cwd").exists() if HOLDER in words else os.getpgid(pid) in known
                if pid not in roles and words and not ours:
                    unknown.append((pid, words[:200]))
        return unknown if unknown or len(roles) != len(NAMES) else None


def engines(stage: Stage) -> list[int]:
    """Return the pids of all engines that serve, without their helpers and those that are measured."""
    found = []
    # The folder above has the models, too: on TCP nothing else in an engine's words tells whose it is.
    for pid in instance_pids(stage.folder):
        with contextlib.suppress(OSError):
            measured = b"m.sock" in Path(f"/proc/{pid}/cmdline").read_bytes()
            found += [pid] if os.getpgid(pid) == pid and not measured else []
    return found


def sizes(stage: Stage) -> dict[str, Size]:
    """Return what the gateways, supervisors and workers that run take, by name."""
    found = {}
    for role in (role for kind in "gsw" for role in stage.alive(kind)):
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{role.pid}/statm").read_text().split()[1])
            files = len(list(Path(f"/proc/{role.pid}/fd").iterdir()))
            found[role.name] = Size(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), files)
    return found


def biggest(found: dict[str, Size]) -> dict[str, Size]:
    """Return of each kind of role the larger figures."""
    kinds: dict[str, Size] = {}
    for name, size in found.items():
        was = kinds.get(name[0], size)
        kinds[name[0]] = Size(max(was.mib, size.mib), max(was.files, size.files))
    return kinds
