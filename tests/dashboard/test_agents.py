"""Agents: capacity, processes, money, and what an operator changes."""

from decimal import Decimal
from urllib.parse import quote

import psycopg
from playwright.async_api import expect

from lineshaft.clock import MovableClock
from lineshaft.types import NewAgent
from tests.dashboard.conftest import Serve, Served, Visitor, scripts_run
from tests.dashboard.forms import Person, text_of
from tests.dashboard.records import (
    HOSTILE,
    addresses,
    check_act,
    check_harmless,
    live_part,
    reader_of,
)


async def test_the_list_shows_capacity_versions_and_work_that_no_agent_takes(served: Served) -> None:
    person = Person(served)
    empty = text_of(await person.page("/agents"))
    assert "No agents. They appear here when their processes start" in empty
    client = served.client
    await client.register("coder", instance="a", version="1.0", types=["code"], max_concurrent_tasks=3)
    agent = await client.register(
        "coder", instance="b", version="1.1", types=["code"], max_concurrent_tasks=2
    )
    limits = {"bulk": {"max_cost_usd": 0.25, "description": "Moves much."}}
    await client.register(
        "big", max_concurrent_tasks=500, types=["bulk"], budget_usd=10, task_defaults=limits
    )
    await client.submit("code", title="One")
    await client.submit("carve")
    await client.hold(agent)

    page = await person.page("/agents")
    seen = text_of(page)
    assert "1 of 505 slots in use" in seen
    assert page.count('class="slot used"') == 1
    assert page.count('class="slot"') == 4
    assert "mixed: 1.1, 1.0" in seen
    assert "$10.00 of $10.00 left" in seen
    assert "carve" in seen.partition("Work that no agent takes")[2]
    types = seen.partition("Limits of tasks that leave them out")[2]
    assert "Moves much. $0.25" in types
    assert "carve" in types
    assert "No agent is draining. Show all agents" in text_of(await person.page("/agents?status=draining"))
    assert "coder" in text_of(await person.page("/agents?status=active&status=nonsense"))
    assert addresses(await person.page("/agents?cursor=big"), "/agents/") == ["/agents/coder"]


async def test_a_late_heartbeat_is_marked_before_the_process_counts_as_offline(serve: Serve) -> None:
    clock = MovableClock()
    async with serve(clock=clock) as served:
        await served.client.register("slow", heartbeat_interval_sec=30)
        person = Person(served)
        assert "overdue" not in await person.page("/agents")

        clock.advance(70)
        for path in ("/agents", "/agents/slow"):
            page = text_of(await person.page(path))
            assert "overdue" in page
            assert "active" in page


async def test_money_of_an_agent(serve: Serve) -> None:
    """How long a budget lasts follows from the last minutes; one that is exceeded says by how much."""
    clock = MovableClock()
    async with serve(clock=clock) as served:
        client, person = served.client, Person(served)
        agent = await client.register("coder", budget_usd=10, heartbeat_interval_sec=3000)

        async def page() -> str:
            return text_of(await person.page("/agents/coder"))

        await client.submit("code")
        task_id, token = await client.hold(agent)
        await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token, "cost_usd": 4})
        assert "left, about" not in await page(), "one call is no rate"
        clock.advance(2 * 3600)
        assert "$6.00 of $10.00 left" in await page()
        assert "left, about" not in await page(), "nothing was spent lately"

        await client.submit("code")
        task_id, token = await client.hold(agent)
        clock.advance(60)
        report = {"id": task_id, "claim_token": token, "cost_usd": 0.6}
        beat = {"incarnation": agent["incarnation"], "tasks": [report]}
        await client.post("/v1/agents/coder/heartbeat", beat)
        assert "$5.40 of $10.00 left, about 9 min at this rate" in await page(), "a cent a second"

        await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token, "cost_usd": 6.3})
        assert "over by $0.30, of $10.00" in await page()
        assert "at this rate" not in await page()


async def test_the_page_of_an_agent_shows_its_processes_and_what_became_of_its_claims(served: Served) -> None:
    client = served.client
    agent = await client.register("coder", instance="host-a/1", host="host-a", version="2.1", budget_usd=2)
    outcomes = []
    for title in ("Good", "Bad", "Still running"):
        task = await client.submit("code", title=title, max_attempts=1)
        outcomes.append((task["id"], (await client.hold(agent))[1]))
    good, bad, running = outcomes
    await client.post(
        f"/v1/tasks/{good[0]}/complete", {"claim_token": good[1], "output": {"data": 1}, "cost_usd": 0.5}
    )
    failure = {"claim_token": bad[1], "category": "invalid_output", "error": "No <b>title</b>"}
    await client.post(f"/v1/tasks/{bad[0]}/fail", failure)

    page = await Person(served).page("/agents/coder")
    seen = text_of(page)
    assert "host-a/1" in seen
    assert "2.1" in seen
    assert "$1.50 of $2.00 left" in seen
    now, _, recent = seen.partition("Recent claims")
    assert "Still running" in now.partition("Running now")[2]
    assert "Good completed" in recent
    assert "invalid_output : No <b>title</b> failed" in recent
    assert f"/tasks/{running[0]}" in page
    assert (await Person(served).get("/agents/nobody")).status == 404


async def test_each_act_is_carried_out_and_recorded(served: Served, connection: psycopg.Connection) -> None:
    agent = await served.client.register("coder", budget_usd=5, max_concurrent_tasks=2)
    person = Person(served)
    page = await person.page("/agents/coder")
    for line in ("--status draining", "--add-budget 10", "--budget 45", "--slots 3"):
        assert f"lineshaft agents change coder {line}" in page

    async def act(name: str, **fields: str) -> str:
        return text_of(await person.act(f"/agents/coder/{name}", {"reason": f"for {name}", **fields}))

    assert "coder takes no more work" in await act("drain")
    check_act(connection, "agent.changed", "for drain", status={"from": "active", "to": "draining"})
    assert "coder takes work again" in await act("activate")
    check_act(connection, "agent.changed", "for activate", status={"from": "draining", "to": "active"})
    await act("add-budget", add_budget_usd="2.50")
    await act("budget", budget_usd="40")
    check_act(connection, "agent.changed", "for budget", budget_usd={"from": 7.5, "to": 40})
    await act("budget", budget_usd="")
    await act("slots", max_concurrent_tasks="7")
    check_act(connection, "agent.changed", "for slots", max_concurrent_tasks={"from": None, "to": 7})
    found = await served.service.engine.fleet.read("coder")
    assert (found.budget_usd, found.max_concurrent_tasks) == (None, 7)
    await act("slots", max_concurrent_tasks="")
    assert (await served.service.engine.fleet.read("coder")).max_concurrent_tasks == 2

    refused = await person.submit("/agents/coder/delete", {"reason": "for delete"})
    assert refused.status == 422
    assert "1 of its instances are alive" in text_of(refused.body.decode())
    assert "Stop their processes first" in text_of(refused.body.decode())
    await served.client.post("/v1/agents/coder/leave", {"incarnation": agent["incarnation"]})
    assert "Agent coder was deleted" in await act("delete")
    check_act(connection, "agent.changed", "for delete", deleted=True)
    assert (await person.get("/agents/coder")).status == 404


async def test_what_is_not_valid_is_refused_with_the_page_and_changes_nothing(served: Served) -> None:
    await served.client.register("coder", budget_usd=5)
    person = Person(served)
    await person.page("/agents/coder")
    for path, field, value in (
        ("budget", "budget_usd", "much"),
        ("budget", "budget_usd", "-1"),
        ("add-budget", "add_budget_usd", ""),
        ("add-budget", "add_budget_usd", "nan"),
        ("slots", "max_concurrent_tasks", "1.5"),
        ("slots", "max_concurrent_tasks", "0"),
        ("slots", "max_concurrent_tasks", "9" * 5000),
    ):
        reply = await person.submit(f"/agents/coder/{path}", {field: value})
        assert reply.status == 422, (path, value)
        page = reply.body.decode()
        assert field in text_of(page)
        assert "data-live" not in page
    too_long = await person.submit("/agents/coder/drain", {"reason": "r" * 2001})
    assert too_long.status == 422
    found = await served.service.engine.fleet.read("coder")
    assert (found.budget_usd, found.max_concurrent_tasks, found.status) == (Decimal(5), 10, "active")
    assert (await person.submit("/agents/unknown/drain")).status == 404


async def test_who_only_reads_sees_no_button(served: Served) -> None:
    await served.client.register("coder", budget_usd=5)
    person = await reader_of(served)

    page = await person.page("/agents/coder")
    assert addresses(page, "/agents/coder/") == []
    assert "<dialog" not in page.partition("<main")[2].partition("</main>")[0]
    for name in ("drain", "activate", "budget", "add-budget", "slots", "delete"):
        assert (await person.submit(f"/agents/coder/{name}", {"budget_usd": "1"})).status == 403
    assert (await served.service.engine.fleet.read("coder")).status == "active"


async def test_any_id_has_a_page_with_working_buttons_that_is_live(served: Served) -> None:
    fleet = served.service.engine.fleet
    long = "y" * 200
    for agent_id in (HOSTILE, long):
        await fleet.register(
            NewAgent(
                id=agent_id,
                instance=HOSTILE,
                host=HOSTILE,
                version=HOSTILE[:100],
                types=("t" * 1000, HOSTILE),
                capabilities=(HOSTILE,),
            )
        )
    person = Person(served)
    page = await person.page("/agents")
    check_harmless(page)
    listed = addresses(page, "/agents/")
    assert sorted(listed) == sorted(f"/agents/{quote(agent_id, safe='')}" for agent_id in (HOSTILE, long))

    own = await person.page(f"/agents/{quote(HOSTILE, safe='')}")
    check_harmless(own)
    assert "event: gone" not in (live := await live_part(served, person, own))
    assert "second" in live
    (drain,) = [each for each in addresses(own, "/agents/") if each.endswith("/drain")]
    check_harmless(await person.act(drain))
    assert (await fleet.read(HOSTILE)).status == "draining"


async def test_an_agent_is_drained_by_keyboard(served: Served, tab: Visitor) -> None:
    # A browser on a busy machine needs longer than the usual interval.
    await served.client.register("coder", heartbeat_interval_sec=3600)
    page = await tab.open("/agents")
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="coder")).to_be_visible()
    await scripts_run(page)
    await page.get_by_role("button", name="Drain").focus()
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_text("It claims nothing more")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    await page.keyboard.press("Enter")
    await dialog.get_by_label("Reason").fill("new version")
    await page.keyboard.press("Enter")
    await page.get_by_label("Your name").fill("Ann")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("status").filter(has_text="takes no more work")).to_be_visible()
    await expect(page.get_by_role("button", name="Activate")).to_be_visible()

    # The page follows what others do.
    await served.service.engine.fleet.patch("coder", status="active")
    await expect(page.get_by_role("button", name="Drain")).to_be_visible()
