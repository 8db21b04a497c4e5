"""What loads and devices show of memory goes into the book, and to the core, which reckons with it."""

import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from llamastead.shared import figures
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor.book import Book
from llamastead.supervisor.bookkeeping import Bookkeeping
from llamastead.supervisor.core.events import DevicesRead, Event, RegistryChanged, Took
from llamastead.supervisor.devices import Devices
from llamastead.supervisor.measuring import Measuring
from llamastead.supervisor.running import Running

log = logging.getLogger(__name__)


class Learning:
    """Keeps the book true while models load and devices come and go.

    `running` are the notes kept of each instance, `tell` reaches the driver, `spawn` runs a task.
    """

    def __init__(
        self,
        book: Book,
        devices: Devices,
        measuring: Measuring,
        bookkeeping: Bookkeeping,
        store: LeaderStore,
        running: Mapping[str, Running],
        tell: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._book = book
        self._devices = devices
        self._measuring = measuring
        self._bookkeeping = bookkeeping
        self._store = store
        self._running = running
        self._tell = tell
        self._spawn = spawn
        self._usable: frozenset[str] = frozenset()
        self._told: dict[str, dict[str, int]] = {}

    async def begin(self) -> None:
        """Read all devices and begin to reckon the figures of all models."""
        await self._devices.read({}, complete=False)
        await self._bookkeeping.refresh()  # which has engines list what they see
        await self._measuring.count_workers()
        self._tell(await self._devices.read({}, complete=False))
        self._usable = self._devices.usable
        self._tell(RegistryChanged(self._book.specs()))

    async def look(self) -> None:
        """Read all devices now that it is known what lives: what they show beyond that is others'."""
        self.on_devices_read(await self._devices.read(self._running))

    def on_devices_read(self, event: DevicesRead) -> None:
        """Take a reading: what each process uses, and whether there are other devices than before."""
        self._tell(event)
        seen = {self._running[each].model: used for each, used in event.seen.items() if each in self._running}
        self._measuring.on_seen(seen)
        self._told = {each: told for each, told in self._told.items() if each in self._running}
        for each, told in self._told.items():
            note = self._running[each]
            if beyond := self._book.beyond(note.model, note.place, told, event.seen.get(each, {})):
                self._measuring.on_untold(*beyond)
        usable = self._devices.usable
        if usable != self._usable:
            self._usable = usable
            self._spawn(self._reckon_again())

    def on_took(self, instance: str) -> None:
        """Take what a ready instance says it allocated: for its booking, and for the next start."""
        note = self._running[instance]
        self._measuring.on_loaded(note.model)  # written down after this
        found = note.effective.figures
        if found is None:
            return
        spot = self._book.spot(note.model, note.place)
        needs, shown = self._book.amounts(note.model, found, spot, seen=True)
        self._told[instance] = self._book.told(note.model, found, note.place)
        self._devices.warn_of_unknown(needs)
        self._tell(Took(instance, needs, shown))
        self._book.learn(note.model, found, int(note.meta.get("meta", {}).get("n_ctx", 0)), note.place)
        self._tell(RegistryChanged(self._book.specs()))
        self._devices.look()

    def on_ran_out(self, instance: str) -> None:
        """Take what a load that ran out of memory says it wanted, for its next try: of one that the kernel
        killed all that it had told of, since nothing was refused to it.
        """
        note = self._running[instance]
        wanted = note.effective.wanted or figures.totals(note.effective.figures or {})
        if wanted:
            facts = {name: size >> 20 for name, size in sorted(wanted.items())}
            log.warning("a load ran out of memory", extra={"model": note.model, "wanted_mib": facts})
            self._book.ran_out(note.model, wanted, note.place)
            self._tell(RegistryChanged(self._book.specs()))
            shown = {"memory": json.dumps(self._book.show(note.model))}
            event = {"kind": "ran_out", "model": note.model, "wanted_mib": json.dumps(facts)}
            self._spawn(self._store.put_model(note.model, shown, event))
        self._devices.look()

    async def _reckon_again(self) -> None:
        """Take in that there are other devices than before: a GPU is lost or came back, or an engine lists
        one more.
        """
        await self._bookkeeping.refresh()
        self._tell(RegistryChanged(self._book.specs()))
