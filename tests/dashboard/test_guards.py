"""Guards: pauses, breakers, slowdowns, locks and limits, and what an operator changes."""

import re
from decimal import Decimal
from urllib.parse import quote

import psycopg
import pytest
from playwright.async_api import expect

from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.servers import ThisServer
from tests.dashboard.conftest import Served, Visitor
from tests.dashboard.forms import NAME, Person, text_of
from tests.dashboard.records import HOSTILE, addresses, check_act, check_harmless, live_part, reader_of

LIMITS = {
    "daily_budget_usd": "100",
    "velocity_usd": "",
    "velocity_window_sec": "600",
    "velocity_action": "stop",
    "default_max_cost_usd": "0.50",
    "crash_cost_fraction": "0.25",
    "judge_max_cost_usd": "0.1",
}


@pytest.fixture
def engine(served: Served) -> Engine:
    return served.service.engine


async def _hold_lock(served: Served, key: str, *, waiters: int = 0) -> str:
    agent = await served.client.register("holder")
    for _ in range(waiters + 1):
        await served.client.submit("code", lock_key=key)
    return (await served.client.hold(agent))[0]


async def test_an_installation_without_guards_says_so(served: Served) -> None:
    page = text_of(await Person(served).page("/guards"))
    for sentence in (
        "Nothing is paused.",
        "All breakers are closed, and none has counted a failure.",
        "No slowdowns.",
        "No document is locked.",
        "No task waits for the budget of its DAG.",
        "$0.00 spent, without a daily limit.",
    ):
        assert sentence in page


async def test_types_are_paused_and_resumed(
    served: Served, engine: Engine, connection: psycopg.Connection
) -> None:
    await served.client.register("coder", types=["research", "write"])
    await served.client.submit("research")
    person = Person(served)
    assert '<option value="research">' in await person.page("/guards")

    await person.act("/guards/pause", {"what": "type", "type": "research", "reason": "wrong prompt"})
    check_act(connection, "queue.paused", "wrong prompt", type="research")
    page = await person.act("/guards/pause", {"reason": "everything burns"})
    seen = text_of(page)
    assert NAME in seen
    assert "wrong prompt" in seen
    assert "1 task waits" in seen
    assert [pause.type for pause in await engine.read.pauses()] == ["*", "research"]
    assert "Pause everything" not in page

    for address in addresses(page, "/guards/resume:"):
        await person.act(address, {"reason": "fixed"})
    check_act(connection, "queue.resumed", "fixed")
    assert await engine.read.pauses() == []
    assert "Nothing is paused" in text_of(await person.page("/guards"))
    # Another person was faster.
    await person.act("/guards/resume:research")
    refused = await person.submit("/guards/pause", {"what": "type", "type": " "})
    assert refused.status == 422
    assert "enter the type of task to pause" in refused.body.decode()
    assert (await person.submit("/guards/pause", {"type": "t" * 5000})).status == 422
    assert await engine.read.pauses() == []


async def test_breakers_are_opened_and_reset(
    served: Served, engine: Engine, connection: psycopg.Connection
) -> None:
    agent = await served.client.register("coder", types=["code", "write"])
    person = Person(served)
    await person.page("/guards")
    for _ in range(5):
        await served.client.submit("code", max_attempts=1)
        task_id, token = await served.client.hold(agent, types=["code"])
        failure = {"claim_token": token, "category": "invalid_output", "error": "no"}
        await served.client.post(f"/v1/tasks/{task_id}/fail", failure)
    await served.client.submit("code")

    await person.act("/guards/breakers/open", {"key": "model:large", "reason": "it invents facts"})
    check_act(connection, "breaker.opened", "it invents facts", key="model:large")
    page = await person.page("/guards")
    seen = text_of(page).partition("Breakers")[2].partition("Slowdowns")[0]
    assert "model:large open by hand 0" in seen
    assert "not before it is reset" in seen
    assert "code open 5" in seen
    assert "1 task waits" in seen
    found = {each.key: each for each in (await engine.read.breakers()).items}
    assert found["code"].probe_at is not None
    assert found["code"].probe_at.isoformat(timespec="milliseconds") in page

    for address in addresses(page, "/guards/breakers/reset:"):
        await person.act(address, {"reason": "better now"})
    check_act(connection, "breaker.closed", "better now")
    assert {each.state for each in (await engine.read.breakers()).items} == {"closed"}
    for key in ("", "k" * 501, "\x00"):
        refused = await person.submit("/guards/breakers/open", {"key": key})
        assert refused.status == 422
        assert "must be a task type, model:NAME" in text_of(refused.body.decode())


async def test_a_slowdown_is_ended(served: Served, engine: Engine, connection: psycopg.Connection) -> None:
    await engine.slowdowns.slow_down("model:large", 60, "429 <b>slow</b> down")
    person = Person(served)
    page = await person.page("/guards")
    assert "429 <b>slow</b> down" in text_of(page)

    (address,) = addresses(page, "/guards/slowdowns/end:")
    assert "agents look for work again at once" in await person.act(address, {"reason": "quota raised"})
    check_act(connection, "signal.slowdown", "quota raised", key="model:large", by_hand=True)
    assert (await engine.read.slowdowns()).items == []
    assert "Nothing to change" in await person.act(address)


async def test_a_lock_is_taken_from_its_holder(
    served: Served, engine: Engine, connection: psycopg.Connection
) -> None:
    holder = await _hold_lock(served, "doc:/page.md", waiters=2)
    person = Person(served)
    page = await person.page("/guards")
    assert f"/tasks/{holder}" in page
    assert "2 tasks wait" in text_of(page)
    assert "it is tried again when its lease expires" in page

    (address,) = addresses(page, "/guards/locks/release:")
    await person.act(address, {"reason": "it hangs"})
    check_act(connection, "lock.expired", "it hangs", key="doc:/page.md", by_hand=True)
    assert (await engine.read.locks()).items == []


async def test_any_key_of_a_guard_has_a_working_button(served: Served, engine: Engine) -> None:
    keys = (HOSTILE, "k" * 1000, "..", " \nx\r ")
    agent = await served.client.register("holder")
    for key in keys:
        await served.client.submit("code", lock_key=key)
        await served.client.hold(agent)
    await engine.slowdowns.slow_down(f"model:{HOSTILE}", 60, HOSTILE)
    await engine.breakers.open(HOSTILE)
    await engine.pauses.pause(HOSTILE, reason=HOSTILE)
    person = Person(served)
    page = await person.page("/guards")
    check_harmless(page)
    assert "event: gone" not in await live_part(served, person, page)

    releases = addresses(page, "/guards/locks/release:")
    assert sorted(releases) == sorted(f"/guards/locks/release:{quote(key, safe='')}" for key in keys)
    for address in (
        *releases,
        *addresses(page, "/guards/slowdowns/end:"),
        *addresses(page, "/guards/breakers/reset:"),
        *addresses(page, "/guards/resume:"),
    ):
        page = await person.act(address, {"reason": HOSTILE})
        check_harmless(page)
    assert (await engine.read.locks()).items == []
    assert (await engine.read.slowdowns()).items == []
    assert await engine.read.pauses() == []
    assert [each.state for each in (await engine.read.breakers()).items] == ["closed"]


async def test_limits_are_changed_and_what_was_entered_survives_a_refusal(
    served: Served, engine: Engine, connection: psycopg.Connection
) -> None:
    person = Person(served)
    await person.page("/guards")
    seen = text_of(await person.act("/guards/limits", {**LIMITS, "reason": "a careful start"}))
    assert "$0.00 spent and $0.00 reserved of $100.00" in seen
    check_act(connection, "limits.changed", "a careful start")
    limits = await engine.limits.read()
    assert (str(limits.daily_budget_usd), limits.velocity_usd) == ("100.000000", None)
    assert (float(limits.crash_cost_fraction), float(limits.judge_max_cost_usd)) == (0.25, 0.1)

    for field, value in (
        ("daily_budget_usd", "lots"),
        ("velocity_usd", "-1"),
        ("velocity_window_sec", ""),
        ("velocity_window_sec", "0"),
        ("crash_cost_fraction", "2"),
        ("crash_cost_fraction", "nan"),
        ("judge_max_cost_usd", ""),
        ("velocity_action", "panic"),
    ):
        entered = {**LIMITS, "daily_budget_usd": "250", field: value, "reason": "typing"}
        refused = await person.submit("/guards/limits", entered)
        assert refused.status == 422, (field, value)
        page = refused.body.decode()
        assert field in text_of(page)
        assert f'name="daily_budget_usd" inputmode="decimal" value="{entered["daily_budget_usd"]}"' in page
        assert 'value="typing"' in page
    assert await engine.limits.read() == limits


async def test_only_what_a_person_changed_is_set_by_hand(served: Served, engine: Engine) -> None:
    """Not what somebody else has changed since the form was filled; a box returns it to the settings."""
    person = Person(served)
    page = await person.page("/guards")
    assert 'name="from_settings"' not in page
    before = dict(re.findall(r'name="(before_\w+)" value="([^"]*)"', page))
    await engine.limits.patch({"daily_budget_usd": 1}, reason="emergency")

    entered = {name.removeprefix("before_"): value for name, value in before.items()}
    await person.act("/guards/limits", {**entered, **before, "velocity_usd": "7", "reason": "slower"})

    limits = await engine.limits.read()
    assert (limits.daily_budget_usd, limits.velocity_usd) == (Decimal(1), Decimal(7))
    assert limits.by_hand == ["daily_budget_usd", "velocity_usd"]
    page = await person.page("/guards")
    before = dict(re.findall(r'name="(before_\w+)" value="([^"]*)"', page))
    entered = {name.removeprefix("before_"): value for name, value in before.items()}
    returned = {**entered, **before, "from_settings": "velocity_usd", "reason": "as before"}
    await person.act("/guards/limits", returned)
    assert (await engine.limits.read()).by_hand == ["daily_budget_usd"]

    for port, budget in ((1, 50), (2, 40)):
        await ThisServer(engine.database, f"host:{port}", "1.0", {"daily_budget_usd": budget}).report()
    seen = text_of(await person.page("/guards"))
    disagree = seen.partition("Servers disagree")[2]
    assert disagree.startswith(" about LINESHAFT_DAILY_BUDGET_USD: host:2 says 40, host:1 says 50.")


async def test_dags_that_are_out_of_money_are_named(served: Served, engine: Engine) -> None:
    agent = await served.client.register("coder")
    tasks = [{"key": key, "type": "code", "max_cost_usd": 0.5} for key in ("a", "b")]
    dag = (
        await served.client.post("/v1/dags", {"title": "Poor", "budget_ceiling_usd": 0.1, "tasks": tasks})
    ).json
    assert await served.client.claim(agent, limit=5) == []

    page = await Person(served).page("/guards")
    assert f"/dags/{dag['dag']['id']}" in page
    assert "Poor $0.10 $0.00 $0.00 2" in text_of(page)
    (short,) = await engine.read.short_dags()
    assert short.waiting == 2


async def test_lists_have_pages_of_their_own(served: Served, engine: Engine) -> None:
    for number in range(51):
        await engine.breakers.open(f"type-{number:02}")
    person = Person(served)
    page = await person.page("/guards")
    assert "type-49" in page
    assert "type-50" not in page
    (more,) = addresses(page, "/guards?breakers=")
    second = await person.page(more)
    assert "type-50" in second
    assert "type-49" not in second
    assert (await person.get("/guards?locks=nonsense")).status == 422


async def test_who_only_reads_sees_the_limits_but_no_button(served: Served, engine: Engine) -> None:
    await _hold_lock(served, "doc")
    await engine.pauses.pause("code")
    await engine.breakers.open("write")
    await engine.slowdowns.slow_down("*", 60)
    person = await reader_of(served)

    page = await person.page("/guards")
    assert addresses(page, "/guards/") == []
    assert "Crash cost 0 of the reservation" in text_of(page)
    for address in (
        "/guards/pause",
        "/guards/resume:code",
        "/guards/breakers/open",
        "/guards/breakers/reset:write",
        "/guards/slowdowns/end:*",
        "/guards/locks/release:doc",
        "/guards/limits",
    ):
        assert (await person.submit(address, {"key": "x", **LIMITS})).status == 403
    assert len(await engine.read.pauses()) == 1


async def test_a_type_is_paused_by_keyboard(tab: Visitor, engine: Engine) -> None:
    page = await tab.open("/guards")
    await page.get_by_role("button", name="Pause a type").focus()
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Type").fill("research")
    await page.keyboard.press("Tab")
    await page.keyboard.type("bad results")
    await page.keyboard.press("Enter")
    await page.get_by_label("Your name").fill("Ann")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("row").filter(has_text="research")).to_contain_text("bad results")

    # The page follows what others do.
    await engine.breakers.open("write")
    await expect(page.get_by_role("row").filter(has_text="write")).to_contain_text("by hand")
