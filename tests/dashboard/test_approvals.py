"""Approvals: the inbox, outputs that are approved, tasks that a person answers with a form."""

import asyncio
import re
from typing import Any

from playwright.async_api import expect

from lineshaft.model.states import Status
from lineshaft.model.tasks import Gate, NewTask, OutputContract
from lineshaft.types import ApprovalDecision, Scope
from tests.dashboard.conftest import Served, Visitor, scripts_run
from tests.dashboard.forms import NAME, Person, text_of
from tests.world import Actions

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m <img src=x onerror=alert(1)>"
CRITERIA = {"ask": "Would you publish this?"}
FORM = {
    "type": "object",
    "required": ["vendor", "amount", "paid"],
    "properties": {
        "vendor": {"type": "string", "minLength": 2, "description": "As on the invoice."},
        "amount": {"type": "number", "maximum": 100},
        "paid": {"type": "boolean"},
        "terms": {"enum": ["monthly", "yearly"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"city": {"type": "string"}}},
        "extra": {"type": "object"},
    },
}


async def at_the_gate(served: Served, output: Any = None, **fields: Any) -> str:
    """A task whose output waits for a person."""
    actions = Actions(served.service.engine)
    contract = OutputContract(validation=(Gate("human", CRITERIA),))
    task_id = await actions.one("draft", output=contract, **fields)
    claimed = await actions.take(await actions.agent("writer"), types=["draft"])
    assert await actions.complete(claimed, output or {"text": "A draft."}, "0.5") is Status.VALIDATING
    return task_id


async def for_a_person(served: Served, schema: Any = FORM, **fields: Any) -> str:
    contract = OutputContract(validation="json-schema", validation_schema=schema) if schema else None
    options = {"output": contract} if contract else {}
    return await Actions(served.service.engine).one(
        "errand", **({"required_capabilities": ["human"], "title": "Sign it"} | options | fields)
    )


async def status(served: Served, task_id: str) -> str:
    return (await served.service.engine.read.task(task_id)).status.value


async def test_the_inbox_says_what_waits_how_long_and_what_it_holds_up(served: Served) -> None:
    person = Person(served)
    assert "Nothing waits for a person" in text_of(await person.page("/approvals"))
    first = await at_the_gate(served, title="Newsletter")
    await for_a_person(served)
    actions = Actions(served.service.engine)
    await actions.submit(NewTask("send", depends_on=[first]), NewTask("count", depends_on=[first]))

    page = text_of(await person.page("/approvals"))

    assert page.index("Newsletter") < page.index("Sign it"), "the longest waiting first"
    assert "approve an output draft" in page
    assert "do a task errand" in page
    assert "$0.50 2 tasks" in page


async def test_an_output_is_approved_and_the_next_item_opens(served: Served) -> None:
    first = await at_the_gate(served, title="Newsletter")
    second = await at_the_gate(served, title="Report")
    person = Person(served)
    page = text_of(await person.page(f"/approvals/{first}"))
    assert "A draft." in page
    assert "Would you publish this?" in page

    following = text_of(await person.act(f"/approvals/{first}", {"decision": "approve", "note": "good"}))

    assert f"Approved by {NAME}: Newsletter. This is the next one." in following
    assert person.path == f"/approvals/{second}"
    assert await status(served, first) == "COMPLETED"
    last = text_of(await person.act(f"/approvals/{second}", {"decision": "reject", "note": "too vague"}))
    assert "Nothing else waits for a person." in last
    task = await served.service.engine.read.task(second)
    assert task.status is Status.RETRYING
    assert task.failure_reason == f"human: rejected by {NAME}: too vague"
    decided = text_of(await person.page(f"/approvals/{second}"))
    assert f"{NAME} rejected it" in decided
    assert (await person.submit(f"/approvals/{first}", {"decision": "maybe"})).status == 422


async def test_a_form_becomes_typed_json_and_the_output_of_the_task(served: Served) -> None:
    task_id = await for_a_person(served)
    person = Person(served)
    page = await person.page(f"/approvals/{task_id}")
    assert "As on the invoice." in page
    assert 'type="number"' in page

    entered = {
        "data/vendor": "Acme",
        "data/amount": "12.5",
        "data/paid": "false",
        "data/terms": '"yearly"',
        "data/tags": "a\nb",
        "data/address/city": "Bern",
        "data/extra": '{"deep": [1]}',
        "decision": "approve",
    }
    await person.act(f"/approvals/{task_id}", entered)

    task = await served.service.engine.read.task(task_id)
    assert task.status is Status.COMPLETED
    assert task.output.data == {
        "vendor": "Acme",
        "amount": 12.5,
        "paid": False,
        "terms": "yearly",
        "tags": ["a", "b"],
        "address": {"city": "Bern"},
        "extra": {"deep": [1]},
    }
    assert f"{NAME} approved it" in text_of(await person.page(f"/approvals/{task_id}"))


async def test_a_form_has_the_order_of_its_schema(served: Served) -> None:
    """Which the database doesn't keep."""
    names = ["verdict", "zeal", "by", "a_long_remark", "ok"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": ["ok"],
    }
    task = await served.client.submit(
        "ask",
        required_capabilities=["human"],
        output={"validation": "json-schema", "validation_schema": schema},
    )

    page = await Person(served).page(f"/approvals/{task['id']}")

    assert re.findall(r"<label for=[^>]*>(?:<bdi>)?(verdict|zeal|by|a_long_remark|ok)\b", page) == names
    read = (await served.client.get(f"/v1/tasks/{task['id']}")).json["output"]["validation_schema"]
    assert (read, list(read["properties"])) == (schema, names), "as it was submitted"


async def test_what_is_wrong_is_said_at_the_field_and_what_was_entered_is_kept(served: Served) -> None:
    task_id = await for_a_person(served)
    person = Person(served)
    await person.page(f"/approvals/{task_id}")
    entered = {"data/vendor": "A", "data/amount": "much", "data/tags": "keep me", "note": "my note"}

    unread = await person.submit(f"/approvals/{task_id}", entered | {"decision": "approve"})
    assert unread.status == 422
    assert fault(unread.body.decode(), "data/amount") == "must be a number, got 'much'"
    assert fault(unread.body.decode(), "data/paid") == "is required"
    for kept in ('value="A"', 'value="much"', ">keep me</textarea>", ">my note</textarea>"):
        assert kept in unread.body.decode()

    refused = await person.submit(
        f"/approvals/{task_id}", entered | {"data/amount": "101", "data/paid": "true", "decision": "approve"}
    )
    assert refused.status == 422
    assert fault(refused.body.decode(), "data/vendor") == '"A" is shorter than 2 characters'
    assert fault(refused.body.decode(), "data/amount") == "101 is greater than the maximum of 100"
    assert await status(served, task_id) == "READY"


def fault(page: str, name: str) -> str:
    """What the page says beside a field."""
    part = page.partition(f'name="{name}"')[2].partition('<div class="field')[0]
    return text_of("<main>" + "".join(re.findall(r'class="fault"[^>]*>(.*?)</p>', part)))[1:].strip()


async def test_any_answer_can_be_written_as_json_and_a_task_can_be_declined(served: Served) -> None:
    task_id, other = await for_a_person(served), await for_a_person(served, schema=None)
    person = Person(served)
    page = await person.page(f"/approvals/{task_id}?as=json")
    assert 'name="data"' in page
    broken = await person.submit(f"/approvals/{task_id}", {"as": "json", "data": "{", "decision": "approve"})
    assert "must be JSON" in text_of(broken.body.decode())

    answer = '{"vendor": "Acme", "amount": 1, "paid": true}'
    await person.act(f"/approvals/{task_id}", {"as": "json", "data": answer, "decision": "approve"})
    await person.act(f"/approvals/{other}", {"decision": "reject", "note": "can't"})

    task = await served.service.engine.read.task(task_id)
    assert task.output.data == {"vendor": "Acme", "amount": 1, "paid": True}
    assert await status(served, other) == "DEAD_LETTERED"


async def test_a_required_report_is_part_of_the_form(served: Served) -> None:
    contract = OutputContract(validation="none", require_decision_report=True)
    task_id = await for_a_person(served, schema=None, output=contract)
    person = Person(served)
    await person.page(f"/approvals/{task_id}")
    without = await person.submit(f"/approvals/{task_id}", {"data": "1", "decision": "approve"})
    assert without.status == 422
    assert "decision_report is missing" in text_of(without.body.decode())

    report = {"report_why": "asked", "report_what": "signed", "report_tradeoffs": "none"}
    await person.act(f"/approvals/{task_id}", {"data": "1", "decision": "approve", **report})

    task = await served.service.engine.read.task(task_id)
    assert task.output.decision_report == {"why": "asked", "what": "signed", "tradeoffs": "none"}


async def test_a_decision_that_comes_too_late_names_who_was_first(served: Served) -> None:
    gated, errand = await at_the_gate(served), await for_a_person(served, schema=None)
    person = Person(served)
    for task_id in (gated, errand):
        await person.page(f"/approvals/{task_id}")
        data = None if task_id == gated else b"1"
        await served.service.engine.approvals.decide(
            task_id, ApprovalDecision(approve=True, reviewer="ann", data=data)
        )

        late = await person.submit(f"/approvals/{task_id}", {"decision": "reject"})

        assert late.status == 409
        page = text_of(late.body.decode())
        assert "Your decision came too late. ann approved it at 2" in page
        assert "Your decision f goes here" not in page, "there is no form any more"
        assert await status(served, task_id) == "COMPLETED"


async def test_of_two_people_who_decide_at_once_one_wins(served: Served) -> None:
    people = [Person(served), Person(served)]
    for task_id in (await at_the_gate(served), await for_a_person(served, schema=None)):
        for person in people:
            await person.page(f"/approvals/{task_id}")

        replies = await asyncio.gather(
            *(
                person.submit(f"/approvals/{task_id}", {"decision": "approve", "data": "1"})
                for person in people
            )
        )

        assert sorted(reply.status for reply in replies) == [303, 409]
        assert await status(served, task_id) == "COMPLETED"


async def test_inputs_and_a_large_output_are_shown_beside_the_decision(served: Served) -> None:
    actions = Actions(served.service.engine)
    (above,) = await actions.submit(NewTask("research", title="Facts"))
    await actions.complete(await actions.take(types=["research"]), {"fact": "water is wet"})
    task_id = await at_the_gate(
        served, {"text": "x" * 200_000}, spec={"context_refs": [f"task:{above}:output"]}
    )

    page = text_of(await Person(served).page(f"/approvals/{task_id}"))

    assert "Facts" in page
    assert "water is wet" in page
    assert len(page) < 50_000, "a large output is cut"


async def test_a_reader_may_look_and_not_decide(served: Served) -> None:
    task_id = await at_the_gate(served)
    token = (await served.service.tokens.create("reader", Scope.READ)).token
    person = Person(served)
    await person.log_in(token)

    page = await person.page(f"/approvals/{task_id}")

    assert "A draft." in text_of(page)
    assert "decision-form" not in page
    assert (await person.submit(f"/approvals/{task_id}", {"decision": "approve"})).status == 403
    assert await status(served, task_id) == "VALIDATING"


async def test_hostile_items_are_harmless(served: Served) -> None:
    schema = {
        "required": [HOSTILE],
        "properties": {
            HOSTILE: {"type": "string", "title": HOSTILE, "description": HOSTILE, "default": HOSTILE}
        },
    }
    gated = await at_the_gate(served, {HOSTILE: HOSTILE}, title=HOSTILE, spec={"x": HOSTILE})
    errand = await for_a_person(served, schema, title=HOSTILE)
    person = Person(served)

    for path in ("/approvals", f"/approvals/{gated}", f"/approvals/{errand}"):
        page = await person.page(path)
        assert "<script>alert" not in page, path
        assert "<img src=x" not in page, path
        assert not {"\u202e", "\x1b"} & {*text_of(page)}, path
    await person.act(
        f"/approvals/{errand}", {f"data/{HOSTILE.replace('/', '~1')}": "fine", "decision": "approve"}
    )
    assert (await served.service.engine.read.task(errand)).output.data == {HOSTILE: "fine"}


async def test_approve_and_reject_by_keyboard_and_live(served: Served, tab: Visitor) -> None:
    first = await at_the_gate(served, title="Newsletter")
    page = await tab.open("/approvals")
    second = await for_a_person(served, title="Contract")
    await expect(page.locator("#new-rows")).to_be_visible()
    await page.locator("#new-rows").click()
    await expect(page.locator("tr[data-row]")).to_have_count(2)

    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Newsletter")).to_be_visible()
    await scripts_run(page)
    await page.keyboard.press("f")
    await page.keyboard.type("looks good")
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Approve")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Your name")).to_be_focused()
    await page.keyboard.type("Bea")
    await page.keyboard.press("Enter")
    await expect(page.locator(".message")).to_contain_text("Approved by Bea: Newsletter")
    assert await status(served, first) == "COMPLETED"

    # The next item, a form, is open; the browser holds back what is incomplete, but not a refusal.
    await scripts_run(page)
    await page.keyboard.press("f")
    await expect(page.get_by_label("vendor")).to_be_focused()
    await page.keyboard.type("Acme")
    await page.keyboard.press("Enter")
    assert await status(served, second) == "READY"
    await served.service.engine.approvals.decide(
        second, ApprovalDecision(approve=False, reviewer="ann", note="no")
    )
    await expect(page.locator("#decided")).to_contain_text("ann rejected it")
    await expect(page.get_by_role("button", name="Send the answer")).to_be_disabled()

    third = await for_a_person(served, title="Errand")
    await tab.open(f"/approvals/{third}")
    await page.get_by_label("Note").focus()
    await page.keyboard.press("Tab")
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Decline")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator(".message")).to_contain_text("Rejected by Bea: Errand")
    assert await status(served, third) == "DEAD_LETTERED"
