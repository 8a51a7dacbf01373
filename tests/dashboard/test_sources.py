"""Sources: what fires next, what became of it, dry runs, and what an operator changes."""

import json
from html import unescape
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from playwright.async_api import expect

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.sources.firing import Occasion
from lineshaft.types.sources import NewSource, SourceFields, SourceKind, Verification
from tests.dashboard.conftest import Serve, Served, Visitor, scripts_run
from tests.dashboard.forms import NAME, Person, text_of
from tests.dashboard.records import HOSTILE, addresses, check_act, check_harmless, live_part, reader_of

TASK = {"task": {"type": "report", "title": "Week of ${event.tick}"}}
BUILDS = """\
kind: webhook
verify: {scheme: hmac-sha256, secret_env: LINESHAFT_HOOK_SECRET}
when: event.build > `3`
idempotency: ${event.build}
template: {task: {type: check, title: "Build ${event.build}", spec: {number: "${event.build}"}}}
"""


@pytest.fixture
def engine(served: Served) -> Engine:
    return served.service.engine


async def _schedule(engine: Engine, name: str = "weekly", **fields: Any) -> None:
    given = {"cron": "0 9 * * MON", "template": TASK, **fields}
    await engine.sources.create(NewSource(name=name, kind=SourceKind.SCHEDULE, **given))


async def test_the_list_says_when_each_source_fires_and_draws_the_next_day(serve: Serve) -> None:
    async with serve(clock=MovableClock()) as served:
        engine, person = served.service.engine, Person(served)
        assert "No sources. A source creates tasks when something happens" in text_of(
            await person.page("/sources")
        )
        await _schedule(engine, timezone="Europe/Berlin")
        await _schedule(engine, "twice", cron="0 10,17 * * *")
        await _schedule(engine, "often", cron="* * * * *")
        await _schedule(engine, "hourly", cron=None, every_sec=3600.0)
        await _schedule(engine, "off", cron="@daily", enabled=False)
        await engine.sources.create(
            NewSource(name="reports", kind=SourceKind.EVENT, on=["dag.completed"], template=TASK)
        )

        page = await person.page("/sources")
        seen = text_of(page)
        for words in (
            "at 09:00 on Monday, Europe/Berlin",
            "at 10:00 and 17:00 every day, UTC",
            "every minute, UTC",
            "every 1 h",
            "on dag.completed",
            "at 00:00 every day, UTC paused",
        ):
            assert words in seen
        # The time is 09:00 on a Sunday: after 60 minutes and 8 hours, every hour, and all the time.
        assert 'd="M60.0 1v14M480.0 1v14"' in page
        assert page.count("M60.0 1v14") == 2
        assert page.count('class="dense"') == 1
        assert "weekly" in page.partition("</svg>\n</div>")[0]
        assert "off" not in [address.rpartition("/")[2] for address in _in_strip(page)]
        assert "reports" not in text_of(await person.page("/sources?kind=schedule"))
        assert "No source of kind files . Show all sources" in text_of(
            await person.page("/sources?kind=files")
        )
        assert (await person.get("/sources?kind=nonsense")).status == 422


def _in_strip(page: str) -> list[str]:
    return addresses(page.partition('class="strip"')[2].partition("strip-axis")[0], "/sources/")


async def test_a_source_shows_its_next_five_times_and_its_firings(serve: Serve) -> None:
    async with serve(clock=MovableClock()) as served:
        engine, person = served.service.engine, Person(served)
        await _schedule(engine, cron="0 12 * * *")
        assert "It has not fired yet." in text_of(await person.page("/sources/weekly"))
        fired = await engine.firings.fire("weekly")
        bad = {"task": {"type": "report", "title": "${event.count}", "priority": "${event.count}"}}
        await engine.sources.create(NewSource(name="bad", kind=SourceKind.EVENT, on=["alert"], template=bad))
        await engine.firings.fire("bad", Occasion({"count": "<i>many</i>"}))

        page = await person.page("/sources/weekly")
        for day in range(8, 13):
            assert f"2026-02-{day:02} 12:00:00 UTC" in page
        assert "2026-02-13" not in page
        assert f"/tasks/{fired.task_ids[0]}" in page  # type: ignore[index]
        again = await person.page("/sources/weekly?tick=2026-02-01T12:00:00Z")
        assert "&#34;tick&#34;: &#34;2026-02-01T12:00:00Z&#34;" in again
        assert "failed template.task.priority" in text_of(await person.page("/sources/bad"))
        assert (await person.get("/sources/unknown")).status == 404


async def test_a_dry_run_shows_what_an_event_would_do_and_changes_nothing(
    served: Served, engine: Engine, connection: psycopg.Connection
) -> None:
    person = Person(served)
    await person.page("/sources/new?kind=webhook")

    async def attempt(path: str, event: Any, definition: str = BUILDS, status: int = 200) -> str:
        fields = {"name": "builds", "definition": definition, "event": json.dumps(event)}
        reply = await person.submit(path, fields)
        assert reply.status == status, reply
        assert "data-live" not in reply.body.decode()
        return reply.body.decode()

    page = await attempt("/sources/new/try", {"build": 17})
    assert "When true Key 17 : has not fired yet Creates a task" in text_of(page)
    assert "Build 17" in page
    assert "not true : nothing would be created (filtered)" in text_of(
        await attempt("/sources/new/try", {"build": 1})
    )
    assert (await engine.sources.find()).items == []

    await person.act("/sources/new", {"name": "builds", "definition": BUILDS})
    await engine.firings.fire("builds", Occasion({"build": 17}))
    page = await attempt("/sources/builds/try", {"build": 17})
    assert "has fired before, so this would be a duplicate" in text_of(page)
    # The definition in the editor counts, not the stored one.
    changed = BUILDS.replace("check", "inspect").replace("> `3`", "< `3`")
    assert "inspect" in await attempt("/sources/builds/try", {"build": 1}, changed)
    dag = (
        "kind: event\non: [alert]\ntemplate: {dag: {title: T, tasks: [{key: a, type: x}, {key: b, type: y}]}}"
    )
    seen = text_of(await attempt("/sources/new/try", {}, dag))
    assert "no condition: every event fires" in seen
    assert "a DAG “ T ” of 2 tasks" in seen
    schedule = "kind: schedule\ncron: '0 9 * * *'\ntemplate: {task: {type: x}}"
    assert "09:00:00 UTC" in text_of(await attempt("/sources/new/try", {}, schedule))
    assert "when" in text_of(
        await attempt("/sources/builds/try", {"build": 4}, BUILDS.replace("> `3`", "> ("), 422)
    )
    assert connection.execute("SELECT count(*) FROM lineshaft.task").fetchone() == (1,)
    assert (await engine.sources.get("builds")).when == "event.build > `3`"


async def test_each_act_is_carried_out_and_recorded(
    served: Served, engine: Engine, connection: psycopg.Connection
) -> None:
    person = Person(served)
    page = await person.page("/sources/new")
    assert "0 9 * * MON" in page
    definition = "kind: schedule\ncron: '0 9 * * MON'\ntemplate: {task: {type: report}}"
    page = await person.act("/sources/new", {"name": "weekly", "definition": definition})
    assert person.path == "/sources/weekly"
    check_act(connection, "source.created", None, source="weekly")
    for line in ("fire", "pause", "rm"):
        assert f"lineshaft sources {line} weekly" in page

    assert "It fired: created, 1 task." in text_of(await person.act("/sources/weekly/fire"))
    check_act(connection, "source.fired", None, source="weekly", outcome="created")
    await person.act("/sources/weekly/pause")
    assert not (await engine.sources.get("weekly")).is_enabled
    # A change of the definition leaves the pause alone.
    changed = definition.replace("MON", "TUE") + "\nmax_open: 1"
    assert "was changed" in await person.act("/sources/weekly/save", {"definition": changed})
    check_act(connection, "source.changed", None, source="weekly")
    found = await engine.sources.get("weekly")
    assert (found.cron, found.max_open, found.is_enabled) == ("0 9 * * TUE", 1, False)
    await person.act("/sources/weekly/resume")
    assert (await engine.sources.get("weekly")).next_at is not None
    assert "skipped, no work. 1 tasks or DAGs of this source are open" in text_of(
        await person.act("/sources/weekly/fire")
    )
    assert "Its work stays" in await person.act("/sources/weekly/delete")
    check_act(connection, "source.deleted", None, source="weekly")
    assert (await person.get("/sources/weekly")).status == 404
    assert (await person.submit("/sources/weekly/fire")).status == 404


async def test_who_edits_what_another_person_has_changed_sees_both_before_it_is_saved(
    served: Served, engine: Engine
) -> None:
    await _schedule(engine)
    ann, bob = Person(served), Person(served)
    opened = _hidden_version(await ann.page("/sources/weekly"))
    await bob.page("/sources/weekly")
    definition = "kind: schedule\ncron: '0 9 * * {}'\ntemplate: {{task: {{type: report}}}}\n"
    fields = {"definition": definition.format("WED"), "version": opened, "your_name": "Bob <b>"}
    page = await bob.act("/sources/weekly/save", fields)
    assert "Changed" in page
    stored = await engine.sources.get("weekly")
    assert (stored.updated_by, _hidden_version(page)) == ("Bob <b>", str(stored.version))

    fields = {"definition": definition.format("TUE") + "max_open: 2", "version": opened}
    # A dry run doesn't make it a newer version.
    tried = await ann.submit("/sources/weekly/try", fields)
    assert _hidden_version(tried.body.decode()) == opened
    reply = await ann.submit("/sources/weekly/save", fields)
    assert reply.status == 409
    refused = reply.body.decode()
    seen = text_of(refused)
    assert "Nothing was saved: the source was changed while you edited it Bob <b> changed it" in seen
    assert '"0 9 * * WED" "0 9 * * TUE"' in seen
    assert "/max_open null 2" in seen
    assert "TUE" in refused.partition('class="definition"')[2].partition("</textarea>")[0]
    assert (await engine.sources.get("weekly")) == stored
    # What was shown may be replaced, and only that.
    shown = _hidden_version(refused)
    await engine.sources.patch("weekly", SourceFields(enabled=False))
    reply = await ann.submit("/sources/weekly/save", {**fields, "version": shown})
    assert reply.status == 409
    fields["version"] = _hidden_version(reply.body.decode())
    await ann.act("/sources/weekly/save", fields)
    found = await engine.sources.get("weekly")
    assert (found.cron, found.max_open, found.is_enabled, found.updated_by) == ("0 9 * * TUE", 2, False, NAME)
    for version in ("inf", "x"):
        assert (await ann.submit("/sources/weekly/save", {**fields, "version": version})).status == 422


def _hidden_version(page: str) -> str:
    return page.partition('name="version" value="')[2].partition('"')[0]


@pytest.mark.parametrize(
    "number",
    ["9" * 4_300, "0x" + "f" * 5_000, ":".join(["1"] * 4_000)],
    ids=["decimal", "hex", "sexagesimal"],
)
async def test_a_number_that_is_too_long_is_refused(served: Served, number: str) -> None:
    """Python can't write it as text, so no answer could contain it."""
    person = Person(served)
    await person.page("/sources/new")
    for field in ("every_sec: 60\nmax_open", "every_sec", "every_sec: 60\njitter_sec"):
        definition = (
            f"kind: schedule\n{field}: {number}\ntemplate: {{task: {{type: x, spec: {{a: {number}}}}}}}"
        )
        for path in ("/sources/new", "/sources/new/try"):
            reply = await person.submit(path, {"name": "long", "definition": definition})
            assert reply.status == 422, (path, field)
    await person.page("/new/dag")
    document = f"title: x\ntasks: [{{key: a, type: x, spec: {{a: {number}}}}}]"
    assert (await person.submit("/new/dag", {"document": document})).status == 422


async def test_what_the_editor_shows_is_what_it_stores(served: Served, engine: Engine) -> None:
    person = Person(served)
    # The example of a file source is for a watcher on another machine.
    await engine.file_sources.roots.looked("elsewhere", ["/srv"], {})
    for kind in SourceKind:
        page = await person.page(f"/sources/new?kind={kind}")
        shown = page.partition('class="definition"')[2].partition(">")[2].partition("</textarea>")[0]
        assert f"kind: {kind}" in shown

        await person.act("/sources/new", {"name": f"my-{kind}", "definition": unescape(shown)})
        before = await engine.sources.get(f"my-{kind}")
        page = await person.page(f"/sources/my-{kind}")
        shown = page.partition('class="definition"')[2].partition(">")[2].partition("</textarea>")[0]
        await person.act(f"/sources/my-{kind}/save", {"definition": unescape(shown)})
        assert await engine.sources.get(f"my-{kind}") == before


async def test_what_is_not_valid_is_refused_and_what_was_entered_is_kept(
    served: Served, engine: Engine
) -> None:
    await _schedule(engine)
    stored = await engine.sources.get("weekly")
    person = Person(served)
    await person.page("/sources/new")
    good = "kind: schedule\ncron: '0 9 * * MON'\ntemplate: {task: {type: report}}"
    for name, definition, fault in (
        ("", good, "name"),
        ("new", good, "part of an address"),
        ("../x", good, "name"),
        ("weekly", good, "There is a source"),
        ("a", good.replace("MON", "NEVER"), "day-of-week"),
        ("a", good + "\nverify: {scheme: none}", "verify"),
        ("a", good + "\nnonsense: 1", "nonsense"),
        ("a", good + "\nname: b", "name"),
        ("a", "- just\n- a list", "must have fields"),
        ("a", "{not: [closed", "neither JSON nor YAML"),
        ("a", "kind: [&a [*a, *a], " + "*a, " * 10 + "]", ""),
        ("a", "[" * 5000, ""),
        ("a", "kind: schedule\n1: 2", ""),
    ):
        reply = await person.submit("/sources/new", {"name": name, "definition": definition})
        assert reply.status == 422, (name, definition)
        page = reply.body.decode()
        assert fault in text_of(page)
        assert definition.split("\n")[0] in unescape(page)
        reply = await person.submit("/sources/weekly/save", {"definition": f"{definition}\nkind: 7"})
        assert reply.status == 422
    for event in ("[1]", "{", "7", "[" * 5000):
        for path in ("/sources/new/try", "/sources/weekly/try", "/sources/weekly/fire"):
            reply = await person.submit(path, {"name": "a", "definition": good, "event": event})
            assert reply.status == 422, (path, event)
    assert [source.name for source in (await engine.sources.find()).items] == ["weekly"]
    assert await engine.sources.get("weekly") == stored


async def test_scopes_are_those_of_the_api(served: Served, engine: Engine) -> None:
    await engine.sources.create(
        NewSource(
            name="hook",
            kind=SourceKind.WEBHOOK,
            verify=Verification(scheme="token", secret_env="LINESHAFT_HOOK_SECRET"),
            template={"task": {"type": "x"}},
        )
    )
    operator = Person(served)
    made = await served.service.tokens.create(NAME, "operate")
    person = await reader_of(served)
    await operator.log_in(made.token)

    page = await person.page("/sources/hook")
    assert addresses(page, "/sources/hook/") == []
    assert "LINESHAFT_HOOK_SECRET" in page
    assert "<textarea" not in page
    assert "/sources/new" not in await person.page("/sources")
    assert (await person.get("/sources/new")).status == 403
    for name in ("try", "save", "fire", "pause", "resume", "delete"):
        assert (await person.submit(f"/sources/hook/{name}")).status == 403
    # Only an administrator opens a webhook that checks nothing.
    await operator.page("/sources/hook")
    open_hook = "kind: webhook\nverify: {scheme: none}\ntemplate: {task: {type: x}}"
    for path, fields in (("/sources/new", {"name": "open"}), ("/sources/hook/save", {})):
        reply = await operator.submit(path, {**fields, "definition": open_hook})
        assert reply.status == 422
        assert "admin" in text_of(reply.body.decode())
    await operator.act("/sources/hook/pause")
    assert not (await engine.sources.get("hook")).is_enabled


async def test_any_name_and_any_content_are_harmless(served: Served, engine: Engine) -> None:
    name = f"agent:{HOSTILE}/tidy"
    template = {"task": {"type": "x", "title": HOSTILE, "spec": {"text": HOSTILE * 50, "t": "${event.t}"}}}
    await _schedule(engine, name, template=template, cron="* * * * *", when=None)
    await engine.firings.fire(name, Occasion({"t": HOSTILE}))
    person = Person(served)
    page = await person.page("/sources")
    check_harmless(page)
    address = f"/sources/{quote(name, safe='')}"
    assert set(addresses(page, "/sources/")) == {address, "/sources/new"}

    own = await person.page(address)
    check_harmless(own)
    assert "event: gone" not in await live_part(served, person, own)
    tried = await person.submit(
        f"{address}/try",
        {
            "definition": "kind: schedule\nevery_sec: 60\nidempotency: '${event.t}'\n"
            "template: {task: {type: x, title: '${event.t}'}}",
            "event": json.dumps({"t": HOSTILE}),
        },
    )
    assert tried.status == 200
    check_harmless(tried.body.decode())
    check_harmless(await person.act(f"{address}/pause"))
    assert not (await engine.sources.get(name)).is_enabled


async def test_a_source_is_created_after_a_dry_run_by_keyboard(served: Served, tab: Visitor) -> None:
    page = await tab.open("/sources/new")
    await page.get_by_label("Name").fill("weekly")
    await page.get_by_role("button", name="Try it").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("no condition: every event fires")).to_be_visible()
    await expect(page.get_by_label("Name")).to_have_value("weekly")
    await page.get_by_role("button", name="Create").focus()
    await page.keyboard.press("Enter")
    await page.get_by_label("Your name").fill("Ann")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="weekly")).to_be_visible()
    await scripts_run(page)
    await page.get_by_role("button", name="Fire now").focus()
    await page.keyboard.press("Enter")
    await page.get_by_role("dialog").get_by_role("button", name="Fire now").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("status").filter(has_text="It fired: created, 1 task.")).to_be_visible()

    # The page follows what others do.
    await served.service.engine.firings.fire("weekly", by_hand=True)
    await expect(page.locator("#live tbody tr")).to_have_count(2)
