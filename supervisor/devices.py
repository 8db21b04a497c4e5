"""Reads the devices for the ledger, shows in Redis what came of it, and knows what the engine calls them."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from llamastead.shared.devices.device import HOST, Device
from llamastead.shared.devices.gpus import Gpus
from llamastead.shared.devices.host import process_memory, read_host
from llamastead.shared.margins import margin
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.core import ledger
from llamastead.supervisor.core.events import DevicesRead
from llamastead.supervisor.core.state import Device as Booked
from llamastead.supervisor.core.state import State
from llamastead.supervisor.running import Running

log = logging.getLogger(__name__)

AWAITING_S = 0.25
"""How often devices are read while bytes of an ended process are awaited."""


class Devices:
    """All devices of this host. `look` has them read soon, `run` reads them until it is cancelled."""

    def __init__(self, margins: Mapping[str, int], visible: str | None, reread: float) -> None:
        self._gpus = Gpus(visible)
        self._margins = margins
        self._reread = reread
        self._wanted = asyncio.Event()
        self._problems: dict[str, str] = {}
        self._shown: dict[str, dict[str, Any]] = {}
        self.devices: dict[str, Device] = {}

    async def read(self, running: Mapping[str, Running]) -> DevicesRead:
        """Read all devices, and what the process of each instance uses of them, so far as they tell."""
        pids = {instance: note.pid for instance, note in running.items() if note.pid}
        found, host = await asyncio.to_thread(self._read, pids)
        self.devices = {device.name: device for device in found}
        self._complain()
        booked = {
            d.name: Booked(d.total, d.free, margin(d, self._margins), frees_late=d.name != HOST)
            for d in found
        }
        return DevicesRead(booked, {i: self._seen(pid, host.get(i)) for i, pid in pids.items()})

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

    def ledger_name(self, engine_name: str) -> str:
        """Return the ledger's name of what an engine calls CUDA1; its own name for what NVML doesn't know."""
        cuda = re.fullmatch(r"CUDA(\d+)", engine_name)
        gpus = [name for name in self.devices if name != HOST]
        return gpus[int(cuda[1])] if cuda and int(cuda[1]) < len(gpus) else engine_name

    @property
    def first_gpu(self) -> str | None:
        """Return the name of the first GPU, None when there is none."""
        return next((name for name in self.devices if name != HOST), None)

    def close(self) -> None:
        """Let go of NVML."""
        self._gpus.close()

    def _read(
        self, pids: Mapping[str, int]
    ) -> tuple[tuple[Device, ...], Mapping[str, tuple[int, int] | None]]:
        found = (*self._gpus.read(), read_host())
        return found, {instance: process_memory(pid) for instance, pid in pids.items()}

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
            accounts.get(name, {}).update({word: getattr(device, word) for word in names})
        # What a device shows changes all the time: only what can matter to a reader is written anew.
        essence = {
            name: facts | {"shows": facts["shows"] and facts["shows"] >> 26}
            for name, facts in accounts.items()
        }
        if essence != self._shown:
            self._shown = essence
            await store.put_devices(host, accounts, {name: facts["held"] for name, facts in accounts.items()})
