"""The scripts of downloads: begun and ended by the leader, planned by the worker while they are wanted."""

import json

import pytest
import redis as blocking
from redis.asyncio import Redis
from small_herd import Herd

from llamastead.shared.hub_plan import HubFile, Plan
from llamastead.shared.store.downloads import DownloadRecords
from llamastead.shared.store.keys import Keys

PLAN = Plan("org/m", "c" * 40, "Q4_K_M", (HubFile("m.gguf", 7, "a" * 64),))


@pytest.fixture
async def herd(redis: Redis, keys: Keys) -> Herd:
    return await Herd(redis, keys).open()


async def test_a_plan_is_kept_only_for_who_still_wants_it(herd: Herd) -> None:
    """Keep a plan before, during and after a download: only in between it is there, and the leader hears."""
    client = blocking.Redis(unix_socket_path=herd.redis.connection_pool.connection_kwargs["path"])
    records = DownloadRecords(client, herd.keys)
    assert not records.keep_plan("org/m", PLAN)
    await herd.leader.put_download("org/m", {"state": "planning"}, {"kind": "download", "change": "started"})
    assert records.keep_plan("org/m", PLAN)
    found = (await herd.gateway.read_downloads())["org/m"]
    assert (found["name"], found["state"], found["total"]) == ("org/m", "planning", "7")
    assert Plan.from_json(found["plan"]) == PLAN
    assert (await herd.redis.xrevrange(herd.keys.commands, count=1))[0][1] == {
        "verb": "planned",
        "model": "org/m",
    }
    assert await herd.leader.drop_download("org/m", {"kind": "download", "change": "finished"})
    assert not await herd.leader.drop_download("org/m", {"kind": "download", "change": "finished"})
    assert not records.keep_plan("org/m", PLAN)
    assert await herd.gateway.read_downloads() == {}
    changes = [fields.get("change") for _, fields in await herd.redis.xrange(herd.keys.events)]
    assert [change for change in changes if change] == ["started", "finished"]
    assert json.loads(PLAN.to_json())["files"][0]["size"] == 7
    client.close()
