"""The real router and Llamastead side by side: the same requests, and all that differs is meant to."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from compat_kit import ENGINE_VARIABLE, Ask, Deviation, engine_under_test, side_by_side
from compat_page import BEHAVIOUR, PAGE, page
from compat_requests import KEY, keyed_requests, open_requests
from compat_table import unlisted, vanished

from llamastead.gateway.routes import Router

METHODS = ("GET", "POST", "DELETE")
TESTS = Path(__file__).parents[1]

# Four hundred requests to two servers: half a minute on an idle machine.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

FIM = ",".join(
    f"tokenizer.ggml.fim_{part}_token_id=int:{token}"
    for part, token in (("pre", 280), ("suf", 281), ("mid", 282))
)
PRESET = f"""\
[*]
ctx-size = 2048
threads = 1
warmup = off
[chat]
alias = chatty
[embed]
embeddings = true
pooling = mean
[rank]
reranking = true
[fim]
override-kv = {FIM}
[sleeper]
sleep-idle-seconds = 2
[broken]
model = /nowhere/broken.gguf
"""
MODELS = ("chat", "embed", "rank", "fim", "sleeper")
# What is done while both tell what happens: the request, the model, the status that ends it.
STEPS = (
    (Ask("POST", "/models/load", {"model": "chat"}, note="load"), "chat", "loaded"),
    (Ask("POST", "/models/unload", {"model": "chat"}, note="unload"), "chat", "unloaded"),
    (Ask("POST", "/models/load", {"model": "broken"}, note="a load that fails"), "broken", "unloaded"),
    (Ask("POST", "/models/load", {"model": "sleeper"}, note="load, fall asleep"), "sleeper", "sleeping"),
    (Ask("POST", "/tokenize", {"model": "sleeper", "content": "x"}, note="wake"), "sleeper", "loaded"),
    (Ask("POST", "/models/unload", {"model": "sleeper"}, note="unload a waker"), "sleeper", "unloaded"),
)
ORIGINS = "http://one.example,https://two.example"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deviations() -> AsyncIterator[Sequence[Deviation]]:
    """All that differs, over all requests: to servers open to everybody, then to servers with a key."""
    found: list[Deviation] = []
    async with side_by_side(PRESET, MODELS) as pair:
        for request in open_requests():
            found += await pair.compare(request)
        await asyncio.gather(*(pair.reset(model) for model in ("chat", "sleeper")))
        found += await pair.compare_events(STEPS)
    async with side_by_side(PRESET, MODELS, "--api-key", KEY, "--cors-origins", ORIGINS) as pair:
        for request in keyed_requests():
            found += await pair.compare(request, KEY)
    yield found


async def test_every_difference_is_listed(deviations: Sequence[Deviation]) -> None:
    """Send both servers every request: what differs stands in the table."""
    found = unlisted(deviations, any_build=ENGINE_VARIABLE in os.environ)
    assert found == [], "not in compat_table.py:\n" + "\n".join(map(str, found))


async def test_every_listed_difference_still_occurs(deviations: Sequence[Deviation]) -> None:
    """Look for each rule of the table in what differed: none is stale."""
    assert [rule.what for rule in vanished(deviations, any_build=ENGINE_VARIABLE in os.environ)] == []


async def test_every_path_of_the_engine_is_known() -> None:
    """Look for paths in the engine's own files: each is a route here, whatever build it is."""
    folder = engine_under_test().path.resolve().parent
    files = {path.resolve() for path in folder.iterdir() if path.is_file()}
    paths = {path for file in files for path in re.findall(rb"(?<=\0)/v1/[\w:/-]+(?=\0)", file.read_bytes())}
    assert len(paths) > 10
    routes = Router()
    names = [path.decode().replace(":", "").rstrip("/") for path in paths]
    unknown = [
        name
        for name in names
        if not any(routes.find(method, end) for method in METHODS for end in (name, f"{name}/x"))
    ]
    assert unknown == []


async def test_what_happens_otherwise_is_tried() -> None:
    """Look for the test that each row of the second table names."""
    for row in BEHAVIOUR:
        file, _, name = row.test.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(), row.test


async def test_the_page_is_the_table() -> None:
    """Make docs/compatibility.md anew and compare."""
    assert PAGE.read_text() == page()
