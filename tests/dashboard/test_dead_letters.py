"""Dead letters: groups, decisions about one and about many, edit and retry."""

import asyncio
import html
import re
from typing import Any

from playwright.async_api import expect

from lineshaft.dashboard.spec_compare import differences, merge_patch
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import DeadLetterFilter, Scope, TaskFilter
from tests.dashboard.conftest import Served, Visitor, scripts_run
from tests.dashboard.forms import NAME, Person, text_of
from tests.dashboard.records import addresses
from tests.world import Actions, record_step, ref

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m <img src=x onerror=alert(1)>"


async def kill(
    served: Served, *tasks: NewTask, error: str = "site {n} answered 403", step: str = ""
) -> list[str]:
    """Submit tasks and make them dead letters, the last one newest."""
    actions = Actions(served.service.engine)
    agent = await actions.agent("worker")
    dead = []
    for number, task in enumerate(tasks):
        await actions.submit(task)
        claimed = await actions.take(agent)
        if step:
            await record_step(actions.engine, ref(claimed), step, b"1")
        failed = await actions.fail(
            claimed, error.format(n=number), category="auth_failure", traceback="Traceback\n  line 1"
        )
        assert failed is Status.DEAD_LETTERED
        dead.append(claimed.id)
    return dead


async def some(served: Served, count: int = 3, **options: Any) -> list[str]:
    tasks = [NewTask("fetch", title=f"Page {n}", spec={"n": n, "same": True}) for n in range(count)]
    return await kill(served, *tasks, **options)


async def statuses(served: Served, ids: list[str]) -> list[str]:
    return [task.status.value for task in await served.service.engine.read.tasks_by_id(ids)]


def hidden_fields(page: str) -> dict[str, list[str]]:
    """Of the form that decides about many."""
    form = page.partition('action="/dead-letters/decide"')[2].partition("</form>")[0]
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form):
        found.setdefault(name, []).append(html.unescape(value))
    # A new session has another token, which the visitor knows.
    del found["csrf"]
    return found


ESCALATED = "/dead-letters?tab=escalated"
GROUP = "/dead-letters/group?pattern=site+%3Cn%3E+answered+%3Cn%3E"
DECIDE = GROUP.replace("group?", "decide?resolution={}&")


async def test_groups_are_listed_with_filters_and_open_into_what_differs(served: Served) -> None:
    person = Person(served)
    assert "No open dead letters" in text_of(await person.page("/dead-letters"))
    await some(served)
    await kill(served, NewTask("review"), error="token expired")

    page = text_of(await person.page("/dead-letters"))
    assert "4 open dead letters in 2 groups" in page
    assert page.index("site <n> answered <n>") < page.index("token expired"), "the largest first"
    newest = text_of(await person.page("/dead-letters?order=newest"))
    assert newest.index("token expired") < newest.index("site <n> answered <n>")
    filtered = text_of(await person.page("/dead-letters?type=review"))
    assert "token expired" in filtered
    assert "site <n>" not in filtered
    assert "No open dead letters of type nothing" in text_of(await person.page("/dead-letters?type=nothing"))

    group = text_of(await person.page(GROUP))
    assert "3 open dead letters" in group
    assert "site 2 answered 403" in group, "the newest in full"
    assert "Traceback line 1" in group
    assert "/spec/n" in group
    assert "/spec/same" not in group, "only what differs"
    assert "No open dead letter has this error" in text_of(await person.page("/dead-letters/group?pattern=x"))


async def test_one_letter_is_retried_with_a_note_a_delay_and_forgotten_steps(served: Served) -> None:
    (task_id,) = await some(served, 1, step="search")
    person = Person(served)
    assert "search" in await person.page(f"/dead-letters/{task_id}")

    page = text_of(
        await person.act(
            f"/dead-letters/{task_id}/resolve",
            {"resolution": "retry", "reason": "it is back", "delay_min": "60", "forget": "search"},
        )
    )

    assert f"Decided: retry by {NAME}" in page
    assert "it is back" in page
    assert "not before" in page
    assert await statuses(served, [task_id]) == ["PENDING"]
    assert await served.service.engine.read.steps(task_id) == {}
    # The second decision comes too late, and its maker learns whose was first.
    late = await person.submit(f"/dead-letters/{task_id}/resolve", {"resolution": "cancel"})
    assert late.status == 409
    assert f"{NAME} decided retry" in text_of(late.body.decode())
    assert (await person.submit(f"/dead-letters/{task_id}/resolve", {"resolution": "guess"})).status == 422


async def test_of_two_people_who_decide_at_once_one_wins(served: Served) -> None:
    (task_id,) = await some(served, 1)
    people = [Person(served), Person(served)]
    for person in people:
        await person.page(f"/dead-letters/{task_id}")

    replies = await asyncio.gather(
        *(person.submit(f"/dead-letters/{task_id}/resolve", {"resolution": "retry"}) for person in people)
    )

    assert sorted(reply.status for reply in replies) == [303, 409]
    assert await statuses(served, [task_id]) == ["READY"]
    assert len((await served.service.engine.dead_letters.get(task_id)).reviews) == 1


async def test_a_spec_is_edited_shown_as_a_diff_and_then_sent(served: Served) -> None:
    (task_id,) = await some(served, 1)
    person = Person(served)
    address = f"/dead-letters/{task_id}/edit"
    assert "&#34;same&#34;: true" in await person.page(address)

    broken = await person.submit(address, {"spec": '{"n": 7,', "revival": "0", "step": "send"})
    assert broken.status == 422
    assert "must be JSON" in text_of(broken.body.decode())
    assert "{&#34;n&#34;: 7,</textarea>" in broken.body.decode(), "the text is kept"
    listed = await person.submit(address, {"spec": "[1]", "revival": "0", "step": "send"})
    assert "must be a JSON object" in text_of(listed.body.decode())

    fields = {"spec": '{"n": 7, "new": [1]}', "revival": "0", "reason": "wrong page"}
    checked = text_of((await person.submit(address, fields | {"step": "check"})).body.decode())
    assert "/n 0 7 /new (missing) [1] /same true (removed)" in checked
    assert await statuses(served, [task_id]) == ["DEAD_LETTERED"], "nothing was sent yet"
    stale = await person.submit(address, fields | {"step": "send", "revival": "9"})
    assert stale.status == 409

    unseen = await person.submit(address, fields | {"step": "send", "checked": "another text"})
    assert "Your change" in text_of(unseen.body.decode()), "it was edited after it was shown"
    assert await statuses(served, [task_id]) == ["DEAD_LETTERED"]
    fields |= {"checked": re.findall(r'name="checked" value="(\w+)"', unseen.body.decode())[0]}

    page = text_of(await person.act(address, fields | {"step": "send"}))

    assert "Changed 3 places of the spec and retried." in page
    assert "wrong page" in page
    (task,) = await served.service.engine.read.tasks_by_id([task_id])
    assert (task.status, task.spec) == (Status.READY, {"n": 7, "new": [1]})
    assert "already decided" in text_of(await person.page(address))


async def test_a_whole_group_is_counted_first_tried_with_one_and_then_decided(served: Served) -> None:
    ids = await some(served, 4)
    (other,) = await kill(served, NewTask("review"), error="token expired")
    person = Person(served)
    page = await person.page(DECIDE.format("retry"))
    assert "4 open dead letters match now" in text_of(page)
    fields = hidden_fields(page)
    assert fields["count"] == ["4"]

    tried = text_of(await person.act("/dead-letters/decide", fields | {"step": "one", "reason": "a try"}))

    assert "Retried 1. 3 wait for a decision." in tried
    assert "You tried one first" in tried
    assert await statuses(served, ids) == ["DEAD_LETTERED"] * 3 + ["READY"], "the newest"
    rest = hidden_fields(await person.page(person.path))
    done = text_of(await person.act("/dead-letters/decide", rest | {"step": "all", "reason": "works"}))
    assert "Retried 3." in done
    assert await statuses(served, [*ids, other]) == ["READY"] * 4 + ["DEAD_LETTERED"]
    letter = await served.service.engine.dead_letters.get(ids[0])
    assert (letter.reviewer, letter.note) == (NAME, "works")


async def test_what_is_retried_behind_an_open_breaker_says_so_and_offers_a_reset(served: Served) -> None:
    await some(served, 2)
    engine, person = served.service.engine, Person(served)
    (type_,) = {task.type for task in (await engine.read.tasks(TaskFilter())).items}
    await engine.breakers.open(type_)
    fields = hidden_fields(await person.page(DECIDE.format("retry")))

    done = text_of(await person.act("/dead-letters/decide", fields | {"step": "all", "reason": "fixed"}))

    assert f"Retried 2. The breaker of {type_} is open: they wait for its next probe" in done
    assert "Reset the breaker" in done
    await person.act(f"/guards/breakers/reset:{type_}", {"reason": "fixed"})
    assert "is open" not in text_of(await person.page("/dead-letters"))


async def test_a_decision_is_about_at_most_as_many_as_were_announced(served: Served) -> None:
    ids = await some(served, 2)
    person = Person(served)
    fields = hidden_fields(await person.page(DECIDE.format("cancel")))
    ids += await some(served, 2)

    page = text_of(await person.act("/dead-letters/decide", fields | {"step": "all"}))

    assert "Cancelled 2. 2 wait for a decision." in page
    assert sorted(await statuses(served, ids)) == ["CANCELLED"] * 2 + ["DEAD_LETTERED"] * 2


async def test_a_selection_is_decided_and_what_another_person_decided_is_said(served: Served) -> None:
    ids = await some(served, 3)
    person = Person(served)
    chosen = "&".join(f"task={task_id}" for task_id in ids[:2])
    fields = hidden_fields(await person.page(f"/dead-letters/decide?resolution=delete&{chosen}"))
    assert fields["task"] == ids[:2]
    await served.service.engine.dead_letters.resolve(
        ids[0], ResolutionRequest(resolution="retry", reviewer="ann")
    )

    page = text_of(await person.act("/dead-letters/decide", fields | {"step": "all"}))

    assert "Deleted 1. 1 had already been decided by ann (retry)." in page
    assert await statuses(served, ids) == ["READY", "CANCELLED", "DEAD_LETTERED"]
    nothing = text_of(await person.page(f"/dead-letters/decide?resolution=delete&{chosen}"))
    assert "Nothing is left to decide here" in nothing


async def test_one_change_is_applied_to_the_specs_of_a_whole_group(served: Served) -> None:
    ids = await some(served, 3)
    person = Person(served)
    fields = hidden_fields(await person.page(DECIDE.format("modify_and_retry"))) | {
        "patch": '{"same": null, "m": 2}'
    }
    checked = await person.submit("/dead-letters/decide", fields | {"step": "check"})
    assert text_of(checked.body.decode()).count("/m (missing) 2 /same true (removed)") == 3
    unseen = await person.submit("/dead-letters/decide", fields | {"step": "all"})
    assert unseen.status == 200
    assert await statuses(served, ids) == ["DEAD_LETTERED"] * 3, "it was not shown before"
    fields |= {"checked": re.findall(r'name="checked" value="(\w+)"', unseen.body.decode())}
    wrong = await person.submit("/dead-letters/decide", fields | {"patch": "[]", "step": "all"})
    assert wrong.status == 422

    page = text_of(await person.act("/dead-letters/decide", fields | {"step": "all"}))

    assert "Changed and retried 3." in page
    tasks = await served.service.engine.read.tasks_by_id(ids)
    assert [task.spec for task in tasks] == [{"n": n, "m": 2} for n in range(3)]


async def test_escalated_letters_wait_in_their_own_list(served: Served) -> None:
    ids = await some(served, 1)
    person = Person(served)
    await person.page(f"/dead-letters/{ids[0]}")
    await person.act(f"/dead-letters/{ids[0]}/resolve", {"resolution": "escalate", "reason": "not mine"})

    assert "No open dead letters" in text_of(await person.page("/dead-letters"))
    assert "Page 0" in text_of(await person.page("/dead-letters?tab=escalated"))
    assert "not mine" in text_of(await person.page("/dead-letters?tab=decided"))
    await person.act(f"/dead-letters/{ids[0]}/resolve", {"resolution": "retry"})
    assert await statuses(served, ids) == ["READY"]


async def test_escalated_letters_are_decided_about_together_after_their_number_was_shown(
    served: Served,
) -> None:
    ids = await some(served, 4)
    (other,) = await kill(served, NewTask("review"), error="token expired")
    letters = served.service.engine.dead_letters
    for task_id in (*ids[:3], other):
        await letters.resolve(task_id, ResolutionRequest(resolution="escalate", reviewer="ann"))
    person = Person(served)
    page = await person.page(ESCALATED)
    assert "4 escalated dead letters wait for a decision." in text_of(page)
    assert page.count('name="task" value="') == 4
    decide = set(addresses(page, "/dead-letters/decide?"))
    words = ("retry", "modify_and_retry", "cancel", "delete")
    assert decide == {f"/dead-letters/decide?resolution={word}&escalated=yes" for word in words}

    # One of the chosen ones, and then the rest, of which another person decides about one.
    chosen = await person.page(f"/dead-letters/decide?resolution=cancel&task={other}&task={ids[0]}")
    assert "2 open dead letters match now" in text_of(chosen)
    await person.act("/dead-letters/decide", hidden_fields(chosen) | {"task": [other], "step": "all"})
    shown = await person.page("/dead-letters/decide?resolution=retry&escalated=yes")
    assert "Retry escalated dead letters" in text_of(shown)
    assert "3 escalated dead letters match now" in text_of(shown)
    await letters.resolve(ids[0], ResolutionRequest(resolution="cancel", reviewer="bob"))
    fields = hidden_fields(shown)
    tried = text_of(await person.act("/dead-letters/decide", fields | {"step": "one"}))
    assert "Retried 1. 1 waits for a decision." in tried
    assert "Retried 1." in await person.act("/dead-letters/decide", fields | {"step": "all"})
    assert await statuses(served, [*ids, other]) == [
        "CANCELLED",
        "READY",
        "READY",
        "DEAD_LETTERED",
        "CANCELLED",
    ]
    assert "No escalated dead letters" in text_of(await person.page(ESCALATED))


async def test_a_reader_sees_letters_and_no_buttons(served: Served) -> None:
    (task_id,) = await some(served, 1)
    token = (await served.service.tokens.create("reader", Scope.READ)).token
    person = Person(served)
    await person.log_in(token)

    (escalated,) = await some(served, 1)
    decision = ResolutionRequest(resolution="escalate", reviewer="ann")
    await served.service.engine.dead_letters.resolve(escalated, decision)
    for path in (GROUP, ESCALATED, f"/dead-letters/{task_id}"):
        page = await person.page(path)
        assert "Retry" not in text_of(page)
        assert "data-select" not in page
    assert (await person.get(DECIDE.format("retry"))).status == 403
    assert (await person.get(f"/dead-letters/{task_id}/edit")).status == 403
    assert (await person.submit(f"/dead-letters/{task_id}/resolve", {"resolution": "retry"})).status == 403
    assert await statuses(served, [task_id]) == ["DEAD_LETTERED"]


async def test_hostile_letters_are_harmless(served: Served) -> None:
    spec = {"<b>": HOSTILE, "long": "x" * 100_000}
    (task_id,) = await kill(served, NewTask("odd", title=HOSTILE, spec=spec), error=HOSTILE + "y" * 50_000)
    person = Person(served)
    pattern = (await served.service.engine.dead_letters.get(task_id)).pattern
    group = DeadLetterFilter(pattern=pattern)
    assert await served.service.engine.dead_letters.count_open(group) == 1

    listed = await person.page("/dead-letters")
    address = re.findall(r'class="pattern" href="([^"]+)"', listed)[0].replace("&amp;", "&")
    paths = [address, address.replace("group?", "decide?resolution=retry&")]
    for path in (*paths, f"/dead-letters/{task_id}", f"/dead-letters/{task_id}/edit"):
        page = await person.page(path)
        assert "<script>alert" not in page, path
        assert "<img src=x" not in page, path
        assert not {"\u202e", "\x1b"} & {*text_of(page)}, path
    editor = await person.page(f"/dead-letters/{task_id}/edit")
    text = re.findall(r"(?s)<textarea[^>]*>(.*?)</textarea>", editor)[0]
    assert "\\u202e" in text, "escaped, and the same when it is sent"


async def test_reads_for_the_page_count_open_letters_and_recent_hours(served: Served) -> None:
    ids = await some(served, 3)
    letters = served.service.engine.dead_letters
    (group,) = await letters.groups()

    recent = await letters.recent([group.pattern, "no such"])
    assert recent[group.pattern] == [0] * 23 + [3]
    assert sum(recent["no such"]) == 0
    assert (await letters.recent([group.pattern], types=["other"]))[group.pattern] == [0] * 24
    await letters.resolve(ids[0], ResolutionRequest(resolution="escalate", reviewer="ann"))
    assert await letters.count_open(DeadLetterFilter()) == 3, "an escalated one is open"
    assert await letters.count_open(DeadLetterFilter(reviewed=False)) == 2


def test_specs_are_compared_place_by_place() -> None:
    specs: list[dict[str, Any]] = [
        {"a": {"b": 1, "c": [1]}, "x/y": True},
        {"a": {"b": 2, "c": [1]}},
        {"a": {"b": 1, "c": [1]}, "x/y": 1},
    ]

    found = differences(specs)

    assert [(one.path, one.values, one.others) for one in found] == [
        ("/a/b", [("1", 2), ("2", 1)], 0),
        ("/x~1y", [("true", 1), ("(missing)", 1), ("1", 1)], 0),
    ]
    assert differences(specs[:1]) == []


def test_a_merge_patch_changes_what_it_names() -> None:
    before = {"a": {"b": 1, "c": 2}, "d": [1]}

    assert merge_patch(before, {"a": {"b": None, "e": {"f": None}}, "d": {"g": 1}}) == {
        "a": {"c": 2, "e": {}},
        "d": {"g": 1},
    }
    assert before == {"a": {"b": 1, "c": 2}, "d": [1]}, "a copy"


async def test_a_person_selects_rows_decides_and_sees_new_letters_arrive(
    served: Served, tab: Visitor
) -> None:
    ids = await some(served, 3)
    page = await tab.open("/dead-letters")
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="What differs")).to_be_visible()
    await scripts_run(page)
    await page.locator("input[data-select]").nth(0).click()
    await page.locator("input[data-select]").nth(1).click(modifiers=["Shift"])
    await expect(page.locator("[data-selected-count]")).to_have_text("2")
    await page.get_by_role("button", name="Retry…", exact=True).click()
    await page.get_by_label("Reason").fill("again")
    await page.get_by_role("button", name="Retry 2 dead letters").click()
    await page.get_by_label("Your name").fill("Bea")
    await page.keyboard.press("Enter")
    await expect(page.locator(".message")).to_contain_text("Retried 2.")
    assert await statuses(served, ids) == ["DEAD_LETTERED", "READY", "READY"]

    # The list moves while it is open.
    await expect(page.locator("#live")).to_contain_text("1 open dead letter")
    await kill_other(served)
    await expect(page.locator("#live")).to_contain_text("2 open dead letters in 2 groups")

    # The editor says at once what is wrong with the JSON; the dialog decides about one.
    await page.goto(f"{tab.address}/dead-letters/{ids[0]}/edit")
    await page.get_by_label("Spec as JSON").fill("{")
    await expect(page.locator("[data-json-note]")).to_contain_text("JSON")
    await expect(page.get_by_label("Spec as JSON")).to_have_attribute("aria-invalid", "true")
    await page.goto(f"{tab.address}/dead-letters/{ids[0]}")
    await page.get_by_role("button", name="Cancel", exact=True).focus()
    await page.keyboard.press("Enter")
    await page.get_by_role("dialog").get_by_label("Reason").fill("obsolete")
    await page.keyboard.press("Enter")
    await expect(page.locator("#decided")).to_contain_text("cancel by Bea")


async def kill_other(served: Served) -> None:
    actions = Actions(served.service.engine)
    await actions.submit(NewTask("review"))
    claimed = await actions.take(await actions.agent("other"), types=["review"])
    await actions.fail(claimed, "token expired", category="auth_failure")
