"""The page of one task: why, timeline, error, values, artifacts, actions."""

import html
import re
from typing import Any

from playwright.async_api import expect

from lineshaft.clock import MovableClock
from tests.dashboard.conftest import Serve, Served, Visitor, scripts_run, visitor
from tests.dashboard.forms import NAME, Person, text_of
from tests.dashboard.test_tasks import HOSTILE, events_of, fail

TRACEBACK = """Traceback (most recent call last):
  File "/srv/agent/build.py", line 40, in build
    page = render(spec)
  File "/srv/venv/lib/python3.12/site-packages/jinja2/environment.py", line 939, in render
    self.handle_exception()
ValueError: no such template
"""
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 60


async def upload(served: Served, task_id: str, name: str, kind: str, content: bytes) -> dict[str, Any]:
    headers = {"Content-Type": kind, "X-Filename": name}
    reply = await served.client.request(
        "POST", "/v1/artifacts", raw=content, query={"task_id": task_id}, headers=headers
    )
    assert reply.status == 201, reply
    made: dict[str, Any] = reply.json
    return made


async def test_a_waiting_task_says_why_first(served: Served) -> None:
    client = served.client
    task = await client.submit("research", title="Find sources", tags=["red"])
    next_ = await client.submit("write", title="Write", depends_on=[task["id"]])
    person = Person(served)

    page = text_of(await person.page(f"/tasks/{task['id']}"))
    assert page.index("Why isn't it running?") < page.index("Timeline")
    assert "It needs an active agent for type 'research'" in page
    assert "Depend on it" in page
    blocked = await person.page(f"/tasks/{next_['id']}")
    assert "Waits for other tasks" in text_of(blocked)
    assert f'<a href="/tasks/{task["id"]}"><bdi class="id"' in blocked, "ids in a reason are links"

    await client.post("/v1/pause", {"type": "research"})
    paused = text_of(await person.page(f"/tasks/{task['id']}"))
    assert "Type 'research' is paused" in paused
    assert "Resume research" in paused
    resumed = text_of(await person.act(f"/tasks/{task['id']}/resume", {"type": "research"}))
    assert "Resumed type 'research'." in resumed
    assert "is paused" not in resumed


async def test_short_ids_lead_to_the_task_and_unknown_ones_are_not_found(served: Served) -> None:
    task = await served.client.submit("research")
    person = Person(served)

    reply = await person.get(f"/tasks/{task['id'][7:15]}-{task['id'][-4:]}")
    assert (reply.status, reply.headers["location"]) == (303, f"/tasks/{task['id']}")
    assert "There is no task" in await person.page("/tasks/unheard-of", status=404)
    assert "There is no task" in await person.page("/tasks/%00%3Cscript%3E", status=404)


async def test_the_timeline_has_attempts_steps_waits_and_costs(serve: Serve, clock: MovableClock) -> None:
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register()
        task = await client.submit("build", retry={"strategy": "immediate"})
        path = f"/tasks/{task['id']}"
        clock.advance(7200)
        await client.post("/v1/agents/a1/heartbeat", {"incarnation": agent["incarnation"]})
        task_id, token = await client.hold(agent)
        clock.advance(4)
        await client.put(
            f"/v1{path}/steps/plan", {"claim_token": token, "data": {"n": 1}, "step_cost_usd": 0.02}
        )
        clock.advance(2)
        body = {"claim_token": token, "error": "ValueError: no such template", "category": "tool_error"}
        await client.post(f"/v1/tasks/{task_id}/fail", {**body, "cost_usd": 0.25, "traceback": TRACEBACK})
        clock.advance(30)
        await client.post(f"/v1{path}/retry")
        await client.hold(agent)
        clock.advance(3)
        person = Person(served)

        whole = await person.page(path)
        page = text_of(whole)
        assert "What is it doing?" in page
        assert re.search(r"In the queue \S+ \S+ UTC 2 h ", page), "the same facts as a table"
        assert re.search(r"Attempt 1 \S+ \S+ UTC 6 s \$0.25 failed: tool_error: ValueError", page)
        assert re.search(r"Step plan \S+ \S+ UTC 4 s \$0.02", page)
        assert re.search(r"Attempt 2 \S+ \S+ UTC 3 s so far", page)
        assert "drawn shorter" in page
        assert whole.count('class="bar failed"') == 1
        assert "drawn shorter" not in text_of(await person.page(f"{path}?gaps=shown"))
        one = await person.page(f"{path}?attempt=1")
        assert "All attempts" in text_of(one)
        assert 'class="bar running"' not in one
        assert 'class="step alone"' in one
        assert "Attempt 2" in text_of(await person.page(f"{path}?attempt=99999999999")), (
            "a bad value is dropped"
        )

        # The last error: type and message first, own frames open, the rest behind a toggle.
        error = whole[whole.index('<p class="error">') :]
        assert error.index("<bdi>ValueError</bdi></strong>: <bdi>no such template") < error.index("build.py")
        assert "environment.py" not in error[: error.index("<details")].partition("<pre")[2]
        assert "environment.py" in error[error.index("<details") :]


async def test_values_are_shown_and_downloaded(served: Served) -> None:
    client = served.client
    agent = await client.register()
    task = await client.submit("a", title="First", spec={"prompt": "</pre><script>x()</script>"})
    task_id, token = await client.hold(agent)
    notes = await upload(served, task_id, "notes.md", "text/markdown", b"<script>\x1b" + b"y" * 40_000)
    picture = await upload(served, task_id, "shot.png", "image/png", PNG)
    svg = await upload(served, task_id, "evil.svg", "image/svg+xml", b"<svg onload='alert(1)'/>")
    page_ = await upload(served, task_id, "evil.html", "text/html", b"<script>alert(1)</script>")
    output = {"data": {"answer": 42}, "artifacts": [notes["ref"]]}
    await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": output})
    after = await client.submit("b", depends_on=[task["id"]], inputs={"notes": task["id"]})
    person = Person(served)

    page = await person.page(f"/tasks/{task_id}")
    assert "How did it end?" in text_of(page)
    assert '"answer": 42' in html.unescape(page)
    assert "x()</script>" not in page
    assert 'Output <span class="meta">' in await person.page(f"/tasks/{after['id']}")

    base = f"/tasks/{task_id}"
    for path, content in (("output.json", b'{"answer": 42}'), ("spec.json", None)):
        reply = await person.get(f"{base}/{path}")
        assert reply.headers["content-disposition"].startswith("attachment")
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert content is None or reply.body == content
    shown = await person.get(f"{base}/artifacts/{picture['id']}")
    assert (shown.headers["content-type"], shown.headers["content-disposition"]) == ("image/png", "inline")
    assert "sandbox" in shown.headers["content-security-policy"]
    assert shown.body == PNG
    for made in (svg, page_, notes):
        reply = await person.get(f"{base}/artifacts/{made['id']}")
        assert reply.headers["content-type"] == "application/octet-stream"
        assert reply.headers["content-disposition"].startswith("attachment")
    preview = await person.get(f"{base}/artifacts/{notes['id']}?preview=1")
    assert preview.headers["content-type"] == "text/plain; charset=utf-8"
    assert preview.headers["x-content-type-options"] == "nosniff"
    assert preview.body.startswith(b"<script>\\u001b")
    assert preview.body.endswith("… (40,009 bytes)".encode())
    assert len(preview.body) < 21_000
    assert (await person.get(f"{base}/artifacts/unheard-of")).status == 404


async def test_an_output_in_the_artifact_store_is_downloaded_whole(served: Served) -> None:
    client = served.client
    agent = await client.register()
    await client.submit("a")
    task_id, token = await client.hold(agent)
    content = b'"' + b"x" * (2 << 20) + b'"'
    made = await upload(served, task_id, "output.json", "application/json", content)
    body = {"claim_token": token, "output": {"data_ref": made["ref"]}}
    assert (await client.post(f"/v1/tasks/{task_id}/complete", body)).status == 200
    person = Person(served)

    assert "bytes, kept in the artifact store" in text_of(await person.page(f"/tasks/{task_id}"))
    reply = await person.get(f"/tasks/{task_id}/output.json")
    assert reply.headers["content-disposition"].startswith("attachment")
    assert reply.body == content


async def test_actions_change_the_task_and_are_recorded_with_the_name(served: Served) -> None:
    client = served.client
    task = await client.submit("a", title="First")
    for _ in range(3):
        await client.submit("b", depends_on=[task["id"]])
    path = f"/tasks/{task['id']}"
    person = Person(served)

    page = await person.page(path)
    assert "It also cancels 3 other tasks" in page
    assert f"lineshaft task cancel {task['id']}" in page
    was = {"was_priority": "50", "was_tags": "", "was_deadline": "", "was_max_attempts": "3"}
    same = {"priority": "50", "tags": "", "deadline": "", "max_attempts": "3"}
    assert "Nothing was changed" in text_of(await person.act(f"{path}/change", {**was, **same}))
    changed = {"priority": "7", "tags": "red, blue", "deadline": "2090-01-31T09:00:00Z", "max_attempts": "5"}
    done = await person.act(
        f"{path}/change", {**was, **changed, "max_cost_usd": "1.50", "was_max_cost_usd": ""}
    )
    assert "Changed deadline, max_attempts, max_cost_usd, priority, tags." in text_of(done)
    found = await client.task(task["id"])
    assert (found["priority"], found["tags"], found["max_attempts"]) == (7, ["red", "blue"], 5)
    assert (found["deadline"][:10], found["max_cost_usd"]) == ("2090-01-31", 1.5)
    assert "No" in (await person.act(f"{path}/change", {"max_cost_usd": "", "was_max_cost_usd": "1.5"}))
    assert (await client.task(task["id"]))["max_cost_usd"] is None

    wrong = await person.submit(f"{path}/change", {"priority": "urgent", "max_cost_usd": "much"})
    assert wrong.status == 422
    assert "must be a whole number" in text_of(wrong.body.decode())
    assert 'value="urgent"' in wrong.body.decode(), "what was entered is still there"
    assert (await person.submit(f"{path}/change", {"priority": "1000"})).status == 422
    assert (await person.submit(f"{path}/retry")).status == 422, "it isn't over"

    cancelled = text_of(await person.act(f"{path}/cancel", {"reason": "not needed"}))
    assert "Cancelled the task and 3 others." in cancelled
    assert "Cancelled at" in cancelled
    retried = text_of(await person.act(f"{path}/retry"))
    assert "Retried: the task is READY." in retried

    acted = {event["kind"]: event["data"] for event in await events_of(client, task["id"]) if event["data"]}
    assert acted["task.cancelled"] == {"reason": "not needed", "actor": NAME} | acted["task.cancelled"]
    assert {data.get("actor") for data in acted.values()} == {NAME}
    assert NAME in retried, "events show who acted"
    assert (await person.submit(f"{path}/cancel", csrf="wrong")).status == 403
    assert (await client.task(task["id"]))["status"] == "READY"


async def test_a_dead_letter_offers_a_decision_and_only_its_limits_change(served: Served) -> None:
    client = served.client
    agent = await client.register()
    await client.submit("d", max_attempts=1)
    task_id = await fail(client, agent, "d", "401: the key has expired")
    person = Person(served)

    page = await person.page(f"/tasks/{task_id}")
    assert f'href="/dead-letters/{task_id}"' in page
    assert 'name="max_attempts"' in page
    assert 'name="priority"' not in page
    assert "Cancel…" not in page
    assert "the task is READY" in text_of(await person.act(f"/tasks/{task_id}/retry"))


async def test_hostile_content_is_text(served: Served) -> None:
    client = served.client
    agent = await client.register()
    spec = {"a": HOSTILE, "long": "x" * 1_000_000}
    await client.submit("h", title=HOSTILE, spec=spec, tags=["<i>tag"], lock_key='"><script>')
    task_id, token = await client.hold(agent)
    path = f"/v1/tasks/{task_id}"
    await client.put(f"{path}/steps/%3Cscript%3E", {"claim_token": token, "data": HOSTILE})
    await client.put(f"{path}/checkpoint", {"claim_token": token, "data": "x" * 500_000})
    body = {"claim_token": token, "error": HOSTILE * 20, "category": "tool_error", "traceback": HOSTILE * 10}
    await client.post(f"{path}/fail", body)
    person = Person(served)

    for path in (f"/tasks/{task_id}", f"/tasks/{task_id}?attempt=1"):
        page = await person.page(path)
        assert "<script>" not in page
        assert "<img src=x" not in page
        assert "\x1b" not in page
        assert "\u202e" not in page
        assert len(page) < 200_000, "what is large is cut"


async def test_an_open_task_page_follows_the_task(served: Served, tab: Visitor) -> None:
    client = served.client
    agent = await client.register()
    task = await client.submit("a", title="First", spec={"n": 1})
    page = await tab.open(f"/tasks/{task['id']}")
    await expect(page.get_by_text("Nothing holds it back")).to_be_visible()

    task_id, token = await client.hold(agent)
    lease = page.locator("#lease time")
    await expect(lease).to_have_text(re.compile(r"in (1 min )?\d+ s"))
    before = await lease.text_content()
    await expect(lease).not_to_have_text(before or "")
    tasks = [{"id": task_id, "claim_token": token, "progress": {"percent": 40, "message": "half-way"}}]
    await client.post("/v1/agents/a1/heartbeat", {"incarnation": agent["incarnation"], "tasks": tasks})
    await expect(page.get_by_text("half-way").first).to_be_visible()
    await expect(page.locator("progress")).to_have_attribute("value", "0.4000")

    await page.get_by_role("button", name="Change…").click()
    await page.get_by_label("Priority").fill("3")
    await page.get_by_role("button", name="Change", exact=True).click()
    await page.get_by_label("Your name").fill("Ann")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Changed priority.")).to_be_visible()
    await scripts_run(page)
    made = await upload(served, task_id, "notes.md", "text/markdown", b"<b>bold</b> notes")
    output = {"data": {"answer": 42}, "artifacts": [made["ref"]]}
    await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": output})
    await expect(page.get_by_role("heading", name="How did it end?")).to_be_visible()
    await page.get_by_text("Preview").click()
    await expect(page.get_by_text("<b>bold</b> notes")).to_be_visible()


async def test_the_pages_fit_a_phone_in_the_dark(served: Served, browser: Any) -> None:
    client = served.client
    agent = await client.register()
    await client.submit("h" * 200, title=HOSTILE, spec={"long": "x" * 5_000}, tags=["t" * 200])
    task_id = await fail(client, agent, "h" * 200, HOSTILE)
    tab = await visitor(browser, served, viewport={"width": 400, "height": 800}, color_scheme="dark")

    for path in ("/tasks", f"/tasks/{task_id}", "/bulk/retry?q=script"):
        page = await tab.open(path)
        assert await page.evaluate("document.documentElement.scrollWidth") == 400, path
    await tab.context.close()
    assert tab.faults == []


async def test_a_disputed_cost_needs_a_person(served: Served) -> None:
    client = served.client
    task = await client.submit("research", title="Find sources")
    _, token = await client.hold(await client.register("ann"))
    body = {"claim_token": token, "output": {"data": 1}, "cost_usd": 110}
    assert (await client.post(f"/v1/tasks/{task['id']}/complete", body)).status == 200
    person = Person(served)

    assert "1 task with a disputed cost" in text_of(await person.page("/"))
    assert "Disputed $100.00, in no sum on this page" in text_of(await person.page("/costs"))
    page = text_of(await person.page(f"/tasks/{task['id']}"))
    assert "Spent $10.00 Disputed $100.00" in page
    refused = await person.submit(f"/tasks/{task['id']}/cost", {"cost_usd": "much", "reason": "?"})
    assert refused.status == 422
    assert (await person.submit(f"/tasks/{task['id']}/cost", {"disputed": "maybe"})).status == 422

    done = text_of(await person.act(f"/tasks/{task['id']}/cost", {"disputed": "refuse", "reason": "a bug"}))
    assert "The cost is $10.00." in done
    assert "Disputed" not in done
    assert "Nothing. Dead letters" in text_of(await person.page("/"))
