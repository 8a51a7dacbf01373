"""The page of one task."""

from tests.dashboard.conftest import Served
from tests.dashboard.forms import Person, text_of


async def test_a_waiting_task_says_why_first(served: Served) -> None:
    task = await served.client.submit("research", title="Find sources")
    page = text_of(await Person(served).page(f"/tasks/{task['id']}"))

    assert page.index("Why isn't it running?") < page.index("Timeline")
    assert "It needs an active agent for type 'research'" in page
