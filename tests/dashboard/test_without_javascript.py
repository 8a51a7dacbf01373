"""A browser without JavaScript: pages are not live, and everything can be done."""

from playwright.async_api import Browser, expect

from tests.dashboard.conftest import Served, visitor


async def test_dialogs_and_selections_work_without_javascript(browser: Browser, served: Served) -> None:
    ids = [(await served.client.submit("research", title=f"Task {number}"))["id"] for number in range(3)]
    tab = await visitor(browser, served, java_script_enabled=False, viewport={"width": 400, "height": 800})
    page = await tab.open(f"/tasks/{ids[0]}")
    await expect(page.locator("noscript p")).to_be_visible()
    dialog = page.locator("dialog#ask-cancel")
    await expect(dialog).to_be_hidden()
    await page.get_by_role("button", name="Cancel…", exact=True).first.click()
    await expect(dialog).to_be_visible()
    await dialog.get_by_role("button", name="Keep as it is").click()
    await expect(dialog).to_be_hidden()

    await page.get_by_role("button", name="Cancel…", exact=True).first.click()
    await dialog.get_by_label("Reason").fill("not needed")
    await dialog.locator("button.primary").click()
    await page.get_by_label("Your name").fill("Ann")
    await page.get_by_role("button", name="Continue").click()
    await expect(page.get_by_text("Cancelled the task.")).to_be_visible()

    page = await tab.open("/tasks?status=READY")
    await page.get_by_label("Select Task 1").check()
    await page.get_by_role("button", name="Cancel selected…").click()
    await page.get_by_role("button", name="Cancel 1 task").click()
    await expect(page.get_by_text("Cancelled 1 task.")).to_be_visible()
    tasks = await served.service.engine.read.tasks_by_id(ids)
    assert [task.status.value for task in tasks] == ["CANCELLED", "CANCELLED", "READY"]
    assert tasks[0].cancel_reason == "not needed"

    page = await tab.open("/dags")
    await page.get_by_label("also single tasks").check()
    await page.get_by_role("button", name="Filter", exact=True).click()
    await expect(page.get_by_role("link", name="Task 2")).to_be_visible()
    await tab.context.close()
    assert tab.faults == []
