"""Commands of gateways through a real Valkey: orders reach the driver, the rest is answered at once."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from llamastead.shared.addresses import UnixAddress
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.leader import LeaderStore
from llamastead.supervisor import commands as supervisor_commands
from llamastead.supervisor import downloads as supervisor_downloads
from llamastead.supervisor.commands import Commands
from llamastead.supervisor.core.events import LoadOrdered, TurnsAway, UnloadOrdered
from llamastead.supervisor.logfiles import log_path
from llamastead.supervisor.removing import Removing

SOON_MS = 60_000


class Ordered:
    """Stands for the driver: keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.looked = 0
        self.told = asyncio.Event()

    def put(self, event: Any) -> None:
        self.events.append(event)
        self.told.set()

    def look(self) -> None:
        self.looked += 1
        self.told.set()


class Downloads:
    """Stands for the downloads: keeps what is ordered of `org/m`, the only one that is under way."""

    def __init__(self, ordered: list[tuple[str, str]]) -> None:
        self.ordered = ordered

    async def order(self, command: str, name: str, *, again: bool) -> None:
        self.ordered.append(("download again" if again else "download", name))

    async def cancel(self, command: str, name: str, *, force: bool) -> bool:
        if name == "org/m":
            self.ordered.append(("force" if force else "cancel", name))
        return name == "org/m"


class Removals:
    """Stands for the removing: keeps what is ordered."""

    def __init__(self, ordered: list[tuple[str, str]]) -> None:
        self.ordered = ordered

    def order(self, command: str, model: str, *, again: bool) -> None:
        self.ordered.append(("remove again" if again else "remove", model))


class Desk:
    """A gateway's and a leader's side of one store, with commands being read between them."""

    def __init__(self, redis: Redis, keys: Keys, run_dir: Path) -> None:
        self.redis, self.keys = redis, keys
        self.gateway = GatewayStore(redis, keys)
        self.leader = LeaderStore(redis, keys, "token")
        self.read: list[str] = []
        self.reloads: list[tuple[str, bool]] = []
        self.measured: list[tuple[str, str]] = []
        self.ordered: list[tuple[str, str]] = []
        self.commands = Commands(
            self.leader,
            run_dir,
            self._on_metadata,
            lambda identity, preset: self.measured.append((identity, preset)),
            lambda name: UnixAddress(str(run_dir / name)),
            lambda command, apply: self.reloads.append((command, apply)),
            cast("supervisor_downloads.Downloads", Downloads(self.ordered)),
            cast("Removing", Removals(self.ordered)),
        )
        self.driver = Ordered()

    async def _on_metadata(self, identity: str) -> bool:
        self.read.append(identity)
        return True

    async def answer(self, verb: str, deadline_ms: int = SOON_MS, **fields: str) -> dict[str, Any]:
        """Give a command and return its answer."""
        command = await self.gateway.submit(verb, "g", deadline_ms, fields)
        return await self.answer_of(command)

    async def answer_of(self, command: str) -> dict[str, Any]:
        """Wait for the answer to a command."""
        last = "0-0"
        async with asyncio.timeout(10):
            while True:
                for message in (await self.gateway.read_wait("g", last, "$", 1000)).inbox:
                    last = message.id
                    if (message.fields["type"], message.fields["command"]) == ("answer", command):
                        return dict(json.loads(message.fields["payload"]))

    async def unfinished(self) -> int:
        """Return how many commands stand in the stream."""
        return int(await self.redis.xlen(self.keys.commands))


@pytest.fixture
async def desk(redis: Redis, keys: Keys, tmp_path: Path) -> AsyncIterator[Desk]:
    """A desk whose commands are being read by the leader."""
    made = Desk(redis, keys, tmp_path)
    assert await made.leader.lead(1, 60_000, {})
    await made.leader.open_herd({})
    await made.gateway.heartbeat("g", 1, {}, {}, {}, [])
    task = asyncio.create_task(made.commands.run(made.driver))  # type: ignore[arg-type]
    yield made
    task.cancel()


async def test_orders_reach_the_driver_and_are_answered_when_it_says_so(desk: Desk) -> None:
    """Order a load and a forced unload: the driver gets them in order, answers go to who asked, once."""
    load = await desk.gateway.submit("load", "g", SOON_MS, {"model": "a"})
    unload = await desk.gateway.submit(
        "unload", "g", SOON_MS, {"model": "a", "force": "1", "instance": "h-1-1"}
    )
    async with asyncio.timeout(10):
        while len(desk.driver.events) < 2:
            desk.driver.told.clear()
            await desk.driver.told.wait()
    assert desk.driver.events == [LoadOrdered("a", load), UnloadOrdered("a", unload, True, "h-1-1")]
    assert await desk.unfinished() == 2  # a leader that dies now leaves them to the next
    await desk.commands.answer(load, {"success": True})
    assert await desk.answer_of(load) == {"success": True}
    await desk.commands.answer(load, {"success": False})
    await desk.commands.answer("1-1", {"success": False})  # an order of our own: nobody to tell
    await desk.commands.answer(unload, {})
    assert await desk.answer_of(unload) == {}
    assert await desk.unfinished() == 0


async def test_what_is_not_answered_yet_is_said_to_be_at_work(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order two and answer one: the gateway hears of the other again and again, until that is answered."""
    monkeypatch.setattr(supervisor_commands, "AT_WORK_S", 0.01)
    telling = asyncio.create_task(desk.commands.tell_at_work())
    reload = await desk.gateway.submit("reload", "g", SOON_MS, {})
    load = await desk.gateway.submit("load", "g", SOON_MS, {"model": "a"})
    heard, last = [], "0-0"
    async with asyncio.timeout(10):
        while not desk.driver.events:
            desk.driver.told.clear()
            await desk.driver.told.wait()
        await desk.commands.answer(load, {})
        while heard[-3:] != [reload] * 3:
            for message in (await desk.gateway.read_wait("g", last, "$", 1000)).inbox:
                last = message.id
                if message.fields["type"] == "at_work":
                    heard.append(message.fields["command"])
    await desk.commands.answer(reload, {})
    telling.cancel()
    assert await desk.answer_of(reload) == {}


async def test_late_and_unknown_commands_are_refused(desk: Desk) -> None:
    """Give an expired load and a verb that nobody knows: both are answered, the driver hears of neither."""
    late = await desk.answer("load", deadline_ms=-1, model="a")
    assert (late["error"]["status"], late["error"]["message"]) == (
        503,
        "'load' was read too late and not done",
    )
    unknown = await desk.answer("dance")
    assert unknown["error"]["status"] == 400
    assert "dance" in unknown["error"]["message"]
    assert desk.driver.events == []
    assert await desk.unfinished() == 0


async def test_logs_are_answered_from_the_files(desk: Desk, tmp_path: Path) -> None:
    """Ask for the last line, for what follows, with a wrong offset, and of a model that never ran."""
    path = log_path(tmp_path, "org/m")
    path.parent.mkdir()
    path.write_text("one\ntwo\n")
    tail = await desk.answer("logs", model="org/m", lines="1", offset="")
    assert tail["text"] == "two\n"
    with path.open("a") as file:
        file.write("three\n")
    assert (await desk.answer("logs", model="org/m", lines="0", offset=tail["next"]))["text"] == "three\n"
    wrong = f"{path.stat().st_ino}:-1"
    assert (await desk.answer("logs", model="org/m", lines="0", offset=wrong))["error"]["status"] == 400
    assert (await desk.answer("logs", model="other", lines="1", offset=""))["error"]["status"] == 404


async def test_what_only_says_look_is_looked_at_and_gone(desk: Desk, redis: Redis, keys: Keys) -> None:
    """Put in what scripts and jobs say: the driver looks, metadata is copied, nothing stays."""
    await redis.xadd(keys.commands, {"verb": "metadata", "identity": "i1", "model": "a"})
    await redis.xadd(keys.commands, {"verb": "demand", "model": "a"})
    async with asyncio.timeout(10):
        while not desk.driver.looked:
            desk.driver.told.clear()
            await desk.driver.told.wait()
        while not desk.read or await desk.unfinished():  # noqa: ASYNC110 - Redis sets no event of ours
            await asyncio.sleep(0.01)
    assert desk.read == ["i1"]
    assert desk.driver.events == []


async def test_an_address_that_refused_is_looked_at(desk: Desk, redis: Redis, tmp_path: Path) -> None:
    """Tell of one that listens and of two that don't: the driver hears of those two."""
    with socket.socket(socket.AF_UNIX) as listens, socket.socket(socket.AF_UNIX) as bound:
        listens.bind(str(tmp_path / "listens"))
        listens.listen()
        bound.bind(str(tmp_path / "bound"))
        for name in ("listens", "bound", "gone"):
            await redis.xadd(desk.keys.commands, {"verb": "refused", "instance": name})
        async with asyncio.timeout(10):
            while len(desk.driver.events) < 2:
                desk.driver.told.clear()
                await desk.driver.told.wait()
    assert desk.driver.events == [TurnsAway("bound"), TurnsAway("gone")]
