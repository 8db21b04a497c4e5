"""Reads the devices for the ledger, shows in Redis what came of it, and knows what the engine calls them."""

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llamastead.shared.devices.device import HOST, Device
from llamastead.shared.devices.gpus import Gpus
from llamastead.shared.devices.host import process_memory, read_host
from llamastead.shared.devices.listed import Listed, parse_listing
from llamastead.shared.disk import unusable
from llamastead.shared.margins import margin
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.core import ledger
from llamastead.supervisor.core.events import DevicesRead
from llamastead.supervisor.core.state import Device as Booked
from llamastead.supervisor.core.state import State
from llamastead.supervisor.engine import Engine
from llamastead.supervisor.launch import instance_environment
from llamastead.supervisor.placement import CUDA, Seen
from llamastead.supervisor.running import Running

log = logging.getLogger(__name__)

AWAITING_S = 0.25
"""How often devices are read while bytes of an ended process are awaited."""
LISTED_AGAIN_S = 60.0
"""How often an engine is asked again for devices that nothing else tells of: it is started for that."""
LISTING_PATIENCE_S = 15.0

ONLY_LISTED = "only the engine tells of it, now and then: what others use of it may be missed"
ONLY_CONFIGURED = "nothing but --device-memory tells of it"

Sizes = Mapping[str, int | None]


def list_devices(engine: Engine, environ: Mapping[str, str]) -> tuple[Listed, ...] | None:
    """Return the devices that an engine lists when started for that only; None when it does not."""
    variables = instance_environment(environ, engine.options)
    try:
        done = subprocess.run(
            [engine.path, "--list-devices"],
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LISTING_PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else parse_listing(f"{done.stderr}\n{done.stdout}")


class Devices:
    """All devices of this host. `look` has them read soon, `run` reads them until it is cancelled.

    `margins` and `sizes` are what the operator says of them (bytes; a size of None shares the host's memory),
    `visible` is CUDA_VISIBLE_DEVICES, `ask` lists an engine's devices.
    """

    def __init__(
        self,
        margins: Mapping[str, int],
        visible: str | None,
        reread: float,
        sizes: Sizes,
        ask: Callable[[Engine], tuple[Listed, ...] | None],
    ) -> None:
        self._gpus = Gpus(visible)
        self._margins = margins
        self._sizes = sizes
        self._reread = reread
        self._ask = ask
        self._listings: dict[str, tuple[Engine, tuple[Listed, ...] | None]] = {}
        self._listed_at = 0.0
        self._news = False
        self._unknown: set[str] = set()
        self._wanted = asyncio.Event()
        self._problems: dict[str, str] = {}
        self._shown: dict[str, dict[str, Any]] = {}
        self._known: tuple[Device, ...] = ()
        self.devices: dict[str, Device] = {}

    async def read(self, running: Mapping[str, Running], *, complete: bool = True) -> DevicesRead:
        """Read all devices, and what the process of each instance uses of them, so far as they tell.

        Not `complete`: it is not known yet what runs. What an engine told of its devices is read again then.
        """
        pids = {instance: note.pid for instance, note in running.items() if note.pid}
        found, host = await asyncio.to_thread(self._read, pids)
        self._complain()
        read = {device.name for device in self._known}
        booked = {
            d.name: Booked(
                d.total,
                d.free if d.name in read or self._news else None,
                margin(d, self._margins),
                frees_late=d.name != HOST and d.name in read,
                strangers=_strangers(d, pids.values()),
            )
            for d in found
        }
        self._news = self._news and not complete
        return DevicesRead(booked, {i: self._seen(pid, host.get(i)) for i, pid in pids.items()}, complete)

    def look(self) -> None:
        """Have the devices read again."""
        self._wanted.set()

    async def run(
        self,
        running: Mapping[str, Running],
        state: Callable[[], State],
        tell: Callable[[DevicesRead], None],
        store: LeaderStore,
        host: str,
    ) -> None:
        """Read devices when wanted and every so often, tell the driver, and show the accounts in Redis."""
        while True:
            self._wanted.clear()
            tell(await self.read(running))
            await asyncio.sleep(0)
            await self._show(state(), store, host)
            pause = AWAITING_S if state().releasing else self._reread
            try:
                async with asyncio.timeout(pause):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    def seen_by(self, engine: Engine) -> tuple[Seen, ...]:
        """Return the devices an engine sees, in its order, with the ledger's names. The first time, this
        starts the engine.

        What it calls CUDA are the GPUs that NVML knows, in the ledger's order; others are matched by name,
        share the host's memory if they say so, and else have an account under the engine's name. A lost one
        is not among them.
        """
        path = str(engine.path)
        if path not in self._listings:
            self._listings[path] = engine, self._ask(engine)
            self._listed_at, self._news = time.monotonic(), True
        listed = self._listings[path][1]
        gpus = [device for device in self._known if device.name != HOST and not device.lost]
        cuda = [Seen(f"{CUDA}{k}", self._pool(g), g.uuid, g.slice) for k, g in enumerate(gpus)]
        if listed is None:
            return tuple(cuda)
        own = [device for device in listed if not (device.name.startswith(CUDA) and cuda)]
        kept = [] if len(own) == len(listed) else cuda
        taken = {device.ledger for device in kept}
        for device in own:
            same = [gpu for gpu in gpus if is_same(gpu, device)]
            match = next((gpu for gpu in same if gpu.name not in taken), None)
            if same and match is None:
                continue  # listed by CUDA too
            name = self._pool(match) if match else self._pool_of_listed(device)
            taken.add(name)
            kept.append(Seen(device.name, name, match.uuid if match else ""))
        return tuple(kept)

    def _pool(self, device: Device) -> str:
        shares = self._sizes[device.name] is None if device.name in self._sizes else device.unified
        return HOST if shares else device.name

    def _pool_of_listed(self, device: Listed) -> str:
        return self._pool(Device(device.name, device.total, device.free, unified=device.unified))

    def _reported(self) -> dict[str, Listed]:
        """Return the devices that only an engine tells of, by the ledger's names."""
        return {
            listed.name: listed
            for engine, found in self._listings.values()
            for seen in self.seen_by(engine)
            for listed in found or ()
            if seen.engine == seen.ledger == listed.name
        }

    @property
    def usable(self) -> frozenset[str]:
        """The names of the devices where models can be started."""
        return frozenset(name for name, device in self.devices.items() if not device.lost)

    def tells(self, name: str) -> bool:
        """Whether a device tells what each process uses of it."""
        device = self.devices.get(name)
        return device is not None and device.processes is not None

    def spared_mib(self) -> dict[str, int]:
        """Return the MiB of each GPU that are to stay free, rounded up."""
        return {
            name: -(-margin(device, self._margins) >> 20)
            for name, device in self.devices.items()
            if name != HOST
        }

    def warn_of_unknown(self, names: Iterable[str]) -> None:
        """Say once of each device that nobody has told of that what is booked there has no limit."""
        for name in sorted({*names} - self.devices.keys() - self._unknown):
            self._unknown.add(name)
            log.warning(
                "a model uses a device of unknown size: it has no limit; --device-memory can set one",
                extra={"device": name},
            )

    def size(self, name: str) -> int:
        """Return the bytes of a device that models may have when nobody else uses it."""
        device = self.devices.get(name)
        return max(0, device.total - margin(device, self._margins)) if device else 0

    @property
    def first_gpu(self) -> str | None:
        """Return the name of the first GPU, None when there is none."""
        return next((name for name in self.devices if name != HOST), None)

    def close(self) -> None:
        """Let go of NVML."""
        self._gpus.close()

    def _read(self, pids: Mapping[str, int]) -> tuple[list[Device], Mapping[str, tuple[int, int] | None]]:
        try:
            self._known = (*self._gpus.read(), read_host())
            used = {instance: process_memory(pid) for instance, pid in pids.items()}
        except OSError as error:
            if not self._known:
                raise
            # Nothing is known now of what was read before: it stands, until files can be opened again.
            problem = unusable("the host's memory", error)
            self._known = tuple(replace(d, problem=problem) if d.name == HOST else d for d in self._known)
            used = {}
        if self._reported() and time.monotonic() - self._listed_at > LISTED_AGAIN_S:
            self._listings = {
                path: (engine, self._ask(engine)) for path, (engine, _) in self._listings.items()
            }
            self._listed_at, self._news = time.monotonic(), True
        found = [*self._known]
        found += [
            Device(name, listed.total, listed.free, listed.description, problem=ONLY_LISTED)
            for name, listed in self._reported().items()
        ]
        untold = sorted(self._sizes.keys() - {device.name for device in found})
        found += [Device(name, 0, 0, problem=ONLY_CONFIGURED) for name in untold]
        found = [self._sized(d) for d in found if d.name == HOST or self._pool(d) != HOST]
        self.devices = {device.name: device for device in found}
        return found, used

    def _sized(self, device: Device) -> Device:
        """Return a device with the size that the operator says it has; what is used of it is as it says."""
        size = self._sizes.get(device.name)
        if size is None:
            return device
        free = max(0, size - max(0, device.total - device.free))
        return replace(device, total=size, free=free)

    def _seen(self, pid: int, host: tuple[int, int] | None) -> dict[str, int]:
        """Return what a process uses: of the host only what can't be dropped, as the host itself counts.

        A process that a GPU does not list may be listed by a number of another namespace: nothing is said.
        """
        seen = {} if host is None else {HOST: host[0]}
        for device in self.devices.values():
            if device.processes is not None and pid in device.processes:
                seen[device.name] = device.processes[pid]
        return seen

    def _complain(self) -> None:
        problems = {name: device.problem for name, device in self.devices.items() if device.problem}
        if self._gpus.problem:
            problems["gpus"] = self._gpus.problem
        for name, problem in problems.items():
            if self._problems.get(name) != problem:
                log.warning("device can't be read well: %s", problem, extra={"device": name})
        self._problems = problems

    async def _show(self, state: State, store: LeaderStore, host: str) -> None:
        accounts = {account.device: asdict(account) for account in ledger.account(state)}
        for name, device in self.devices.items():
            names = ("description", "uuid", "bus_id", "problem")
            facts = {word: getattr(device, word) for word in names}
            strangers = state.devices[name].strangers if name in state.devices else {}
            accounts.get(name, {}).update({**facts, "strangers": dict(strangers)})
        # What a device shows changes all the time: only what can matter to a reader is written anew.
        essence = {
            name: facts | {"shows": facts["shows"] and facts["shows"] >> 26}
            for name, facts in accounts.items()
        }
        if essence != self._shown:
            self._shown = essence
            await store.put_devices(host, accounts, {name: facts["held"] for name, facts in accounts.items()})


def _strangers(device: Device, ours: Collection[int]) -> dict[str, int]:
    """Return what processes that are not ours use of a device, by number and name."""
    found = (device.processes or {}).items()
    return {_word_of(pid): size for pid, size in found if pid not in ours and size}


def _word_of(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        name = ""  # of another user, or in another namespace
    return f"pid {pid} {name}".strip()


def is_same(gpu: Device, listed: Listed) -> bool:
    """Whether a GPU that NVML knows may be what an engine lists: they go by the same name."""
    return bool(gpu.description) and gpu.description.lower() in listed.description.lower()
