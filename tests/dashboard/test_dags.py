"""DAGs: the list, the picture, and what is done to a DAG."""

import re
from xml.etree import ElementTree as ET

import psycopg
from playwright.async_api import expect

from lineshaft.dashboard.pages.dags import _blockers, _states
from tests.dashboard.conftest import Served, Visitor
from tests.dashboard.forms import NAME, Person, text_of

_TASKS = [
    {"key": "a", "type": "research", "title": "First"},
    {"key": "b", "type": "write", "title": "Second", "depends_on": ["a"]},
    {"key": "c", "type": "write", "title": "Third", "depends_on": ["b"]},
]


async def _submit(served: Served, **fields: object) -> tuple[str, dict[str, str]]:
    reply = await served.client.post("/v1/dags", {"title": "Report", "tasks": _TASKS, **fields})
    assert reply.status == 201, reply
    return reply.json["dag"]["id"], reply.json["tasks"]


async def test_the_list_has_dags_and_single_tasks_only_if_asked_for(served: Served) -> None:
    await _submit(served)
    await served.client.submit("research", title="Alone")
    person = Person(served)

    assert "Report" in (page := text_of(await person.page("/dags")))
    assert "Alone" not in page
    assert "Alone" in text_of(await person.page("/dags?all=yes"))
    assert "Report" in text_of(await person.page("/dags?q=REP&status=pending&status=running&cursor=wrong"))
    assert "No DAG matches the status failed" in text_of(await person.page("/dags?status=failed"))
    assert "Report" in text_of(await person.page("/dags?q=%00"))


async def test_a_dag_shows_its_picture_its_tasks_and_what_holds_it_up(served: Served) -> None:
    dag, tasks = await _submit(served, budget_ceiling_usd=5)
    person = Person(served)

    page = await person.page(f"/dags/{dag}")

    assert all(f'data-task="{name}"' in page for name in tasks.values())
    assert f'href="/tasks/{tasks["a"]}"' in page
    assert "2 unfinished tasks behind it" in text_of(page)
    svg = await person.get(f"/dags/{dag}/picture.svg")
    assert ET.fromstring(svg.body).tag.endswith("svg")  # noqa: S314 - our own
    assert "sandbox" in svg.headers["content-security-policy"]
    assert "flowchart LR" in (await person.get(f"/dags/{dag}/picture.mmd")).body.decode()


async def test_a_list_is_one_box_that_opens(served: Served) -> None:
    """With its children by state, however many there are; opened, each has a box."""
    tasks = [
        {"key": "scan", "type": "scan"},
        {"key": "review", "type": "review", "for_each": {"over": "scan.files", "max": 5_000}},
        {"key": "report", "type": "report", "depends_on": ["review"]},
    ]
    reply = await served.client.post("/v1/dags", {"title": "Reviews", "tasks": tasks})
    dag, ids = reply.json["dag"]["id"], reply.json["tasks"]
    person = Person(served)
    assert "review for each of scan.files" in text_of(await person.page(f"/dags/{dag}"))
    agent = await served.client.register()
    task_id, token = await served.client.hold(agent)
    done = {"claim_token": token, "output": {"data": {"files": list(range(3_000))}}}
    assert (await served.client.post(f"/v1/tasks/{task_id}/complete", done)).status == 200
    await served.client.hold(agent)

    page = await person.page(f"/dags/{dag}")

    assert len(re.findall('data-task="', page)) == 3
    assert {"review ×3000", "1 running · 2,999 waiting", "3,000 items"} <= set(re.split(r"[<>]", page))
    assert f'href="/dags/{dag}?open={ids["review"]}"' in page
    assert "more are in the" not in text_of(page)
    drawing = (await person.get(f"/dags/{dag}/picture.mmd")).body.decode()
    assert '"review ×3000<br/>RUNNING"' in drawing
    opened = await person.page(f"/dags/{dag}?open={ids['review']}")
    assert "review ×3000" not in opened
    assert "1,003 more are in the" in text_of(opened)
    child = (await served.client.get(f"/v1/tasks?parent_id={ids['review']}&status=RUNNING")).json["items"][0]
    assert (child["index"], child["item"], child["title"]) == (0, 0, "review [0]")
    assert "For each item of scan.files , at most 5,000" in text_of(
        await person.page(f"/tasks/{ids['review']}")
    )
    assert "Item 0 0" in text_of(await person.page(f"/tasks/{child['id']}"))


async def test_a_dag_has_one_longest_path_and_boxes_have_names(served: Served) -> None:
    """By how long tasks take, not by their number: on the way to d, one slow task outweighs two fast ones."""
    tasks = [
        {"key": "slow", "type": "work"},
        {"key": "fast-1", "type": "work"},
        {"key": "fast-2", "type": "work", "depends_on": ["fast-1"]},
        {"key": "d", "type": "work", "title": "Last", "depends_on": ["slow", "fast-2"]},
    ]
    reply = await served.client.post("/v1/dags", {"title": "Report", "tasks": tasks})
    dag, ids = reply.json["dag"]["id"], reply.json["tasks"]
    agent = await served.client.register()
    held = dict([await served.client.hold(agent) for _ in range(2)])
    for name in ("fast-1", "slow"):
        if name == "slow":
            with psycopg.connect(served.service.engine.database.dsn, autocommit=True) as connection:
                connection.execute(
                    "UPDATE lineshaft.task_live SET started_at = now() - interval '1 hour',"
                    " first_started_at = now() - interval '1 hour' WHERE id = %s",
                    [ids["slow"]],
                )
        done = {"claim_token": held[ids[name]], "output": {"data": 1}}
        assert (await served.client.post(f"/v1/tasks/{ids[name]}/complete", done)).status == 200

    page = await Person(served).page(f"/dags/{dag}")

    tagged = {
        name for name, row in ((key, _row(page, id_)) for key, id_ in ids.items()) if "longest path" in row
    }
    drawn = {
        key
        for key, id_ in ids.items()
        if re.search(rf'class="[^"]*\bcritical\b[^"]*" data-task="{id_}"', page)
    }
    assert tagged == drawn
    assert {"slow", "d"} <= tagged
    assert all(f">{title}</text>" in page for title in ("slow", "fast-1", "fast-2", "Last"))


def _row(page: str, task_id: str) -> str:
    table = page[page.index('id="table-title"') :]
    (row,) = [row for row in table.split("<tr")[1:] if f'href="/tasks/{task_id}"' in row]
    return row


async def test_a_completed_dag_says_how_many_of_its_tasks_were_cancelled(served: Served) -> None:
    dag, tasks = await _submit(served)
    client, person = served.client, Person(served)
    agent = await client.register()
    task_id, token = await client.hold(agent)
    await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": {"data": 1}})
    assert "tasks cancelled" not in text_of(await person.page(f"/dags/{dag}"))
    await client.post(f"/v1/tasks/{tasks['b']}/cancel", {"reason": "enough"})

    assert (await client.get(f"/v1/dags/{dag}")).json["status"] == "completed"
    for address in ("/dags", f"/dags/{dag}"):
        assert "completed, 2 of 3 tasks cancelled" in text_of(await person.page(address))
    other, _ = await _submit(served)
    await client.post(f"/v1/dags/{other}/cancel", {"reason": "all of it"})
    page = text_of(await person.page(f"/dags/{other}"))
    assert "tasks cancelled" not in page, "its status says it"


async def test_a_short_id_leads_to_the_dag_and_an_unknown_one_to_an_error(served: Served) -> None:
    dag, _ = await _submit(served)
    person = Person(served)

    await person.page(f"/dags/{dag[6:14]}-{dag[-4:]}")

    assert person.path == f"/dags/{dag}"
    assert "There is no DAG unknown" in await person.page("/dags/unknown", 404)


async def test_money_and_cancelling_are_recorded_with_the_name(served: Served) -> None:
    dag, tasks = await _submit(served, budget_ceiling_usd=5)
    person = Person(served)
    await person.page(f"/dags/{dag}")

    assert "The budget is changed" in await person.act(f"/dags/{dag}/budget", {"how": "add", "usd": "2.5"})
    assert (await served.client.get(f"/v1/dags/{dag}")).json["budget_ceiling_usd"] == 7.5
    await person.act(f"/dags/{dag}/budget", {"how": "none"})
    assert (await served.client.get(f"/v1/dags/{dag}")).json["budget_ceiling_usd"] is None
    for fields in ({"how": "add"}, {"how": "set", "usd": "much"}, {"how": "nonsense", "usd": "1"}):
        assert (await person.submit(f"/dags/{dag}/budget", fields)).status == 422, fields
    cancelled = await person.act(f"/dags/{dag}/cancel", {"reason": "no longer needed"})
    assert "Cancelled 3 tasks" in cancelled
    assert "Holds up the most" not in cancelled

    events = (await served.client.get(f"/v1/tasks/{tasks['a']}/events")).json["items"]
    data = next(event["data"] for event in events if event["kind"] == "task.cancelled")
    assert data["actor"] == NAME
    assert "no longer needed" in str(data)


async def test_the_parts_of_a_bar_fill_it() -> None:
    parts = _states({"READY": 1, "COMPLETED": 2, "DEAD_LETTERED": 1})

    assert [(part.status, part.start, part.width) for part in parts] == [
        ("COMPLETED", 0.0, 50.0),
        ("READY", 50.0, 25.0),
        ("DEAD_LETTERED", 75.0, 25.0),
    ]
    assert _states({}) == []
    assert _blockers([]) == []


async def test_an_open_picture_moves_and_zooms(served: Served, tab: Visitor) -> None:
    dag, tasks = await _submit(served)
    page = await tab.open(f"/dags/{dag}")
    box = page.locator(f'[data-task="{tasks["a"]}"]')
    await expect(box).to_contain_class("state-READY")

    await page.get_by_role("button", name="Larger").click()
    before = await page.locator("#canvas > svg").get_attribute("style")
    await page.locator("#canvas").press("ArrowRight")
    moved = await page.locator("#canvas > svg").get_attribute("style")
    assert before != moved
    await served.client.post(f"/v1/tasks/{tasks['a']}/cancel", {"reason": "test", "cascade": False})

    await expect(box).to_contain_class("state-CANCELLED")
    # The update left the view where the person put it.
    assert await page.locator("#canvas > svg").get_attribute("style") == moved
    await page.locator(f'[data-task="{tasks["b"]}"] a, a:has([data-task="{tasks["b"]}"])').first.click()
    await expect(page).to_have_url(f"{tab.address}/tasks/{tasks['b']}")
