"""Which model a request means: names and aliases as they are written, on every route, and nothing else."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from compat_requests import FORM, form
from herd import QUICK, Herd, herd
from inside import stubbed

from llamastead.gateway.routes import ROUTES, Route

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = ("nope", "M", " m", "m ", "m\n", "m:latest", "Äpfel/π", "x" * 150, "AL")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd of one model with an alias, whose engine answers with what it was sent."""
    async with herd(QUICK) as made:
        words = stubbed(made, "m", echo=True)
        preset = made.models.parent / "models.ini"
        preset.write_text("[m]\nalias = al, other/name:Q4\n")
        await made.up(*words, "--models-preset", str(preset))
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(stead: Herd) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway."""
    async with stead.client() as made:
        yield made


@pytest.mark.parametrize("name", ["m", "al", "other/name:Q4"])
async def test_c105_a_request_by_alias_reaches_the_engine_as_it_was_written(
    stead: Herd, client: httpx.AsyncClient, name: str
) -> None:
    """Ask by name and by alias, in JSON and in a form: one engine under its own name, no byte changed."""
    written = f'{{ "n_predict" :1,\t"model":{json.dumps(name)} , "extra": "\\u00e9" }}'
    answer = (await client.post("/v1/completions", content=written)).json()
    assert answer["body"] == written
    audio = form(model=name, file="RIFF")
    answer = (await client.post("/v1/audio/transcriptions", content=audio, headers=FORM)).json()
    assert answer["body"] == audio
    assert (await stead.instance("m"))["model"] == "m"
    args = (await stead.status("m"))["args"]
    assert args[args.index("--alias") + 1] == "m"


def models_routes() -> list[Route]:
    """Return the routes that a model is named on."""
    return [route for route in ROUTES if route.needs_model or route.use]


@pytest.mark.parametrize("route", models_routes(), ids=lambda route: f"{route.method} {route.path}")
async def test_c147_an_unknown_name_is_refused_as_it_was_received(
    stead: Herd, client: httpx.AsyncClient, route: Route
) -> None:
    """Name what is not there, some but for case or a blank, on every route: the exact name comes back."""
    path = route.path.replace("*", "0")
    for name in NAMES:
        ways: list[dict[str, Any]] = [{"params": {"model": name}}]
        if route.method == "POST":
            ways += [{"json": {"model": name}}, {"content": form(model=name), "headers": FORM}]
        for way in ways:
            if "\n" in name and "content" in way:
                continue  # no form can hold it
            refused = await client.request(route.method, path, **way)
            error = refused.json()["error"]
            assert (refused.status_code, error["message"]) == (400, f"model '{name}' not found")
    assert {entry["id"] for entry in (await client.get("/models")).json()["data"]} == {"m"}


async def test_c147_orders_and_lookups_name_what_they_did_not_find(client: httpx.AsyncClient) -> None:
    """Load, unload and look up models that are not there: the status of llama-server, and the exact name."""
    for name in ("nope", "M", " m"):
        for verb, status in (("load", 404), ("unload", 400)):
            refused = await client.post(f"/models/{verb}", json={"model": name})
            assert (refused.status_code, refused.json()["error"]["message"]) == (
                status,
                f"model '{name}' not found",
            )
        refused = await client.get(f"/v1/models/{name}")
        assert (refused.status_code, refused.json()["error"]["message"]) == (404, f"model '{name}' not found")
