"""The list of tasks: filters, search, and what is done to many at once."""

import re
from typing import Any

from playwright.async_api import expect

from tests.dashboard.conftest import Serve, Served, Visitor, scripts_run
from tests.dashboard.forms import NAME, Person, text_of
from tests.server.client import Client

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e" + "long" * 200


async def fail(client: Client, agent: dict[str, Any], type_: str, error: str = "boom") -> str:
    task_id, token = await client.hold(agent, types=[type_])
    body = {"claim_token": token, "error": error, "category": "auth_failure"}
    assert (await client.post(f"/v1/tasks/{task_id}/fail", body)).status == 200
    return task_id


async def events_of(client: Client, task_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get(f"/v1/tasks/{task_id}/events")).json["items"]
    return found


async def test_filters_come_from_the_address_and_bad_ones_are_dropped(served: Served) -> None:
    await served.client.submit("research", title="Find sources", tags=["red"])
    dag = {"title": "Release", "tasks": [{"type": "write", "key": "w", "title": "Write it up"}]}
    made = (await served.client.post("/v1/dags", {**dag, "created_by": "human:ann"})).json["dag"]
    person = Person(served)

    everything = text_of(await person.page("/tasks"))
    assert "Find sources" in everything
    assert "Write it up" in everything
    assert "READY 2" in everything, "tabs have counts"
    for query in ("q=SOURCES", "type=research", "tag=red", "status=ready&q=find", "order=priority&tag=red"):
        page = text_of(await person.page(f"/tasks?{query}"))
        assert "Find sources" in page, query
        assert "Write it up" not in page, query
    short = f"{made['id'][6:14]}-{made['id'][-4:]}"
    assert "Write it up" in text_of(await person.page(f"/tasks?dag_id={short}"))
    for query in (
        "status=NONSENSE",
        "order=nonsense",
        "cursor=nonsense",
        "order=priority&status=COMPLETED&status=READY",
        "type=%00",
        "unknown=1",
        f"q={'x' * 2000}",
    ):
        assert "Find sources" in text_of(await person.page(f"/tasks?{query}")), query

    nothing = await person.page("/tasks?type=unheard-of&status=READY")
    assert "No tasks where status READY, type unheard-of" in text_of(nothing)
    assert 'href="/tasks?status=READY">Without “type”' in nothing


async def test_pages_follow_each_other_by_cursor(served: Served) -> None:
    await served.client.post(
        "/v1/tasks/batch", {"tasks": [{"type": "t", "title": f"N{n}."} for n in range(60)]}
    )
    person = Person(served)

    first = await person.page("/tasks?type=t")
    following = re.search(r'href="(/tasks\?[^"]*)" rel="next"', first)
    assert following is not None
    second = await person.page(following[1].replace("&amp;", "&"))

    titles = [set(re.findall(r"N\d+\.", page)) for page in (first, second)]
    assert [len(found) for found in titles] == [50, 10]
    assert not titles[0] & titles[1]
    assert "First page" in second


async def test_rows_say_why_in_one_line(served: Served) -> None:
    client = served.client
    agent = await client.register()
    first = await client.submit("a", title="First")
    await client.submit("b", title="Second", depends_on=[first["id"]])
    await client.submit("c", title="Third", run_at="2090-01-01T00:00:00Z")
    await client.submit("d", title="Fourth", max_attempts=1)
    await fail(client, agent, "d", "401: the key has expired")
    await client.submit("e", title="Fifth")
    await client.submit("f", title="Sixth")
    await client.submit("e", title="Eighth", required_capabilities=["gpu"])
    await client.post("/v1/pause", {"type": "f"})
    await client.submit("g", title="Seventh", required_capabilities=["human"])
    person = Person(served)
    await person.page("/tasks")

    page = await person.page("/tasks")

    rows = {title: text_of("<main>" + row) for row in page.split("<tr data-row")[1:] for title in _title(row)}
    assert "waits for 1 task" in rows["Second"]
    assert "due" in rows["Third"]
    assert "auth_failure 401: the key has expired" in rows["Fourth"]
    assert "in the queue" in rows["Fifth"]
    assert "its type is paused" in rows["Sixth"]
    assert "no agent can do it" in rows["Eighth"]
    assert "waits for a person" in rows["Seventh"]


def _title(row: str) -> list[str]:
    return re.findall(r"<bdi>(First|Second|Third|Fourth|Fifth|Sixth|Seventh|Eighth)</bdi></a>", row)


async def test_search_goes_to_the_task_or_dag_that_an_id_means(served: Served) -> None:
    task = await served.client.submit("research", title="Find sources")
    dag = {"title": "Release", "tasks": [{"type": "write", "key": "a"}, {"type": "write", "key": "b"}]}
    made = (await served.client.post("/v1/dags", dag)).json["dag"]
    person = Person(served)

    async def lands(text: str) -> str:
        return (await person.get(f"/search?q={text}")).headers["location"]

    short = f"{task['id'][7:15]}-{task['id'][-4:]}"
    assert await lands(task["id"]) == f"/tasks/{task['id']}"
    assert await lands(f"task_{short}") == f"/tasks/{task['id']}"
    assert await lands(made["id"]) == f"/dags/{made['id']}"
    assert await lands("Find%20it") == "/tasks?q=Find+it"
    assert await lands("") == "/tasks"
    assert await lands("%00%ff") == "/tasks?q=%00%EF%BF%BD"


async def test_all_that_match_are_counted_shown_and_cancelled(served: Served) -> None:
    tasks = [{"type": "crawl", "title": f"Crawl {n}", "tags": ["old"]} for n in range(230)]
    await served.client.post("/v1/tasks/batch", {"tasks": tasks})
    other = await served.client.submit("crawl", title="Keep me")
    person = Person(served)

    assert "/bulk/cancel?tag=old" in await person.page("/tasks?tag=old")
    assert "/bulk/retry?" not in await person.page("/tasks?tag=old&status=READY"), "it suits no such task"
    asked = text_of(await person.page("/bulk/cancel?tag=old"))
    assert "Cancel 230 tasks?" in asked
    assert "The newest 10" in asked
    assert "The count can move" in asked
    assert "lineshaft task cancel-matching --tag old" in asked
    assert (await served.client.get("/v1/tasks", status="CANCELLED")).json["items"] == []

    done = text_of(await person.act("/bulk/cancel", {"tag": "old", "reason": "too old"}))

    assert "Cancelled 230 tasks." in done
    assert person.path == "/tasks?tag=old"
    (cancelled, *_) = (await served.client.get("/v1/tasks", tag="old")).json["items"]
    assert (cancelled["status"], cancelled["cancel_reason"]) == ("CANCELLED", "too old")
    assert (await events_of(served.client, cancelled["id"]))[-1]["data"]["actor"] == NAME
    assert (await served.client.task(other["id"]))["status"] == "READY"
    assert "None of these tasks can be cancelled" in text_of(await person.page("/bulk/cancel?tag=old"))
    assert "Retried 230 tasks." in text_of(await person.act("/bulk/retry", {"tag": "old"}))


async def test_selected_tasks_are_changed_where_they_can_be(served: Served) -> None:
    client = served.client
    one, two = [await client.submit("t", title=title) for title in ("One", "Two")]
    await client.post(f"/v1/tasks/{two['id']}/cancel")
    ids = [one["id"], two["id"], "task_unknown"]
    person = Person(served)

    query = "&".join(f"id={name}" for name in ids)
    assert "Of 3 selected tasks, 1 can be cancelled." in text_of(await person.page(f"/bulk/cancel?{query}"))
    assert "Cancelled 1 task." in text_of(await person.act("/bulk/cancel", {"id": ids, "type": "t"}))
    assert person.path == "/tasks?type=t"
    assert "Retried 2 tasks." in text_of(await person.act("/bulk/retry", {"id": ids}))

    refused = await person.submit("/bulk/cancel", {})
    assert refused.status == 422, "an empty filter would match every task"
    assert (await person.submit("/bulk/delete", {"id": ids})).status == 404
    assert (await client.task(one["id"]))["status"] == "READY"


async def test_a_reader_sees_no_buttons_and_can_do_nothing(serve: Serve) -> None:
    async with serve(auth=True) as served:
        made = [await served.service.tokens.create("R", scope) for scope in ("read", "operate")]
        reader, operator = (Person(served), Person(served))
        served.client.token = made[1].token
        task = await served.client.submit("t", title="One")
        await reader.log_in(made[0].token)
        await operator.log_in(made[1].token)

        for path in ("/tasks?type=t", f"/tasks/{task['id']}"):
            page = await reader.page(path)
            assert "One" in page
            assert "/bulk/" not in page.replace('action="/bulk/cancel"', "")
            assert 'type="checkbox"' not in page
            assert not re.search(r'<form method="post" action="(?!/logout)', page), path
            assert "<button" in await operator.page(path)
        await reader.page("/bulk/cancel?type=t", status=403)
        for path in ("/bulk/cancel", f"/tasks/{task['id']}/cancel", f"/tasks/{task['id']}/change"):
            assert (await reader.submit(path, {"type": "t", "priority": "1"})).status == 403
            assert (await operator.submit(path, {"type": "t", "priority": "1"}, csrf="wrong")).status == 403
        found = await served.client.task(task["id"])
        assert (found["status"], found["priority"]) == ("READY", 50)


async def test_hostile_content_is_text(served: Served) -> None:
    await served.client.submit(
        "<b>t</b>", title=HOSTILE, tags=["<i>tag"], created_by="human:</option><script>x"
    )
    person = Person(served)

    for path in (
        "/tasks",
        "/tasks?type=%3Cb%3Et%3C/b%3E",
        "/bulk/cancel?q=script",
        "/tasks?q=%3Cscript%3E&tag=%22%3E",
    ):
        page = await person.page(path)
        assert "<script>" not in page.replace("<script src", ""), path
        assert "<img src=x" not in page
        assert "\x1b" not in page
        assert "\u202e" not in page


async def test_keys_move_select_and_open(served: Served, tab: Visitor) -> None:
    for title in ("First", "Second", "Third"):
        await served.client.submit("t", title=title)
    page = await tab.open("/tasks")

    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("x")
    await expect(page.locator("[data-selected-count]")).to_have_text("1")
    await page.keyboard.press("k")
    await page.keyboard.press("x")
    await expect(page.get_by_role("button", name="Cancel selected…")).to_be_visible()
    await expect(page.locator("[data-selected-count]")).to_have_text("2")
    # What is selected stays on the page while others come.
    await served.client.submit("t", title="Fourth")
    await page.get_by_role("button", name="Cancel selected…").press("Enter")
    await expect(page.get_by_role("heading", name="Cancel 2 tasks?")).to_be_visible()
    await page.get_by_label("Reason").fill("not needed")
    await page.keyboard.press("Enter")
    await page.get_by_label("Your name").fill("Ann")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Cancelled 2 tasks.")).to_be_visible()

    await scripts_run(page)
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Fourth")).to_be_visible()
    await page.go_back()
    await served.client.submit("t", title="Fifth")
    await page.get_by_role("button", name="1 new: show").click()
    await expect(page.get_by_role("link", name="Fifth")).to_be_visible()
