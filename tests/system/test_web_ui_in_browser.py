"""llama-server's own web UI in a real browser, through Llamastead."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from herd import PATIENCE_S, QUICK, Herd, herd, until
from playwright.async_api import Page, async_playwright, expect

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package of that name)"),
]

PRESET = """\
[*]
ctx-size = 2048
threads = 1
warmup = off
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stead() -> AsyncIterator[Herd]:
    """A herd with two small models and the UI."""
    async with herd(QUICK | {"LLAMASTEAD_UI": "true"}) as made:
        made.add_models("alpha", "beta")
        preset = made.models.parent / "models.ini"
        preset.write_text(PRESET)
        await made.up("--models-dir", str(made.models), "--models-preset", str(preset))
        await until(lambda: list((made.run_dir / "web-ui").glob("*/index.json")), "the UI's pages")
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def page(stead: Herd) -> AsyncIterator[Page]:
    """A page of a fresh browser."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            page.set_default_timeout(PATIENCE_S * 1000)
            yield page
        finally:
            await browser.close()


async def test_the_ui_opens_and_chats_with_a_model_that_was_not_loaded(stead: Herd, page: Page) -> None:
    """Open the start page: nothing loads. Say something: the model is loaded and its answer shown."""
    failed: list[str] = []
    page.on("response", lambda answer: failed.append(answer.url) if answer.status >= 500 else None)
    page.on("pageerror", lambda error: failed.append(str(error)))
    await page.goto(f"http://127.0.0.1:{stead.ports[0]}/")
    box = page.locator("textarea")
    await expect(box).to_be_visible()
    await expect(page.get_by_text("alpha").first).to_be_visible()
    assert (await stead.status("alpha"))["value"] == "unloaded"
    async with page.expect_response("**/v1/chat/completions") as answer:
        await box.fill("say something")
        await box.press("Enter")
    response = await answer.value
    assert (response.status, response.headers["x-llamastead-path"]) == (200, "cold")
    await response.finished()
    await page.wait_for_function("document.body.innerText.length > 300")
    assert (await stead.status("alpha"))["value"] == "loaded"
    assert (await stead.status("beta"))["value"] == "unloaded"
    assert failed == []


async def test_an_answer_goes_on_after_the_page_was_reloaded(stead: Herd, page: Page) -> None:
    """Reload in the middle of an answer: the page finds it again, and shows it to its end as it was said."""
    await page.goto(f"http://127.0.0.1:{stead.ports[0]}/")
    box = page.locator("textarea")
    await box.fill("say something long")
    async with page.expect_response("**/v1/chat/completions") as begun:
        await box.press("Enter")
    assert (await begun.value).status == 200
    await page.wait_for_function("document.body.innerText.length > 200")
    async with page.expect_response("**/v1/stream/*") as resumed:
        await page.reload()
    replay = await resumed.value
    assert replay.status == 200
    await replay.finished()
    said = "".join(contents(await replay.text()))
    assert len(said) > 200
    await page.wait_for_function(
        "said => document.body.innerText.replace(/\\s/g, '').includes(said)", arg="".join(said.split())
    )


async def test_c126_a_tab_that_comes_back_goes_on_with_the_whole_answer(stead: Herd, page: Page) -> None:
    """Begin by a comment, then have the tab come back after what it takes for a long silence: it gives its
    stream up, asks for what comes behind all bytes it got, and shows the answer as it was said.
    """
    await stead.gateway("eager", "--ping-delay", "0")
    await stead.unload("alpha")
    await page.goto(f"http://127.0.0.1:{stead.ports[-1]}/")
    box = page.locator("textarea")
    await expect(page.get_by_text("alpha").first).to_be_visible()
    await box.fill("say something long")
    async with page.expect_response("**/v1/chat/completions") as begun:
        await box.press("Enter")
    assert "x-llamastead-path" not in (await begun.value).headers
    await page.wait_for_function("document.body.innerText.length > 200")
    async with page.expect_response("**/v1/stream/*") as resumed:
        await page.evaluate(
            "() => {const now = Date.now; Date.now = () => now() + 10_000;"
            "document.dispatchEvent(new Event('visibilitychange')); Date.now = now;}"
        )
    replay = await resumed.value
    place, _, start = replay.url.partition("from=")
    assert (replay.status, int(start) > 0) == (200, True)
    await replay.finished()
    whole = await page.evaluate("address => fetch(address).then(answer => answer.text())", place + "from=0")
    said = "".join(contents(whole))
    assert len(said) > 200
    await page.wait_for_function(
        "said => document.body.innerText.replace(/\\s/g, '').includes(said)", arg="".join(said.split())
    )


def contents(stream: str) -> Iterator[str]:
    """Yield the pieces of text of a chat completion's stream."""
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                yield choice["delta"].get("content") or ""
