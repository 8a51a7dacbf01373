"""Open pages change without being reloaded."""

from playwright.async_api import expect

from tests.dashboard.conftest import Served, Visitor


async def test_a_new_task_appears_on_the_open_overview(served: Served, tab: Visitor) -> None:
    page = await tab.open("/")
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()

    await served.client.post("/v1/tasks", {"type": "research", "title": "One"})

    await expect(page.locator("#live")).to_contain_text("READY")
