"""The list of tasks: filters, search, and what is done to many at once."""

from tests.dashboard.conftest import Served
from tests.dashboard.forms import Person, text_of


async def test_filters_come_from_the_address_and_bad_ones_are_dropped(served: Served) -> None:
    await served.client.submit("research", title="Find sources", tags=["red"])
    await served.client.submit("write", title="Write it up", created_by="human:ann")
    person = Person(served)

    everything = text_of(await person.page("/tasks"))
    assert "Find sources" in everything
    assert "Write it up" in everything
    for query in ("q=SOURCES", "type=research", "tag=red", "status=ready&q=find"):
        page = text_of(await person.page(f"/tasks?{query}"))
        assert "Find sources" in page, query
        assert "Write it up" not in page, query
    assert "Write it up" in text_of(await person.page("/tasks?created_by=human:ann"))
    for query in (
        "status=NONSENSE",
        "order=nonsense",
        "cursor=nonsense",
        "order=priority&status=COMPLETED&status=READY",
        "type=%00",
        "unknown=1",
        "tag=%ff",
    ):
        page = text_of(await person.page(f"/tasks?{query}"))
        assert "Find sources" in page or query == "tag=%ff", query
