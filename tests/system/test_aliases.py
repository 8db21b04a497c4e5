"""Aliases and hidden models: all names lead to one instance, and bodies pass as they are."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from herd import until
from pair import Pair, pair, sections

pytestmark = pytest.mark.asyncio(loop_scope="module")

PRESET = sections("a", alias="chat, org/chat:v1", tags="small")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Pair]:
    """One model with two more names whose engine sends back what it gets, and a hidden one."""
    async with pair(PRESET, "--models-max", "0", files=("ghost",)) as made:
        made.knobs("a", echo=True)
        ini = made.made.run_dir.parent / "models.ini"
        hidden = sections("ghost", hidden="on", alias="boo").replace("{models}", str(made.made.models))
        ini.write_text(ini.read_text() + hidden)
        await made.one.get("/models", params={"reload": "1"})
        yield made


async def test_c105_requests_by_an_alias_reach_the_model_with_their_bytes_as_they_are(both: Pair) -> None:
    """Ask by name and aliases, in JSON and in a form, at both gateways: one instance, bytes kept (C105)."""
    instances = set()
    for gateway, name in enumerate(("a", "chat", "org/chat:v1")):
        client = both.gateways()[gateway % 2]
        body = b'{ "prompt":"x\\u00e9",  "model" : "%b" }' % name.encode()
        kind = {"content-type": "application/json"}
        answer = await client.post("/v1/completions", content=body, headers=kind)
        assert answer.json()["body"].encode("latin-1") == body
        instances.add(answer.headers["x-llamastead-instance"])
        request = client.build_request(
            "POST",
            "/v1/audio/transcriptions",
            data={"model": name},
            files={"file": ("a.wav", b"RIFF\x00\xff")},
        )
        sent = request.read()
        answer = await client.send(request)
        assert answer.json()["body"].encode("latin-1") == sent
        instances.add(answer.headers["x-llamastead-instance"])
    assert len(instances) == 1
    shown = (await both.one.get("/v1/models/chat")).json()
    assert (shown["id"], shown["aliases"], shown["tags"]) == ("a", ["chat", "org/chat:v1"], ["small"])
    await both.settled()


async def test_a_hidden_model_is_not_listed_and_answers_by_its_names(both: Pair) -> None:
    """List the models, then ask for the hidden one by name and alias."""
    listed = (await both.one.get("/models")).json()["data"]
    assert [model["id"] for model in listed] == ["a"]
    for name in ("ghost", "boo"):
        await both.chat(name)
        assert (await both.one.get(f"/v1/models/{name}")).json()["id"] == "ghost"


async def test_a_new_alias_holds_at_once_and_starts_nothing_anew(both: Pair) -> None:
    """Give a running model one more name and take one away: same process, not marked as changed."""
    both.knobs("a", echo=True)
    await both.one.post("/v1/completions", json={"model": "a", "prompt": ""})

    async def process() -> int:
        return int((await both.status("a")).get("pid") or 0)

    pid = await until(process, "its process to be listed")
    ini = both.made.run_dir.parent / "models.ini"
    ini.write_text(ini.read_text().replace("alias = chat, org/chat:v1", "alias = chat, talk"))
    await both.one.get("/models", params={"reload": "1"})
    event = (await both.told("registry"))[-1]
    assert json.loads(event["changes"])["changed"] == {"a": ["aliases"]}

    async def known() -> bool:
        return bool((await both.two.get("/v1/models/talk")).status_code == 200)

    await until(known, "the new name at the other gateway")
    assert (await both.two.post("/v1/completions", json={"model": "talk", "prompt": ""})).status_code == 200
    assert (await both.one.get("/v1/models/org%2Fchat:v1")).status_code == 404
    status = await both.status("a")
    assert (status["pid"], status.get("changed")) == (pid, None)
