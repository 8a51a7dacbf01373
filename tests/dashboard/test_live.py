"""Open pages change without being reloaded."""

import re

from playwright.async_api import Browser, expect

from lineshaft.types import Scope
from tests.dashboard.conftest import Serve, Served, Visitor, visitor


async def test_a_new_task_appears_on_the_open_overview(served: Served, tab: Visitor) -> None:
    page = await tab.open("/")
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()

    await served.client.post("/v1/tasks", {"type": "research", "title": "One"})

    await expect(page.locator("#live")).to_contain_text("READY")


async def test_a_full_list_keeps_its_rows_until_new_ones_are_asked_for(served: Served, tab: Visitor) -> None:
    for number in range(50):
        await served.client.post("/v1/tasks", {"type": "research", "title": f"Old {number}"})
    page = await tab.open("/tasks")
    rows = page.locator("tr[data-row]")
    before = await rows.evaluate_all("rows => rows.map((row) => row.id)")
    assert len(before) == 50

    await page.locator("tr[data-row] a").nth(90).focus()
    for number in range(50):
        await served.client.post("/v1/tasks", {"type": "research", "title": f"New {number}"})
        if number == 24:
            # Half of the rows are pushed off.
            await expect(page.locator("#new-rows")).to_have_text("25 new: show")

    await expect(page.locator("#new-rows")).to_have_text("50 new: show")
    assert await page.evaluate("document.activeElement.matches('tr.passed a')")
    assert await rows.evaluate_all("rows => rows.map((row) => row.id)") == before
    await page.locator("input[name=created_by]").fill("half a na")
    await page.locator("#new-rows").click()
    await expect(page.locator("#new-rows")).to_be_hidden()
    await expect(rows).to_have_count(50)
    await expect(rows.first).to_contain_text("New 49")
    await expect(page.locator("tr.passed")).to_have_count(0)
    assert await page.locator("input[name=created_by]").input_value() == "half a na"


async def test_a_page_whose_session_ended_while_it_was_away_leads_to_the_login(
    browser: Browser, serve: Serve
) -> None:
    async with serve(auth=True) as served:
        token = (await served.service.tokens.create("ada", Scope.OPERATE)).token
        tab = await visitor(browser, served)
        page = await tab.open("/login?next=/guards")
        await page.get_by_label("Token").fill(token)
        await page.keyboard.press("Enter")
        # Set by the script when the stream is open.
        await expect(page.locator("#live-state[data-state=on]")).to_have_text("Live")
        await page.keyboard.press(".")
        await expect(page.locator("#live-state")).to_have_text("Paused")
        await served.service.tokens.revoke("ada")

        # What a person works on is not thrown away.
        await page.get_by_label("Daily budget").fill("12")
        await page.locator("#live-state").click()
        await expect(page.locator("#lost")).to_contain_text("Your session has ended")
        await page.get_by_label("Daily budget").fill("")
        await expect(page.get_by_role("heading", name="Log in to Lineshaft")).to_be_visible()
        await tab.context.close()


async def test_one_switch_changes_the_time_zone_of_all_times(browser: Browser, served: Served) -> None:
    await served.client.submit("research", title="One")
    tab = await visitor(browser, served, timezone_id="Asia/Tokyo")
    page = await tab.open("/tasks")
    time = page.locator("#live time").first
    await expect(time).to_have_attribute("title", re.compile(r"GMT\+9|JST"))

    await page.keyboard.press("?")
    await page.get_by_role("button", name="Times in UTC or here").click()

    await expect(time).to_have_attribute("title", re.compile("UTC"))
    await tab.context.close()
    assert tab.faults == []
