"""`make screenshots`: pictures of pages for the documentation, from the demo's work and the sample."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.async_api import Page, async_playwright

from lineshaft import Lineshaft, logs
from lineshaft.engine.postgres.location import database
from lineshaft.settings import Settings
from tests.dashboard.conftest import CHROMIUM, NO_BROWSER, Served
from tests.dashboard.sample import Sample, fill
from tests.server.conftest import serving

_FOLDER = Path(__file__).parents[2] / "docs" / "images"
_SIZE = {"width": 1400, "height": 900}
_MOST_BYTES = 200_000


def _pages(sample: Sample) -> dict[str, tuple[str, str]]:
    """By name of the picture: an address and a colour scheme."""
    return {
        "overview": ("/", "light"),
        "overview-dark": ("/", "dark"),
        "task": (f"/tasks/{sample.to_approve}", "light"),
        "dag": (f"/dags/{sample.dag}", "light"),
        "dead-letters": ("/dead-letters", "light"),
        "approval": (f"/approvals/{sample.for_person}", "light"),
        "costs": ("/costs", "light"),
        "agents": ("/agents", "light"),
        "guards": ("/guards", "light"),
    }


def _run_demo(home: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    command = [sys.executable, "-m", "lineshaft", "demo", "--keep", home]
    subprocess.run(command, env=environment, check=True)


async def _take(page: Page, served: Served, name: str, path: str) -> None:
    await page.goto(f"http://127.0.0.1:{served.client.port}{path}")
    # The first live update has been applied.
    await page.wait_for_selector("#live-state[data-state=on]")
    await page.evaluate("document.fonts.ready")
    file = _FOLDER / f"{name}.png"
    await page.screenshot(path=file)
    if file.stat().st_size > _MOST_BYTES:
        raise SystemExit(f"{file} has {file.stat().st_size:,} bytes; at most {_MOST_BYTES:,} are wanted.")


async def _shoot(dsn: str) -> None:
    async with serving(dsn) as served, Lineshaft(f"http://127.0.0.1:{served.client.port}") as shaft:
        sample = await fill(shaft)
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for name, (path, scheme) in _pages(sample).items():
                context = await browser.new_context(viewport=_SIZE, color_scheme=scheme)  # type: ignore[arg-type]
                await _take(await context.new_page(), served, name, path)
                await context.close()
            await browser.close()


def main() -> None:
    if CHROMIUM is None:
        raise SystemExit(NO_BROWSER)
    logs.configure("text", "critical")
    _FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ls-") as home:
        _run_demo(home)
        with database(Settings(home=Path(home))) as dsn:
            asyncio.run(_shoot(dsn))


if __name__ == "__main__":
    main()
