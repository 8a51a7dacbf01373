"""A server in this process, and a real browser on its pages."""

import shutil
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    async_playwright,
    expect,
)

from tests.server.conftest import Serve, Served, serve

__all__ = ["Serve", "Served", "serve"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: Loud: the reason is shown at the end of each run.
NO_BROWSER = "NO BROWSER: install Chromium (apt-get install chromium) to test the dashboard's pages in it"

#: For actions and expectations alike, whose default is five seconds. The machine may be busy.
_PATIENCE_MS = 60_000
expect.set_options(timeout=_PATIENCE_MS)


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve() as running:
        yield running


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(NO_BROWSER)
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        await found.close()


class Visitor:
    """A tab that notices what is wrong with a page: errors, requests to elsewhere, a violated policy."""

    def __init__(self, context: BrowserContext, page: Page, address: str) -> None:
        self.context = context
        self.page = page
        self.address = address
        self.faults: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"error in a script: {error}"))
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and "status of 4" not in message.text:
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.address).netloc and not request.url.startswith(
            "data:"
        ):
            self.faults.append(f"request to elsewhere: {request.url}")

    async def open(self, path: str) -> Page:
        response = await self.page.goto(self.address + path)
        assert response is not None
        assert response.status < 500, (path, response.status)
        return self.page


async def scripts_run(page: Page) -> None:
    """Wait for the scripts of the page that was just reached by a link, a form or a key.

    What it shows can be seen before they run, and then keys, dialogs and selections don't work yet. A page
    that was opened by its address is complete.
    """
    await page.wait_for_load_state()


async def visitor(browser: Browser, served: Served, **options: object) -> Visitor:
    """`options` are those of a browser context, such as viewport and color_scheme."""
    context = await browser.new_context(**options)  # type: ignore[arg-type]
    page = await context.new_page()
    page.set_default_timeout(_PATIENCE_MS)
    return Visitor(context, page, f"http://127.0.0.1:{served.client.port}")


@pytest.fixture
async def tab(browser: Browser, served: Served) -> AsyncIterator[Visitor]:
    """One tab on a server that needs no token. The test fails if anything is wrong with what it shows."""
    made = await visitor(browser, served, viewport={"width": 1600, "height": 1000})
    yield made
    await made.context.close()
    assert made.faults == []
