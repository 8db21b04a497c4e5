"""The start of a reign: every instance from before is found, verified and adopted, or cleaned up."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llamastead.shared.clock import wall_ms
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.words import EndClass, InstanceState
from llamastead.supervisor.clock import RedisClock
from llamastead.supervisor.core.events import Adopted, Event, Exited, Found, StopFailed
from llamastead.supervisor.effects import STOP_WAITS_S
from llamastead.supervisor.holder_link import HolderView
from llamastead.supervisor.holder_record import instance_folders, read_record, remove_folder, spare_folders
from llamastead.supervisor.holders import Holders
from llamastead.supervisor.news import end_recorded
from llamastead.supervisor.running import Running

log = logging.getLogger(__name__)

S = InstanceState
KILL_PATIENCE_S = 5.0  # what does not end of a KILL by then is left to go in the background
_OF_PHASE = {
    "starting": S.STARTING,
    "loading": S.LOADING,
    "ready": S.READY,
    "sleeping": S.SLEEPING,
    "stopping": S.STOPPING,
    "exited": S.STOPPING,
}
_LOADS = frozenset({S.STARTING, S.LOADING})
# What Redis says and the engine can't know: nobody new is let in, or nobody at all.
_DECIDED = frozenset({S.DRAINING, S.STOPPING, S.STOP_FAILED})


@dataclass(frozen=True)
class Recovery:
    """Brings core, Redis and holders in line. `host` is ours: instances of other hosts are left alone."""

    run_dir: Path
    host: str
    number: int
    reads: GatewayStore
    store: LeaderStore
    holders: Holders
    clock: RedisClock
    running: dict[str, Running]
    tell: Callable[[Event], None]
    on_view: Callable[[str, HolderView], None]
    clean_up: Callable[[str], None]

    async def run(self) -> int:
        """Adopt what lives and return how many; one bad record does not stop the others."""
        facts = await self.store.observe()
        self.clock.seen(facts.now_ms)
        folders = instance_folders(self.run_dir)
        listed, known = await self.reads.read_claims(), await self.reads.read_instances()
        for name in {folder.name for folder in folders} - known.keys():
            # Redis may have lost the list, and nothing else.
            if record := await self.reads.read_instance(name):
                known[name] = record
        records = {i: f for i, f in known.items() if f.get("host") == self.host}
        for instance, record in records.items():
            self.tell(Found(instance, record["model"], record.get("revision", "")))
        forgotten = {f.name: r for f in folders if f.name not in records and (r := read_record(f))}
        for instance, own in forgotten.items():
            # Whatever it turns out to be, what it holds is ours: others' would be taken for what stays.
            self.tell(Found(instance, own.model, own.revision))
        adopted = set()
        stuck = set()
        # All at once: one that hangs answers none of us, and holds up nobody else.
        nonces = (records.get(folder.name, {}).get("nonce", "") for folder in folders)
        views = await asyncio.gather(*map(self.holders.adopt, folders, nonces))
        for folder, view in zip(folders, views, strict=True):
            if view is None:
                if not await self._clean(folder):
                    stuck.add(folder.name)
            elif view.instance is not None:
                leases = facts.claims.get(view.instance)
                await self._adopt(view, records.get(view.instance, {}), len(leases.leases) if leases else 0)
                adopted.add(view.instance)
        spares = spare_folders(self.run_dir)
        for folder, view in zip(spares, await asyncio.gather(*map(self.holders.adopt, spares)), strict=True):
            if view is None:
                remove_folder(folder)  # killed while it waited, so it could not do that itself
        for instance in (records.keys() | forgotten.keys()) - adopted - stuck:
            await self._lost(instance)
        for instance in listed.keys() - known.keys() - adopted:
            # Redis lost its record before it ended; nobody counts it.
            await self.store.ended(instance, EndClass.LOST, None, "")
        return len(adopted)

    async def _adopt(self, view: HolderView, record: Mapping[str, str], leases: int) -> None:
        assert view.instance is not None
        assert view.model is not None
        state = self._state(view, record)
        # Redis may have lost what its holder still has.
        booked = "" if view.needs is None else json.dumps(dict(view.needs))
        record = {"place": view.place, "needs": booked} | dict(record)
        self.running[view.instance] = Running.adopted(view, record["place"])
        fields: dict[str, str | int] = {
            "model": view.model,
            "host": self.host,
            "address": view.address or "",
            "nonce": view.nonce or "",
            "revision": view.revision or "",
            "pid": view.pid or 0,
            "epoch": self.number,
            "place": record["place"],
            "needs": record["needs"],
        }
        if "started_ms" not in record:
            fields["started_ms"] = wall_ms()
        # READY is a script's to write, since it grants the waiting tickets with it; the core asks for it.
        # Until then it stays what it was: a load counts when it ends, whoever sees that.
        known = record.get("state")
        shown = state
        if state is S.READY and known != S.READY:
            shown = S(known) if known in _LOADS else S.RECOVERING
        of_model = {name: fields[name] for name in ("place", "pid")}
        await self.store.put_instance(view.instance, fields | {"state": shown}, view.model, of_model)
        log.info(
            "instance adopted",
            extra={"model": view.model, "instance": view.instance, "pid": view.pid, "state": state},
        )
        self.tell(self._adopted(view, record, state, leases))
        self.on_view(view.instance, view)
        if state is S.STOPPING and view.phase != "stopping":
            # The old leader died between the script that decided and the word to the holder.
            self.holders.stop(view.instance, STOP_WAITS_S)

    def _adopted(
        self, view: HolderView, record: Mapping[str, str], state: InstanceState, leases: int
    ) -> Adopted:
        now_ms = wall_ms()
        started_ms = int(record.get("started_ms") or now_ms)
        ready_ms = int(record.get("ready_ms") or 0)
        used_ms = int(record.get("last_used_ms") or 0)
        return Adopted(
            instance=view.instance or "",
            model=view.model or "",
            revision=view.revision or "",
            state=state,
            started_at=self.clock.monotonic(started_ms),
            ready_at=self.clock.monotonic(ready_ms) if ready_ms else None,
            load_time=int(record.get("load_ms") or 0) / 1000,
            leases=leases,
            last_used=self.clock.monotonic(used_ms) if used_ms else None,
            ordered=record.get("drain_ordered") == "1",
            end_class=EndClass(record.get("end_class") or EndClass.STOPPED),
            needs=json.loads(record["needs"]) if record.get("needs") else None,
            place=record.get("place", ""),
        )

    def _state(self, view: HolderView, record: Mapping[str, str]) -> InstanceState:
        told = _OF_PHASE.get(view.phase, S.LOADING)
        decided = record.get("state")
        if told is S.LOADING and decided in (S.READY, S.SLEEPING, S.WAKING):
            return S.WAKING
        return S(decided) if decided in _DECIDED else told

    async def _clean(self, folder: Path) -> bool:
        """A holder that is gone or hangs: end what the record names, if anything, and remove the folder.

        False when that does not end: its room stays taken, and it is tried on.
        """
        log.warning("instance without a holder: cleaning up", extra={"instance": folder.name})
        record = read_record(folder)
        if record is None or await end_recorded(folder, KILL_PATIENCE_S):
            remove_folder(folder)
            return True
        self.running[folder.name] = Running(record.model, record.address, record.nonce, pid=record.engine_pid)
        fields: dict[str, str | int] = {"host": self.host, "pid": record.engine_pid, "epoch": self.number}
        await self.store.put_instance(folder.name, fields, record.model, {})
        self.tell(Found(folder.name, record.model, record.revision))
        self.tell(StopFailed(folder.name))
        self.clean_up(folder.name)
        return False

    async def _lost(self, instance: str) -> None:
        """The record goes now, so that the herd does not open with it; the core still counts its room."""
        reason = "it was gone when the supervisor looked for it"
        await self.store.ended(instance, EndClass.LOST, None, reason)
        self.tell(Exited(instance, EndClass.LOST, reason))
