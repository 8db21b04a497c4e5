"""A gateway's copy of the registry: when it is read anew, and whose facts stay."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import ScriptedLeader, open_desk, settings_for, until
from redis.asyncio import Redis

from llamastead.gateway.catalog import Catalog
from llamastead.shared.errors import ApiError
from llamastead.shared.store.errors import NoHerd
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.records import Messages


async def test_a_herd_that_opens_after_its_registry_was_published_is_known_at_once(
    redis: Redis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publish, have the copy tried and refused, open the herd, with no reading due for an hour: known."""
    leader = ScriptedLeader(redis, keys)
    async with open_desk(redis, keys, settings_for(tmp_path, reread=3600.0)) as desk:
        listens, told, tried = asyncio.Event(), asyncio.Event(), asyncio.Event()
        read_herd, read_wait = desk.store.read_herd, desk.store.read_wait

        async def listening(*where: Any) -> Messages:
            listens.set()
            return await read_wait(*where)

        async def refused() -> dict[str, str]:
            try:
                return await read_herd()
            except NoHerd:
                if told.is_set():
                    tried.set()
                raise

        monkeypatch.setattr(desk.store, "read_herd", refused)
        monkeypatch.setattr(desk.store, "read_wait", listening)
        await asyncio.wait_for(listens.wait(), 30)  # what is told before is not heard
        assert await leader.store.lead(1, 600_000, {})
        await leader.store.publish("r1", {"a": {"source": "preset"}}, {})
        await until(lambda: [e for e in desk.events if e["kind"] == "registry"], "the registry to be told")
        told.set()
        desk.catalog.mark_all()
        await asyncio.wait_for(tried.wait(), 30)
        await leader.store.open_herd({})
        await until(lambda: desk.catalog.resolve("a"), "the registry")


class SlowStore(GatewayStore):
    """A store whose first reading of the models comes back last, with what was true when it began."""

    def __init__(self) -> None:
        self.names = ["old"]
        self.reading, self.goes_on = asyncio.Event(), asyncio.Event()

    async def read_herd(self) -> dict[str, str]:
        return {"incarnation": "i"}

    async def read_aliases(self) -> dict[str, str]:
        return {}

    async def read_downloads(self) -> dict[str, dict[str, str]]:
        return {}

    async def read_models(self) -> dict[str, dict[str, str]]:
        found: dict[str, Mapping[str, str]] = {name: {"name": name} for name in self.names}
        if not self.reading.is_set():
            self.reading.set()
            await self.goes_on.wait()
        return {name: dict(fields) for name, fields in found.items()}


async def test_a_slow_reading_does_not_put_older_facts_over_later_ones() -> None:
    """Begin a reading, have the registry change and read it anew for somebody who was told, and only then let
    the first one go on: the copy is the new one.
    """
    store = SlowStore()
    catalog = Catalog(store, 3600.0)
    running = asyncio.create_task(catalog.run())
    catalog.mark_all()
    await store.reading.wait()
    store.names = ["new"]
    again = asyncio.create_task(catalog.read_now())
    await asyncio.sleep(0)
    store.goes_on.set()
    await again
    await asyncio.sleep(0)
    assert list(catalog.models) == ["new"]
    running.cancel()


async def test_a_name_is_not_unknown_while_presets_are_on_their_way(
    redis: Redis, keys: Keys, tmp_path: Path
) -> None:
    """Look an unknown name up while a preset repository comes from the hub, and once its plan says that it
    holds a model: first it may be one of the presets, 503; then it is unknown.
    """
    leader = ScriptedLeader(redis, keys)
    await leader.open("a")
    async with open_desk(redis, keys, settings_for(tmp_path)) as desk:
        began = {"kind": "download", "change": "started", "model": "org/presets"}
        await leader.store.put_download("org/presets", {"state": "planning", "presets": 1}, began)
        await until(lambda: desk.catalog.downloads, "the download to be known")
        with pytest.raises(ApiError) as refused:
            await desk.catalog.look_again("small")
        assert (refused.value.status, refused.value.retry_after) == (503, 2)
        assert "presets of 'org/presets' are on their way" in refused.value.message
        moved = {**began, "change": "progress", "progress": "{}"}
        await leader.store.put_download("org/presets", {"state": "downloading", "presets": 0}, moved)
        await until(lambda: not desk.catalog.downloads["org/presets"].presets, "the plan to be known")
        assert await desk.catalog.look_again("small") is None
