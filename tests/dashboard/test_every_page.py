"""Every page: in a real browser, in both schemes, on a phone and on a wide screen; and its live stream."""

import asyncio
import html
import json
import re
from collections.abc import AsyncIterator, Mapping
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page
from starlette.routing import Match

from lineshaft import Lineshaft
from lineshaft.dashboard.dashboard import Dashboard
from tests.dashboard.addresses import (
    ACTIONS,
    FILES,
    PAGES,
    REDIRECTS,
    action_address,
    addresses,
    page_addresses,
)
from tests.dashboard.conftest import Serve, Served, Visitor, visitor
from tests.dashboard.forms import Person
from tests.dashboard.live_stream import live_stream
from tests.dashboard.sample import Sample, fill

_WIDE = {"width": 1600, "height": 1000}
_PHONE = {"width": 400, "height": 800}
_REPORT_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
    (event) => window.violations.push(event.violatedDirective));
"""
#: Colours differ between schemes, all else is the same.
_CONTRAST = {"runOnly": ["color-contrast"]}


@pytest.fixture
async def sample(served: Served) -> AsyncIterator[Sample]:
    async with Lineshaft(f"http://127.0.0.1:{served.client.port}") as shaft:
        yield await fill(shaft)


async def test_every_page_and_file_answers_and_every_live_page_follows_events(
    served: Served, sample: Sample
) -> None:
    person = Person(served)
    assert len({action_address(action, sample) for action in ACTIONS}) > 1
    for page in PAGES:
        for address in addresses(page, sample):
            if page.path in FILES | REDIRECTS:
                reply = await person.follow(await person.get(address))
                assert reply.status == 200, (address, reply)
                continue
            if " data-live" not in await person.page(address):
                continue
            async with asyncio.timeout(60), live_stream(served, address, person.cookies) as stream:
                event = await stream.event()
            assert event["event"] == "page", (address, event)
            parts = json.loads(event["data"])
            assert parts.keys() == {"navigation", "banners", "live"}, address
            assert parts["live"].strip(), address
            assert person.csrf in parts["live"] or 'name="csrf"' not in parts["live"], address


@pytest.mark.slow("follows every link")
async def test_every_form_and_link_leads_somewhere(served: Served, sample: Sample) -> None:
    person = Person(served)
    actions = [route for route in Dashboard(served.service).routes() if "POST" in (route.methods or ())]
    links: set[str] = set()
    for address in page_addresses(sample):
        page = await person.page(address)
        links |= {html.unescape(found) for found in re.findall(r'href="(/[^"#]*)"', page)}
        targets = re.findall(r'<form[^>]*method="post"[^>]*action="([^"]*)"', page)
        targets += re.findall(r'formaction="([^"]*)"', page)
        for target in targets:
            path = unquote(urlsplit(html.unescape(target)).path)
            scope = {"type": "http", "method": "POST", "path": path, "root_path": ""}
            assert any(route.matches(scope)[0] is Match.FULL for route in actions), (address, target)
    assert len(links) > 50
    broken = {link: reply.status for link in sorted(links) if (reply := await person.get(link)).status >= 400}
    assert broken == {}


@pytest.mark.slow("each page is checked in a browser with axe")
@pytest.mark.timeout(1200)
async def test_every_page_is_usable_in_both_schemes_on_a_phone_and_on_a_wide_screen(
    browser: Browser, served: Served, serve: Serve, sample: Sample
) -> None:
    async with serve(auth=True) as with_tokens:
        faults = await _faults_of_all(browser, with_tokens, ["/login?next=/tasks"])
    faults += await _faults_of_all(browser, served, page_addresses(sample))
    assert not faults, "\n".join(faults)


async def _faults_of_all(browser: Browser, served: Served, pages: list[str]) -> list[str]:
    tab = await visitor(browser, served, viewport=_WIDE, color_scheme="light")
    await tab.context.add_init_script(_REPORT_VIOLATIONS)
    found = [f"{address}: {fault}" for address in pages for fault in await _faults(tab, address)]
    await tab.context.close()
    return found


async def _faults(tab: Visitor, address: str) -> list[str]:
    tab.faults.clear()
    response = await tab.page.goto(tab.address + address)
    assert response is not None
    found = [] if response.status == 200 else [f"status {response.status}"]
    await tab.page.emulate_media(color_scheme="light")
    await tab.page.set_viewport_size(_WIDE)  # type: ignore[arg-type]  # width and height
    found += await _accessibility(tab.page, "light, wide", None)
    found += await _sideways(tab.page, "wide")
    await tab.page.set_viewport_size(_PHONE)  # type: ignore[arg-type]
    await tab.page.emulate_media(color_scheme="dark")
    found += await _accessibility(tab.page, "dark, phone", _CONTRAST)
    found += await _sideways(tab.page, "phone")
    violations = await tab.page.evaluate("window.violations")
    return [*found, *tab.faults, *(f"policy violated: {violation}" for violation in violations)]


async def _accessibility(page: Page, where: str, options: Mapping[str, object] | None) -> list[str]:
    result = await Axe().run(page, options={"resultTypes": ["violations"], **(options or {})})
    return [
        f"{where}: {violation['id']} ({violation['impact']}): "
        + "; ".join(f"{node['target']} {node['failureSummary'][:300]}" for node in violation["nodes"][:3])
        for violation in result.response["violations"]
        if violation["impact"] in {"serious", "critical"}
    ]


async def _sideways(page: Page, where: str) -> list[str]:
    widths = await page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    return [f"{where}: {widths[0]} px of content in {widths[1]} px"] if widths[0] > widths[1] else []
