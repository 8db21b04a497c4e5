"""Carries the core's decisions out: one script or one word to a holder for each action."""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llamastead.shared.clock import wall_ms
from llamastead.shared.store.conversations import CLAIM
from llamastead.shared.store.errors import UnknownModel, WrongState
from llamastead.shared.store.leader import LeaderStore
from llamastead.shared.store.records import Claimed
from llamastead.shared.words import EndClass, InstanceState, WireStatus
from llamastead.supervisor.core import actions, events
from llamastead.supervisor.core.actions import Action
from llamastead.supervisor.core.events import Event
from llamastead.supervisor.holder_link import HolderError, HolderView
from llamastead.supervisor.holders import Holders
from llamastead.supervisor.launch import InstanceSpec, LaunchError
from llamastead.supervisor.running import Running

log = logging.getLogger(__name__)

SPARE_AFTER_S = 0.2
STOP_WAITS_S = 600.0
"""How long the holder of a stopping instance waits for requests that no lease speaks for any more."""

Answerer = Callable[[str, Mapping[str, Any]], Coroutine[Any, Any, None]]


class Effects:
    """The only way from a decision to the world. `perform` returns the outcomes that are known at once.

    `build` makes an instance's start order (LaunchError when it can't), `answer` replies to a command, `tell`
    gives the driver an outcome that comes later, `spawn` runs a task that ends with this reign, `on_view` is
    given what a holder says of itself when its engine was started, `clean_up` ends what is left of a start
    that failed and tells so, `memory_of` is what is shown of a model's memory, `on_freed` is called when an
    instance has ended or sleeps and its bytes are about to be free, `end_conversations` stops those of an
    instance that is about to be cut.
    """

    def __init__(
        self,
        store: LeaderStore,
        holders: Holders,
        build: Callable[[actions.Start, str], InstanceSpec],
        answer: Answerer,
        tell: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_view: Callable[[str, HolderView], None],
        clean_up: Callable[[str, str, EndClass], None],
        running: dict[str, Running],
        memory_of: Callable[[str], str],
        on_freed: Callable[[], None],
        end_conversations: Callable[[str, Sequence[str]], Coroutine[Any, Any, None]],
        host: str,
        number: int,
    ) -> None:
        self._store = store
        self._holders = holders
        self._build = build
        self._answer = answer
        self._tell = tell
        self._spawn = spawn
        self._on_view = on_view
        self._clean_up = clean_up
        self._running = running
        self._memory_of = memory_of
        self._on_freed = on_freed
        self._end_conversations = end_conversations
        self._host = host
        self._number = number

    async def perform(self, action: Action) -> list[Event]:
        """Carry one action out. Errors of Redis or of the store come through and end the reign."""
        match action:
            case actions.Start():
                return await self._start(action)
            case actions.Grant(instance, model):
                return [events.Granted(instance, await self._ready(instance, model))]
            case actions.Wake(instance, model):
                return [events.Granted(instance, await self._store.wake(instance, model))]
            case actions.TryStop(instance, end_class):
                return [await self._stop(instance, end_class)]
            case actions.TryDrain(instance, _, ordered):
                return [await self._drain(instance, ordered)]
            case actions.Want(instance):
                await self._store.want(instance)
            case actions.TryUndrain(instance):
                granted = await self._store.undrain(instance)
                return [
                    events.UndrainRefused(instance)
                    if granted is None
                    else events.Undrained(instance, granted)
                ]
            case actions.TrySleep(instance):
                slept = await self._store.sleep(instance)
                if slept:
                    self._on_freed()
                return [
                    events.Slept(instance)
                    if slept
                    else events.SleepRefused(instance, await self._claims(instance))
                ]
            case actions.AbortLoad(instance, end_class, _, reason):
                await self._end(instance, end_class, reason, force=False)
            case actions.ForceStop(instance, end_class, reason):
                await self._end(instance, end_class, reason, force=True)
            case actions.FailTickets(model, error, tickets):
                if await self._store.fail(model, asdict(error), tickets):
                    log.info("tickets failed", extra={"model": model, "why": error.message})
            case actions.ShowFailed(model, reason):
                await self._show_failed(model, reason)
            case actions.Answer(command, error):
                await self._answer(command, {"error": asdict(error)} if error else {"success": True})
            case actions.Ended():
                await self._ended(action)
            case actions.Decide(model, weighed, requests):
                candidates = {w.instance: f"{w.model}: {w.verdict}" for w in weighed}
                told = {"candidates": json.dumps(candidates), "request_ids": json.dumps(requests)}
                log.info("made room", extra={"model": model, **told})
                await self._store.emit("decision", {"model": model, **told})
            case actions.ShowTaken(instance, model, needs):
                memory = {"memory": self._memory_of(model)}
                await self._store.put_instance(instance, {"needs": json.dumps(dict(needs))}, model, memory)
            case actions.Discrepancy(device, amount):
                facts = {"device": device, "mib": amount >> 20}
                log.warning("memory of ended models never showed as free; what is shown counts", extra=facts)
                await self._store.emit("discrepancy", {"device": device, "bytes": amount})
        return []

    async def _start(self, action: actions.Start) -> list[Event]:
        try:
            spec = self._build(action, secrets.token_hex(16))
        except LaunchError as error:
            await self._put(
                action.instance, InstanceState.STARTING, action.model, {"revision": action.revision}
            )
            return [
                events.Exited(
                    action.instance, EndClass.FAILED_TO_START, str(error), doomed=True, log=(str(error),)
                )
            ]
        self._running[action.instance] = Running.started(spec, action.place)
        warning = ""
        if action.beyond:
            beyond = ", ".join(f"{size >> 20} MiB on {name}" for name, size in sorted(action.beyond.items()))
            warning = (
                f"it needs {beyond} more than there is: tried all the same, part may run on the processor"
            )
            log.warning(
                "model is too big for its devices: tried once",
                extra={"model": action.model, "beyond": beyond},
            )
            await self._store.emit("too_big", {"model": action.model, "text": warning})
        log.info("instance starting", extra={"model": action.model, "instance": action.instance})
        # Ordered before it is written down: its folder tells a later leader of it as well.
        self._spawn(self._launch(spec))
        await self._put(
            action.instance,
            InstanceState.STARTING,
            action.model,
            {
                "host": self._host,
                "address": spec.address,
                "nonce": spec.nonce,
                "revision": action.revision,
                "epoch": self._number,
                "started_ms": wall_ms(),
                "place": action.place,
                "needs": json.dumps(dict(action.needs)),
            },
            {"warning": warning, "place": action.place},
        )
        return []

    async def _launch(self, spec: InstanceSpec) -> None:
        try:
            view = await self._holders.start(spec)
        except HolderError as error:
            self._clean_up(spec.instance, str(error), EndClass.FAILED_TO_START)
            return
        if spec.instance in self._running:
            self._running[spec.instance].pid = view.pid or 0
        self._tell(events.Started(spec.instance))
        self._on_view(spec.instance, view)
        # A holder's start would take its time from the load that somebody waits for.
        await asyncio.sleep(SPARE_AFTER_S)
        await keep_spare(self._holders)

    async def _ready(self, instance: str, model: str) -> int:
        running = self._running[instance]
        fields: dict[str, str | int] = {
            "ready_ms": wall_ms(),
            "address": running.address,
            "nonce": running.nonce,
            "pid": running.pid,
        }
        load_ms = running.take_load_ms()
        if load_ms is not None:
            fields["load_ms"] = load_ms
        # The pid too: who hears that it is ready reads all of it then, and what is written later is not told.
        meta = json.dumps(running.meta.get("meta", {}))
        shown: dict[str, str | int] = {"progress": "", "meta": meta, "pid": running.pid}
        granted = await self._store.ready(instance, model, fields, shown)
        log.info(
            "instance ready",
            extra={"model": model, "instance": instance, "load_ms": load_ms, "granted": granted},
        )
        return granted

    async def _stop(self, instance: str, end_class: EndClass) -> Event:
        try:
            outcome = await self._store.stop(instance, end_class)
        except WrongState:
            return events.StopRefused(instance, 0)
        if isinstance(outcome, Claimed):
            return events.StopRefused(instance, outcome.leases)
        self._holders.stop(instance, STOP_WAITS_S)
        log.info("instance stopping", extra={"instance": instance, "end_class": end_class})
        return events.StopGranted(instance)

    async def _drain(self, instance: str, ordered: bool) -> Event:
        if ordered:
            # A later leader must not take it back for want of an entry that needs its room.
            model = self._running[instance].model
            await self._store.put_instance(instance, {"drain_ordered": 1}, model, {})
        if not await self._store.drain(instance):
            return events.DrainRefused(instance)
        return events.Drained(instance, await self._claims(instance))

    async def _end(self, instance: str, end_class: EndClass, reason: str | None, *, force: bool) -> None:
        held = await self._leases(instance) if force else {}
        conversations = [name.removeprefix(CLAIM) for name in held if name.startswith(CLAIM)]
        await self._store.put_instance(
            instance,
            {"state": InstanceState.STOPPING, "end_class": end_class},
            self._holders.model_of(instance),
            {},
            # Gateways end what they have there: cut, an engine waits for its readers.
            {"kind": "cut", "model": self._holders.model_of(instance), "instance": instance}
            if force
            else None,
        )
        log.warning(
            "instance ended early", extra={"instance": instance, "end_class": end_class, "why": reason}
        )
        if conversations:
            self._spawn(self._cut(instance, conversations))
        else:
            self._holders.stop(instance, STOP_WAITS_S, force)

    async def _cut(self, instance: str, conversations: Sequence[str]) -> None:
        await self._end_conversations(instance, conversations)
        self._holders.stop(instance, STOP_WAITS_S, force=True)

    async def _ended(self, action: actions.Ended) -> None:
        tail = "\n".join(action.log)
        await self._store.ended(
            action.instance,
            action.end_class,
            action.code,
            action.reason,
            {"log": tail, "failed": int(action.state is InstanceState.FAILED), "progress": ""},
            action.state,
        )
        level = logging.WARNING if action.state is InstanceState.FAILED else logging.INFO
        log.log(
            level,
            "instance ended",
            extra={
                "model": action.model,
                "instance": action.instance,
                "end_class": action.end_class,
                "why": action.reason,
                "exit_code": action.code,
            },
        )
        self._holders.forget(action.instance)
        self._running.pop(action.instance, None)
        self._on_freed()

    async def _show_failed(self, model: str, reason: str) -> None:
        ended = {
            "state": InstanceState.FAILED,
            "end_class": EndClass.FAILED_TO_START,
            "exit_code": "",
            "reason": reason,
        }
        told = {"kind": "status", "model": model, "instance": "", "status": WireStatus.UNLOADED}
        with contextlib.suppress(UnknownModel):  # removed meanwhile: nobody is shown it any more
            await self._store.put_model(model, {"failed": 1, "log": "", **ended}, {**told, **ended})
        log.warning("load refused", extra={"model": model, "why": reason})

    async def _put(
        self,
        instance: str,
        state: InstanceState,
        model: str,
        fields: Mapping[str, str | int],
        shown: Mapping[str, str] = {},
    ) -> None:
        await self._store.put_instance(
            instance,
            {"model": model, "state": state, **fields},
            model,
            {"failed": 0, "progress": "", **shown},
        )

    async def _claims(self, instance: str) -> int:
        return len(await self._leases(instance))

    async def _leases(self, instance: str) -> Mapping[str, str]:
        held = (await self._store.observe()).claims.get(instance)
        return held.leases if held else {}


async def keep_spare(holders: Holders) -> None:
    """Have a holder wait for the next start. One that can't be had only makes that start slower."""
    try:
        await holders.start_spare()
    except (HolderError, OSError) as error:
        log.warning("no spare holder: %s", error)
