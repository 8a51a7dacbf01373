"""The overview and costs."""

import csv
import html
import io
import re
from datetime import UTC, datetime

import pytest

from lineshaft import Lineshaft
from lineshaft.dashboard.pages.costs import _cell
from tests.dashboard.conftest import Served
from tests.dashboard.forms import Person, text_of
from tests.dashboard.sample import fill


@pytest.mark.slow("opens many pages")
async def test_every_table_of_costs_is_also_a_file(served: Served) -> None:
    began = datetime.now(UTC)
    async with Lineshaft(f"http://127.0.0.1:{served.client.port}") as shaft:
        await fill(shaft)
    await served.client.submit("research", title="x")
    person = Person(served)

    page = text_of(await person.page("/costs"))
    assert "crm-sync" in page
    assert "Lost in failures" in page
    assert "last hour $0.00" not in page
    for name, expected in (
        ("type", "crm-sync"),
        ("model", "large"),
        ("agent", "researcher"),
        ("dag", "Quarterly market report"),
    ):
        reply = await person.get(f"/costs/{name}.csv")
        assert reply.headers["content-disposition"] == f'attachment; filename="lineshaft-costs-by-{name}.csv"'
        rows = list(csv.DictReader(io.StringIO(reply.body.decode())))
        assert expected in {row.get("key") or row.get("title") for row in rows}, rows
    by_day = list(csv.DictReader(io.StringIO((await person.get("/costs/day.csv")).body.decode())))
    # Two days, if the first one ended while the agents worked.
    assert by_day
    assert {row["day"] for row in by_day} <= {str(at.date()) for at in (began, datetime.now(UTC))}
    assert (await person.get("/costs/nonsense.csv")).status == 404
    only = text_of(await person.page("/costs?type=crm-sync&days=nonsense"))
    assert "type: crm-sync" in only
    assert "summarise" not in only
    overview = text_of(await person.page("/"))
    assert "4 dead letters" in overview
    assert "2 approvals" in overview
    assert "no agent can do it" in overview


async def test_what_was_spent_today_and_in_these_days_agree(served: Served) -> None:
    """Also with what a running attempt has spent, which no ended attempt has cost."""
    client = served.client
    agent = await client.register("coder")
    for cost in (1.5, 0.46):
        await client.submit("code")
        task_id, token = await client.hold(agent)
        await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token, "cost_usd": cost})
    await client.submit("code")
    task_id, token = await client.hold(agent)
    report = {"id": task_id, "claim_token": token, "cost_usd": 0.53}
    beat = {"incarnation": agent["incarnation"], "tasks": [report]}
    await client.post("/v1/agents/coder/heartbeat", beat)

    for days in (1, 7):
        page = text_of(await Person(served).page(f"/costs?days={days}"))
        assert page.count("Spent $2.49") == 2, page
        assert "Ended attempts, last hour $1.96" in page
    only = text_of(await Person(served).page("/costs?type=code"))
    assert "Cost of ended attempts $1.96" in only


async def test_a_link_about_several_types_names_all_of_them(served: Served) -> None:
    for name in ("mail", "mail", "code"):
        await served.client.submit(name)

    page = await Person(served).page("/")

    (link,) = re.findall(r'href="(/tasks\?[^"]*type=[^"]*)"', page)
    assert html.unescape(link) == "/tasks?status=READY&type=mail&type=code"


async def test_an_empty_installation_says_what_to_do(served: Served) -> None:
    person = Person(served)

    overview = text_of(await person.page("/"))

    assert "Nothing. Dead letters" in overview
    assert "No agent is active" in overview
    assert "No work." in overview
    assert "Nothing was spent" in text_of(await person.page("/costs?days=30"))


def test_a_cell_is_no_formula() -> None:
    assert [_cell(value) for value in ("=cmd()", "@x", "-1", "plain", 3)] == [
        "'=cmd()",
        "'@x",
        "'-1",
        "plain",
        3,
    ]
