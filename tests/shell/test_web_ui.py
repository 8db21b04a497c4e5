"""llama-server's own web UI: taken out of the engine once, served by gateways that share the run folder."""

import gzip
import json
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from app_kit import Served, open_app
from gateway_kit import settings_for, until
from redis.asyncio import Redis

from llamastead.gateway.auth import Keys
from llamastead.shared.web_ui import FOLDER, INDEX
from llamastead.supervisor.engine import find_engine
from llamastead.supervisor.web_ui import ui_identity, unpack

PACKED = {"accept-encoding": "gzip"}
PLAIN = {"accept-encoding": "identity"}


async def test_the_engines_pages_are_unpacked_once(short_tmp: Path) -> None:
    """Unpack twice: all that a browser asks for is there, old pages are gone, and the second time is free."""
    (short_tmp / FOLDER / "old").mkdir(parents=True)
    engine = find_engine(None)
    await unpack(engine, ui_identity(engine), short_tmp, os.environ)
    (folder,) = (short_tmp / FOLDER).iterdir()
    assert folder.name == ui_identity(engine)
    pages = json.loads((folder / INDEX).read_text())
    start = gzip.decompress((folder / pages["/"]["file"]).read_bytes()).decode()
    for kind in ("text/html", "application/javascript", "text/css", "application/manifest+json", "image/"):
        assert any(page["headers"]["content-type"].startswith(kind) for page in pages.values()), kind
    scripts = [path for path in pages if path.endswith(".js") and path.startswith("/_app/")]
    assert [path for path in scripts if path in start]
    before = folder.stat().st_mtime_ns
    await unpack(engine, folder.name, short_tmp, os.environ)
    assert folder.stat().st_mtime_ns == before


async def test_an_engine_that_serves_no_pages_costs_only_them(
    short_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unpack from a program that ends at once: a warning that says so, and nothing is left behind."""
    engine = replace(find_engine(None), path=Path("/bin/false"))
    await unpack(engine, "b1", short_tmp, os.environ)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert list((short_tmp / FOLDER).iterdir()) == []


@pytest_asyncio.fixture
async def served(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    """A gateway of a herd with keys, whose UI has a start page and a script."""
    async with open_app(redis, settings_for(tmp_path, redis_url=redis_url), Keys(("key",)), "a") as made:
        await made.leader.store.open_herd({"web_ui": "b1"})
        made.gateway.catalog.mark_all()
        await until(lambda: made.gateway.catalog.herd.get("web_ui") == "b1", "the herd's UI")
        yield made


def put_pages(run_dir: Path) -> None:
    """Put two pages where the supervisor puts them."""
    folder = run_dir / FOLDER / "b1"
    folder.mkdir(parents=True)
    said = {"content-encoding": "gzip", "etag": '"e1"', "cache-control": "immutable"}
    pages = {
        "/": {"file": "0", "headers": said | {"content-type": "text/html"}},
        "/x.js": {"file": "1", "headers": {"content-type": "application/javascript"}},
    }
    (folder / INDEX).write_text(json.dumps(pages))
    (folder / "0").write_bytes(gzip.compress(b"<html>"))
    (folder / "1").write_bytes(b"x()")


async def test_pages_are_served_as_the_client_takes_them(served: Served) -> None:
    """Ask with and without gzip, for what the client has, and with HEAD: right encoding, length and words."""
    put_pages(served.gateway.settings.run_dir)
    packed = await served.client.get("/", headers=PACKED)
    assert (packed.status_code, packed.text) == (200, "<html>")
    assert packed.headers["content-encoding"] == "gzip"
    assert (packed.headers["cache-control"], packed.headers["vary"]) == ("no-cache", "Accept-Encoding")
    plain = await served.client.get("/", headers=PLAIN)
    assert (plain.text, plain.headers["content-length"]) == ("<html>", "6")
    assert "content-encoding" not in plain.headers
    known = await served.client.get("/", headers={"if-none-match": '"e1"'})
    assert (known.status_code, known.content) == (304, b"")
    assert (await served.client.get("/x.js")).text == "x()"
    assert (await served.client.head("/x.js")).headers["content-length"] == "3"
    assert (await served.client.post("/")).status_code == 404
    assert (await served.client.get("/y.js")).status_code == 401


async def test_a_gateway_without_the_pages_says_so(served: Served) -> None:
    """Ask before they are unpacked, then after another engine's took their place: 503, try again."""
    early = await served.client.get("/")
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    put_pages(served.gateway.settings.run_dir)
    assert (await served.client.get("/")).status_code == 200
    (served.gateway.settings.run_dir / FOLDER / "b1" / "0").unlink()
    assert (await served.client.get("/")).status_code == 503


async def test_without_ui_there_is_none(served: Served) -> None:
    """Switch it off: unknown paths like all others."""
    put_pages(served.gateway.settings.run_dir)
    await served.leader.store.open_herd({"web_ui": ""})
    served.gateway.catalog.mark_all()
    await until(lambda: not served.gateway.catalog.herd.get("web_ui"), "no UI")
    assert (await served.client.get("/")).status_code == 404
