"""Every action, as a person does it in a real browser: what the person sees, and what it changes."""

import re
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from playwright.async_api import Locator, Page, Request, expect
from starlette.routing import Match, Route

from lineshaft import Lineshaft, TaskHandle
from lineshaft.dashboard.dashboard import Dashboard
from lineshaft.engine.engine import Engine
from lineshaft.model.reviews import Resolution
from lineshaft.types import NewTask, Scope
from lineshaft.types.waits import NewSuspension
from lineshaft.types.work import ClaimRef, Completion, Failure, Spent
from tests.dashboard.addresses import ACTIONS
from tests.dashboard.conftest import Served, Visitor, scripts_run
from tests.dashboard.forms import NAME
from tests.dashboard.sample import Sample, fill, hold

Drive = Callable[["Desk"], Awaitable[None]]
_DRIVES: list[tuple[tuple[str, ...], Drive]] = []


def drives(*routes: str) -> Callable[[Drive], Drive]:
    """A person uses the actions with these addresses. They run in the order in which they stand here."""

    def register(drive: Drive) -> Drive:
        _DRIVES.append((routes, drive))
        return drive

    return register


class Desk:
    """A person at the dashboard of an installation at work."""

    def __init__(
        self, served: Served, tab: Visitor, connection: psycopg.Connection, shaft: Lineshaft, sample: Sample
    ) -> None:
        self.engine: Engine = served.service.engine
        self.tab = tab
        self.page: Page = tab.page
        self.shaft = shaft
        self.sample = sample
        self.connection = connection
        self._routes: list[Route] = [
            route for route in Dashboard(served.service).routes() if "POST" in (route.methods or ())
        ]
        #: Addresses of the actions that the browser has sent a form to.
        self.used: list[str] = []
        #: The newest event that was looked at.
        self._seen = 0
        tab.page.on("request", self._note)

    def _note(self, request: Request) -> None:
        if request.method == "POST":
            path = request.url.removeprefix(self.tab.address).partition("?")[0]
            scope = {"type": "http", "method": "POST", "path": path, "root_path": ""}
            self.used += [route.path for route in self._routes if route.matches(scope)[0] is Match.FULL][:1]

    # What a person does.

    async def ask(self, button: str, within: Locator | None = None) -> Locator:
        """Press a button that opens a dialog."""
        await scripts_run(self.page)
        await (within or self.page.locator("main")).get_by_role("button", name=button, exact=True).click()
        dialog = self.page.locator("dialog[open]")
        await expect(dialog).to_be_visible()
        return dialog

    async def confirm(
        self,
        button: str,
        reason: str | None = None,
        *,
        confirm: str | None = None,
        within: Locator | None = None,
        **fields: str,
    ) -> None:
        """Press a button, fill its dialog and confirm it."""
        await self.send(await self.ask(button, within), confirm or button, reason, **fields)

    async def send(self, dialog: Locator, button: str, reason: str | None = None, **fields: str) -> None:
        """Fill a dialog and confirm it."""
        for name, value in fields.items():
            await dialog.locator(f"[name={name}]").fill(value)
        if reason is not None:
            await dialog.get_by_label("Reason").fill(reason)
        await dialog.get_by_role("button", name=button, exact=True).click()

    async def press(self, button: str) -> None:
        await self.page.locator("main").get_by_role("button", name=button, exact=True).click()

    # What a person sees, and what was done.

    async def sees(self, message: str) -> None:
        """The page says what was done, and no dialog covers it."""
        await expect(self.page.locator("main .message")).to_have_text(message)
        await expect(self.page.locator("dialog[open]")).to_have_count(0)

    def acts(self, kind: str) -> list[dict[str, Any]]:
        """The data of events since the last look."""
        found = self.connection.execute(
            "SELECT data FROM lineshaft.event WHERE %s = ANY (kinds) AND seq > %s ORDER BY seq",
            [kind, self._seen],
        ).fetchall()
        self._seen = self.number("SELECT coalesce(max(seq), 0) FROM lineshaft.event")
        return [data for (data,) in found]

    def acted(self, kind: str, reason: str | None = None, *, times: int = 1, **data: Any) -> None:
        """It was done so many times since the last look, each with the person's name and the reason."""
        expected = {"actor": NAME, "reason": reason, **data}
        found = [{name: (event or {}).get(name) for name in expected} for event in self.acts(kind)]
        assert found == [expected] * times

    def number(self, query: str) -> int:
        found = self.connection.execute(query.encode()).fetchone()
        assert found is not None
        return int(found[0])

    def sessions(self) -> int:
        return self.number("SELECT count(*) FROM lineshaft.session")

    async def status(self, task: str) -> str:
        return (await self.engine.read.task(task)).status

    # What is needed first.

    async def task(self, type_: str, title: str, **fields: Any) -> TaskHandle[Any]:
        return await self.shaft.submit(NewTask(type=type_, title=title, **fields))

    async def hold(self, type_: str) -> list[ClaimRef]:
        return await hold(self.shaft, type_, f"{type_}-agent")

    async def kill(self, type_: str, error: str = "no answer") -> list[str]:
        """What there is of a type fails, and becomes dead letters."""
        claims = await self.hold(type_)
        await self.shaft.backend.fail([Failure(claim, error, "invalid_input") for claim in claims])
        return [claim.id for claim in claims]


# Who acts.


@drives("/login")
async def log_in(desk: Desk) -> None:
    await desk.tab.open("/tasks")
    await desk.page.get_by_label("Token").fill("not a token")
    await desk.page.keyboard.press("Enter")
    await expect(desk.page.get_by_role("alert")).to_contain_text("not a valid token")
    assert desk.sessions() == 0

    made = await desk.engine.tokens.create(NAME, Scope.OPERATE)
    await desk.page.get_by_label("Token").fill(made.token)
    await desk.press("Log in")

    await expect(desk.page).to_have_url(f"{desk.tab.address}/tasks")
    await expect(desk.page.locator("header")).to_contain_text(NAME)
    assert desk.sessions() == 1


# Tasks.


@drives("/tasks/{id}/change")
async def change_a_task(desk: Desk) -> None:
    task = await desk.task("order", "Order paper")
    await desk.tab.open(f"/tasks/{task.id}")
    await desk.confirm("Change…", confirm="Change", priority="3", tags="urgent, office")
    await desk.sees("Changed priority, tags.")
    await expect(desk.page.locator(".tags")).to_contain_text("office")
    found = await task.task()
    assert (found.priority, found.tags) == (3, ["urgent", "office"])
    desk.acted("task.changed")


@drives("/tasks/{id}/signal")
async def send_the_signal_that_a_task_waits_for(desk: Desk) -> None:
    task = await desk.task("countersign", "Sign the order")
    (claim,) = await desk.hold("countersign")
    await desk.shaft.backend.suspend(NewSuspension(claim, "signed", "approved"))
    await desk.tab.open(f"/tasks/{task.id}")
    await expect(desk.page.locator(".why")).to_contain_text("Waits for the signal 'approved'")
    await desk.confirm("Send the signal…", confirm="Send", data='{"by": "ann"}')
    await desk.sees("Sent the signal approved.")
    await expect(desk.page.locator("#signals")).to_contain_text("not yet")
    assert await task.status() == "READY"
    desk.acted("task.signalled", signal="approved")


@drives("/tasks/{id}/cost")
async def correct_the_cost_of_a_task(desk: Desk) -> None:
    task = await desk.task("dear", "Order a gold pen")
    (claim,) = await desk.hold("dear")
    await desk.shaft.backend.complete([Completion(claim, b"1", spent=Spent(Decimal(110)))])
    await desk.tab.open(f"/tasks/{task.id}")
    await desk.confirm("Accept…", "as billed", confirm="Accept $100.00")
    await desk.sees("The cost is $110.00.")
    desk.acted("cost.corrected", "as billed", old=10, new=110)
    await desk.confirm("Correct…", "a typo", confirm="Correct the cost", cost_usd="0.31")
    await desk.sees("The cost is $0.31.")
    assert (await task.task()).cost_usd == Decimal("0.31")
    desk.acted("cost.corrected", "a typo", old=110, new=0.31)


@drives("/tasks/{id}/cancel")
async def cancel_a_task_and_keep_those_that_depend_on_it(desk: Desk) -> None:
    first = await desk.task("order", "Order ink")
    second = await desk.task("order", "Fill the printer", depends_on=[first.id])
    await desk.tab.open(f"/tasks/{first.id}")
    dialog = await desk.ask("Cancel…")
    await dialog.get_by_label("Reason").fill("no printer")
    await dialog.get_by_label("Tasks that depend on it").select_option("stay, and wait until it is retried")
    await dialog.get_by_role("button", name="Cancel the task").click()
    await desk.sees("Cancelled the task.")
    await expect(desk.page.locator(".head .state")).to_have_text("CANCELLED")
    await expect(desk.page.get_by_role("button", name="Cancel…")).to_have_count(0)
    assert [await desk.status(task.id) for task in (first, second)] == ["CANCELLED", "PENDING"]
    desk.acted("task.cancelled", "no printer")


@drives()
async def escape_closes_a_dialog_and_nothing_is_sent(desk: Desk) -> None:
    task = await desk.task("order", "Order glue")
    await desk.tab.open(f"/tasks/{task.id}")
    button = desk.page.get_by_role("button", name="Cancel…")
    await button.focus()
    await desk.page.keyboard.press("Enter")
    dialog = desk.page.get_by_role("dialog")
    await dialog.get_by_label("Reason").fill("by mistake")
    await desk.page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await expect(button).to_be_focused()
    # The same with a button.
    await desk.page.keyboard.press("Enter")
    await desk.page.get_by_role("button", name="Keep as it is").click()
    await expect(dialog).to_have_count(0)
    await expect(button).to_be_focused()
    assert await desk.status(task.id) == "READY"
    assert desk.acts("task.cancelled") == []


@drives("/tasks/{id}/cancel")
async def cancel_a_task_that_was_completed_in_the_meantime(desk: Desk) -> None:
    task = await desk.task("copy", "Copy the minutes")
    (claim,) = await desk.hold("copy")
    await desk.tab.open(f"/tasks/{task.id}")
    dialog = await desk.ask("Cancel…")
    await dialog.get_by_label("Reason").fill("too slow")
    await desk.shaft.backend.complete([Completion(claim, b'{"pages": 2}')])
    await dialog.get_by_role("button", name="Cancel the task").click()
    await expect(desk.page.get_by_role("alert")).to_contain_text("COMPLETED")
    await expect(dialog).to_have_count(0)
    await expect(desk.page.locator(".head .state")).to_have_text("COMPLETED")
    await expect(desk.page.get_by_role("button", name="Cancel…")).to_have_count(0)
    assert await desk.status(task.id) == "COMPLETED"
    assert desk.acts("task.cancelled") == []


@drives("/tasks/{id}/retry")
async def retry_a_task(desk: Desk) -> None:
    task = await desk.task("scan", "Scan the receipts")
    await desk.kill("scan")
    await desk.tab.open(f"/tasks/{task.id}")
    await desk.confirm("Retry", within=desk.page.locator(".head"))
    await desk.sees("Retried: the task is READY.")
    await expect(desk.page.locator(".head .state")).to_have_text("READY")
    assert await desk.status(task.id) == "READY"
    desk.acted("task.resolved")
    # One that waits for its next attempt is due at once.
    (claim,) = await desk.hold("scan")
    await desk.shaft.backend.fail([Failure(claim, "no answer", "timeout")])
    await desk.tab.open(f"/tasks/{task.id}")
    await desk.press("Retry now")
    await desk.sees("Retried: the task is READY.")


@drives("/tasks/{id}/rerun")
async def rerun_a_task(desk: Desk) -> None:
    task = await desk.task("receipts", "Stamp the receipts")
    (claim,) = await desk.hold("receipts")
    await desk.shaft.backend.complete([Completion(claim, b'{"pages": 2}')])
    await desk.tab.open(f"/tasks/{task.id}")
    dialog = await desk.ask("Run again…")
    await dialog.get_by_label("Reason").fill("the scanner was fixed")
    await dialog.get_by_label("Tasks below it that have ended").select_option("yes")
    await dialog.get_by_role("button", name="Run again").click()
    await desk.sees("Runs again: the task is READY.")
    assert await desk.status(task.id) == "READY"
    desk.acted("task.resolved", reason="the scanner was fixed", resolution="rerun")


@drives("/tasks/{id}/resume")
async def resume_the_type_of_a_task(desk: Desk) -> None:
    await desk.shaft.pause("print")
    task = await desk.task("print", "Print the badges")
    await desk.tab.open(f"/tasks/{task.id}")
    await desk.press("Resume print")
    await desk.sees("Resumed type 'print'.")
    assert "print" not in {pause.type for pause in await desk.engine.read.pauses()}
    desk.acted("queue.resumed", type="print")


@drives("/bulk/{verb}")
async def cancel_the_tasks_that_were_selected(desk: Desk) -> None:
    tasks = [await desk.task("pack", f"Pack box {number}") for number in range(3)]
    await desk.tab.open("/tasks?type=pack")
    await desk.page.get_by_label("Select Pack box 0").check()
    await desk.page.get_by_label("Select Pack box 2").check()
    await desk.press("Cancel selected…")
    await desk.page.get_by_label("Reason").fill("no boxes")
    await desk.press("Cancel 2 tasks")
    await desk.sees("Cancelled 2 tasks.")
    assert [await desk.status(task.id) for task in tasks] == ["CANCELLED", "READY", "CANCELLED"]
    desk.acted("task.cancelled", "no boxes", times=2)


@drives("/bulk/{verb}")
async def retry_all_tasks_that_match(desk: Desk) -> None:
    tasks = [await desk.task("label", f"Label box {number}") for number in range(2)]
    await desk.kill("label")
    await desk.tab.open("/tasks?type=label")
    await desk.page.get_by_role("link", name="Retry…").click()
    await desk.press("Retry 2 tasks")
    await desk.sees("Retried 2 tasks.")
    assert [await desk.status(task.id) for task in tasks] == ["READY", "READY"]
    desk.acted("task.resolved", times=2)


# DAGs.


@drives("/dags/{id}/budget")
async def change_the_budget_of_a_dag(desk: Desk) -> None:
    await desk.tab.open(f"/dags/{desk.sample.dag}")
    dialog = await desk.ask("Change budget")
    await dialog.get_by_label("set it").check()
    await desk.send(dialog, "Change budget")
    # It opens again, with what was entered.
    await expect(dialog.get_by_role("alert")).to_contain_text("how much?")
    await expect(dialog.get_by_label("set it")).to_be_checked()
    await desk.send(dialog, "Change budget", usd="25")
    await desk.sees("The budget is changed. Tasks that it can pay for run now.")
    await expect(desk.page.locator("#live")).to_contain_text("of $25.00")
    assert (await desk.engine.read.dag(desk.sample.dag)).budget_ceiling_usd == 25
    desk.acted("dag.changed")


@drives("/dags/{id}/retry", "/dags/{id}/cancel")
async def retry_and_cancel_a_dag(desk: Desk) -> None:
    tasks = [
        NewTask(type="weigh", key="weigh", title="Weigh the parcel"),
        NewTask(type="send", key="send", title="Send the parcel", depends_on=["weigh"]),
    ]
    dag = await desk.shaft.submit_dag("A parcel", tasks)
    (dead,) = await desk.kill("weigh")
    await desk.tab.open(f"/dags/{dag.id}")
    await desk.confirm("Retry 1 failed")
    await desk.sees("Retried 1 failed task; what waits for it follows.")
    assert await desk.status(dead) == "READY"
    desk.acted("task.resolved")
    await desk.confirm("Cancel", "sold out", confirm="Cancel 2 tasks")
    await desk.sees("Cancelled 2 tasks.")
    await expect(desk.page.locator(".head .tag").first).to_have_text("cancelled")
    assert {await desk.status(dag.tasks[key].id) for key in ("weigh", "send")} == {"CANCELLED"}
    desk.acted("task.cancelled", "sold out", times=2)


# Dead letters.


@drives("/dead-letters/{task_id}/resolve")
async def decide_about_dead_letters(desk: Desk) -> None:
    for button, said, status in (
        ("Retry", "Retried", "READY"),
        ("Cancel", "Cancelled", "CANCELLED"),
        ("Delete", "Deleted", "CANCELLED"),
        ("Escalate", "Escalated", "DEAD_LETTERED"),
    ):
        type_ = f"file-{button.lower()}"
        await desk.task(type_, "File a letter")
        (dead,) = await desk.kill(type_)
        await desk.tab.open(f"/dead-letters/{dead}")
        await desk.confirm(button, f"because of {button}")
        await desk.sees(f"{said} by {NAME}.")
        decided = desk.page.locator("#decided")
        await expect(decided).to_contain_text(f"{button.lower()} by {NAME}")
        await expect(decided).to_contain_text(f"because of {button}")
        assert await desk.status(dead) == status
        found = await desk.engine.dead_letters.get(dead)
        assert (found.resolution, found.reviewer, found.note) == (
            button.lower(),
            NAME,
            f"because of {button}",
        )
        note, cancelled = f"because of {button}", status == "CANCELLED"
        desk.acted("task.resolved", note if cancelled else None, resolution=button.lower(), note=note)


@drives("/dead-letters/{task_id}/edit")
async def edit_and_retry_a_dead_letter(desk: Desk) -> None:
    await desk.task("stamp", "Stamp the letter", spec={"cents": 85})
    (dead,) = await desk.kill("stamp")
    await desk.tab.open(f"/dead-letters/{dead}")
    await desk.page.get_by_role("link", name="Edit and retry…").click()
    await desk.page.get_by_label("Spec as JSON").fill('{"cents": 95}')
    await desk.page.get_by_label("Reason").fill("postage went up")
    await desk.press("Show the change")
    await expect(desk.page.locator("table.changes")).to_contain_text("95")
    assert await desk.status(dead) == "DEAD_LETTERED"
    await desk.press("Change and retry")
    await desk.sees("Changed 1 place of the spec and retried.")
    found = await desk.engine.read.task(dead)
    assert (found.status, found.spec) == ("READY", {"cents": 95})
    desk.acted("task.resolved", resolution="modify_and_retry", note="postage went up", changed=["/cents"])


@drives("/dead-letters/decide")
async def decide_about_a_group_of_dead_letters(desk: Desk) -> None:
    for number in range(3):
        await desk.task("shelve", f"Shelve book {number}")
    dead = await desk.kill("shelve", "shelf 7 is full")
    await desk.tab.open("/dead-letters")
    await desk.page.get_by_role("link", name=re.compile("shelf")).click()
    await expect(desk.page.get_by_label("Select Shelve book 0")).to_be_visible()
    await scripts_run(desk.page)
    await desk.page.get_by_label("Select Shelve book 0").check()
    await desk.page.get_by_label("Select Shelve book 1").check()
    await desk.page.get_by_role("button", name="Escalate…").click()
    # By its role: dialogs that are closed have such a field too.
    await desk.page.get_by_role("textbox", name="Reason").fill("needs a carpenter")
    await desk.press("Escalate 2 dead letters")
    await desk.sees("Escalated 2.")
    found = [await desk.engine.dead_letters.get(each) for each in sorted(dead)]
    assert [(each.resolution, each.note) for each in found] == [
        ("escalate", "needs a carpenter"),
        ("escalate", "needs a carpenter"),
        (None, None),
    ]
    desk.acted("task.resolved", times=2, resolution="escalate", note="needs a carpenter")


@drives("/dead-letters/{task_id}/resolve")
async def decide_about_a_dead_letter_that_another_person_decided_about(desk: Desk) -> None:
    await desk.task("fold", "Fold the map")
    (dead,) = await desk.kill("fold")
    await desk.tab.open(f"/dead-letters/{dead}")
    dialog = await desk.ask("Delete")
    await desk.shaft.resolve(dead, Resolution.RETRY, reviewer="Another Person")
    await dialog.get_by_role("button", name="Delete").click()
    await expect(desk.page.get_by_role("alert")).to_contain_text("Another Person")
    await expect(dialog).to_have_count(0)
    assert await desk.status(dead) == "READY"


# Approvals.


@drives("/approvals/{task_id}")
async def approve_an_output(desk: Desk) -> None:
    await desk.tab.open("/approvals")
    await desk.page.get_by_role("link", name="Write about the market").click()
    await desk.page.get_by_label("Note").fill("well written")
    await desk.press("Approve")
    await desk.sees(f"Approved by {NAME}: Write about the market. This is the next one.")
    assert await desk.status(desk.sample.to_approve) == "COMPLETED"
    desk.acted("approval.decided", approve=True, note="well written")


@drives("/approvals/{task_id}")
async def answer_a_task(desk: Desk) -> None:
    await desk.tab.open(f"/approvals/{desk.sample.for_person}")
    form = desk.page.locator("#decision-form")
    await form.get_by_label("title").fill("A good quarter")
    await form.get_by_label("publish").select_option("yes")
    await form.get_by_label("audience").select_option("staff")
    await desk.press("Send the answer")
    await desk.sees(f"Approved by {NAME}: Choose the headline. Nothing else waits for a person.")
    found = await desk.engine.read.task(desk.sample.for_person)
    assert found.status == "COMPLETED"
    assert found.output.data == {"title": "A good quarter", "publish": True, "audience": "staff"}
    desk.acted("approval.decided", approve=True)


@drives("/approvals/{task_id}")
async def decline_a_task(desk: Desk) -> None:
    task = await desk.task("ask", "Choose a colour", required_capabilities=["human"])
    await desk.tab.open(f"/approvals/{task.id}")
    await desk.page.get_by_label("Note").fill("there is only grey")
    await desk.press("Decline")
    await desk.sees(f"Rejected by {NAME}: Choose a colour. Nothing else waits for a person.")
    assert await desk.status(task.id) == "DEAD_LETTERED"
    desk.acted("approval.decided", approve=False, note="there is only grey")


@drives("/approvals/{task_id}")
async def answer_a_task_that_was_cancelled_in_the_meantime(desk: Desk) -> None:
    task = await desk.task("ask", "Choose a font", required_capabilities=["human"])
    await desk.tab.open(f"/approvals/{task.id}")
    # Otherwise the page follows the task, and closes the form.
    await desk.page.get_by_role("button", name="Live").click()
    await task.cancel("not needed")
    await desk.press("Decline")
    await expect(desk.page.get_by_role("alert")).to_contain_text("Your decision came too late.")
    assert await desk.status(task.id) == "CANCELLED"


# Agents.


@drives("/agents/{id:path}/drain", "/agents/{id:path}/activate")
async def drain_and_activate_an_agent(desk: Desk) -> None:
    await desk.tab.open("/agents/editor")
    await desk.confirm("Drain", "new version")
    await desk.sees("editor takes no more work. It finishes the tasks that it holds.")
    await expect(desk.page.locator(".head .presence")).to_have_text("draining")
    desk.acted("agent.changed", "new version")
    await desk.confirm("Activate", "it works")
    await desk.sees("editor takes work again.")
    assert (await desk.engine.fleet.read("editor")).status == "active"
    desk.acted("agent.changed", "it works")


@drives("/agents/{id:path}/budget", "/agents/{id:path}/add-budget")
async def change_the_budget_of_an_agent(desk: Desk) -> None:
    await desk.tab.open("/agents/writer")
    await desk.confirm("Set the budget", "a new year", budget_usd="40")
    await desk.sees("The budget of writer was changed.")
    await expect(desk.page.locator("#live")).to_contain_text("of $40.00 left")
    desk.acted("agent.changed", "a new year")
    await desk.confirm("Add to the budget", add_budget_usd="2.50")
    await desk.sees("The budget of writer was raised.")
    assert (await desk.engine.fleet.read("writer")).budget_usd == 42.5
    desk.acted("agent.changed")


@drives("/agents/{id:path}/slots")
async def change_the_slots_of_an_agent(desk: Desk) -> None:
    await desk.tab.open("/agents/editor")
    dialog = await desk.ask("Change slots")
    await desk.send(dialog, "Change slots", "a larger machine", max_concurrent_tasks="99999999")
    await expect(dialog.get_by_role("alert")).to_contain_text("max_concurrent_tasks")
    await expect(dialog.get_by_label("Reason")).to_have_value("a larger machine")
    await desk.send(dialog, "Change slots", max_concurrent_tasks="7")
    await desk.sees("The slots of editor were changed.")
    await expect(desk.page.locator("#live")).to_contain_text("/7")
    assert (await desk.engine.fleet.read("editor")).max_concurrent_tasks == 7
    desk.acted("agent.changed", "a larger machine")


@drives("/agents/{id:path}/delete")
async def delete_an_agent(desk: Desk) -> None:
    await desk.tab.open("/agents/illustrator")
    await desk.confirm("Delete", "not used")
    await expect(desk.page.get_by_role("alert")).to_contain_text("illustrator")
    await desk.tab.open("/agents/researcher")
    await desk.confirm("Delete", "not used")
    await desk.sees("Agent researcher was deleted. Its history, budget and spend are kept.")
    shown = desk.page.locator("tr[data-row]")
    await expect(shown.filter(has_text="illustrator")).to_have_count(1)
    await expect(shown.filter(has_text="researcher")).to_have_count(0)
    desk.acted("agent.changed", "not used", deleted=True)


# Guards.


@drives("/guards/pause", "/guards/resume:{type:path}")
async def pause_and_resume(desk: Desk) -> None:
    await desk.tab.open("/guards")
    await desk.confirm("Pause a type", "wrong prompt", type="bind")
    await desk.sees("Tasks of type bind are paused. Running tasks continue.")
    desk.acted("queue.paused", "wrong prompt", type="bind")
    await desk.confirm("Pause everything", "a fire")
    await desk.sees("All types are paused. Running tasks continue.")
    desk.acted("queue.paused", "a fire", type="*")
    await desk.confirm("Resume", "it is out", within=desk.page.get_by_role("row", name="everything"))
    await desk.sees("Resumed all types.")
    desk.acted("queue.resumed", "it is out", type="*")
    # Another person was faster.
    dialog = await desk.ask("Resume", desk.page.get_by_role("row", name="bind"))
    await desk.shaft.resume("bind")
    await dialog.get_by_role("button", name="Resume").click()
    await desk.sees("Nothing to change: it has already ended.")
    assert [pause.type for pause in await desk.engine.read.pauses()] == ["translate"]


@drives("/guards/breakers/open", "/guards/breakers/reset:{key:path}")
async def open_and_reset_a_breaker(desk: Desk) -> None:
    await desk.tab.open("/guards")
    await desk.confirm("Open a breaker", "it costs too much", key="model:large")
    await desk.sees("Breaker model:large is open until it is reset.")
    desk.acted("breaker.opened", "it costs too much", key="model:large")
    row = desk.page.get_by_role("row", name="model:large")
    await expect(row).to_contain_text("by hand")
    await desk.confirm("Reset", "a discount", within=row)
    await desk.sees("Breaker model:large is closed, and its failures are forgotten.")
    await expect(row).to_contain_text("closed")
    await expect(row.get_by_role("button")).to_have_count(0)
    desk.acted("breaker.closed", "a discount", key="model:large")


@drives("/guards/slowdowns/end:{key:path}")
async def end_a_slowdown(desk: Desk) -> None:
    await desk.tab.open("/guards")
    row = desk.page.get_by_role("row", name="429 Too Many Requests")
    key = await row.locator(".key").inner_text()
    await desk.confirm("End", "a larger quota", within=row)
    await desk.sees(f"The slowdown {key} has ended: agents look for work again at once.")
    await expect(row).to_have_count(0)
    assert (await desk.engine.read.slowdowns(limit=5, cursor=None)).items == []
    desk.acted("signal.slowdown", "a larger quota", key=key, by_hand=True)


@drives("/guards/locks/release:{key:path}")
async def release_a_lock(desk: Desk) -> None:
    await desk.tab.open("/guards")
    row = desk.page.get_by_role("row", name="contract-17")
    await desk.confirm("Release", "its editor is ill", within=row)
    await desk.sees("The lock contract-17 was released.")
    await expect(row).to_have_count(0)
    assert (await desk.engine.read.locks(limit=5, cursor=None)).items == []
    desk.acted("lock.expired", "its editor is ill", key="contract-17", by_hand=True)


@drives("/guards/locks/release:{key:path}")
async def release_a_lock_that_another_task_got_in_the_meantime(desk: Desk) -> None:
    first, second = [await desk.task("sign", f"Sign page {n}", lock_key="contract-18") for n in (1, 2)]
    (claim,) = await desk.hold("sign")
    assert claim.id == first.id
    await desk.tab.open("/guards")
    dialog = await desk.ask("Release", desk.page.get_by_role("row", name="contract-18"))
    await desk.shaft.backend.complete([Completion(claim)])
    assert [claim.id for claim in await desk.hold("sign")] == [second.id]
    await dialog.get_by_role("button", name="Release").click()
    await desk.sees("Nothing was changed: the task doesn't hold the lock contract-18 any more.")
    (lock,) = (await desk.engine.read.locks(limit=5, cursor=None)).items
    assert lock.holder_task_id == second.id


@drives("/guards/limits")
async def change_the_limits(desk: Desk) -> None:
    await desk.tab.open("/guards")
    await desk.page.get_by_label("Daily budget").fill("a lot")
    await desk.press("Change limits")
    await expect(desk.page.get_by_role("alert")).to_contain_text("daily_budget_usd")
    await expect(desk.page.get_by_label("Daily budget")).to_have_value("a lot")
    await desk.page.get_by_label("Daily budget").fill("80")
    await desk.page.get_by_label("When it is too fast").select_option("pause")
    await desk.page.locator("#limits").get_by_label("Reason").fill("a new month")
    await desk.press("Change limits")
    await desk.sees("The limits were changed. Every process obeys them at once.")
    await expect(desk.page.locator("#live")).to_contain_text("of $80.00")
    found = await desk.engine.limits.read()
    assert found.daily_budget_usd == 80
    assert found.velocity_action == "pause"
    desk.acted("limits.changed", "a new month")


# Sources.


@drives("/quotas/edit:{name:path}", "/quotas/delete:{name:path}")
async def set_change_and_delete_a_quota(desk: Desk) -> None:
    await desk.tab.open("/quotas")
    await desk.page.get_by_role("link", name="New quota").click()
    await desk.page.get_by_label("Name", exact=True).fill("letters")
    await desk.page.get_by_label("Key", exact=False).first.fill("type:letter")
    await desk.page.get_by_label("Tasks at once").fill("2.5")
    await desk.page.get_by_label("Amount").fill("60")
    await desk.page.get_by_label("In seconds").fill("90")
    await desk.page.get_by_label("Reason").fill("the printer is slow")
    await desk.press("Create")
    await expect(desk.page.get_by_role("alert")).to_contain_text("max_running")
    await expect(desk.page.get_by_label("In seconds")).to_have_value("90")
    await desk.page.get_by_label("Tasks at once").fill("2")
    await desk.press("Create")
    await desk.sees("Quota letters is set. It applies from the next claim.")
    await expect(desk.page.locator(".facts")).to_contain_text("0 of 2")
    desk.acted("quota.changed", "the printer is slow", name="letters", max_running=2)

    await desk.page.get_by_role("link", name="Change…").click()
    await expect(desk.page.get_by_label("Amount")).to_have_value("60")
    await desk.page.get_by_label("Amount").fill("")
    await desk.page.get_by_label("In seconds").fill("")
    await desk.press("Change")
    await desk.sees("Quota letters was changed. It applies from the next claim.")
    quota = (await desk.engine.quotas.details("letters")).quota
    assert (quota.max_running, quota.rate) == (2, None)
    desk.acted("quota.changed", name="letters", max_running=2)

    await desk.confirm("Delete…", "a new printer", confirm="Delete the quota")
    await desk.sees("Quota letters was deleted. What waited for it can be claimed.")
    assert "letters" not in {
        each.name for each in (await desk.engine.quotas.page(limit=50, cursor=None)).items
    }
    desk.acted("quota.changed", "a new printer", name="letters", deleted=True)


@drives("/sources/new/try", "/sources/new")
async def create_a_source(desk: Desk) -> None:
    await desk.tab.open("/sources")
    await desk.page.get_by_role("link", name="New source").click()
    await desk.page.get_by_label("Name").fill("weekly")
    await desk.press("Try it")
    await expect(desk.page.locator(".dry")).to_contain_text("no condition: every event fires")
    assert [source.name for source in await _sources(desk)] == ["monday-report"]
    await desk.press("Create")
    await desk.sees("Source weekly was created.")
    await expect(desk.page.get_by_role("heading", name="weekly")).to_be_visible()
    assert [source.name for source in await _sources(desk)] == ["monday-report", "weekly"]
    desk.acted("source.created", source="weekly")


async def _sources(desk: Desk) -> list[Any]:
    found = await desk.engine.sources.find(kind=None, limit=10, cursor=None)
    return sorted(found.items, key=lambda source: source.name)


async def _title(desk: Desk, source: str) -> str:
    """Of the task that it creates."""
    template: Any = (await desk.engine.sources.get(source)).template
    return str(template["task"]["title"])


@drives("/sources/{name:path}/try", "/sources/{name:path}/save")
async def change_a_source(desk: Desk) -> None:
    await desk.tab.open("/sources/weekly")
    definition = desk.page.locator("textarea.definition")
    text = await definition.input_value()
    await definition.fill(text.replace("Week of", "Report of"))
    await desk.press("Try it")
    await expect(desk.page.locator(".dry")).to_contain_text("Report of")
    await expect(definition).to_have_value(re.compile("Report of"))
    assert await _title(desk, "weekly") == "Week of ${event.tick}"
    await desk.press("Save")
    await desk.sees("Source weekly was changed.")
    assert await _title(desk, "weekly") == "Report of ${event.tick}"
    desk.acted("source.changed", source="weekly", fields=["template"])


@drives("/sources/{name:path}/fire")
async def fire_a_source_with_two_clicks(desk: Desk) -> None:
    await desk.tab.open("/sources/weekly")
    dialog = await desk.ask("Fire now")
    box = await dialog.get_by_role("button", name="Fire now").bounding_box()
    assert box is not None
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    # The server is slow: the second click comes while it works on the first one.
    with desk.connection.transaction():
        desk.connection.execute("LOCK TABLE lineshaft.source IN EXCLUSIVE MODE")
        async with desk.page.expect_request("**/fire"):
            await desk.page.mouse.click(*middle)
        await desk.page.mouse.click(*middle)
    await desk.sees("It fired: created, 1 task.")
    await expect(desk.page.locator("#live tbody tr")).to_have_count(1)
    found = await desk.engine.sources.firings("weekly", limit=10, cursor=None)
    assert [firing.outcome for firing in found.items] == ["created"]
    assert desk.used == ["/sources/{name:path}/fire"]
    desk.acted("source.fired", source="weekly", outcome="created")


@drives("/sources/{name:path}/pause", "/sources/{name:path}/resume", "/sources/{name:path}/delete")
async def pause_resume_and_delete_a_source(desk: Desk) -> None:
    await desk.tab.open("/sources/weekly")
    await desk.confirm("Pause")
    await desk.sees("It doesn't fire until it is resumed.")
    assert not (await desk.engine.sources.get("weekly")).is_enabled
    desk.acted("source.changed", source="weekly", enabled=False)
    await desk.confirm("Resume")
    await desk.sees("It fires again.")
    assert (await desk.engine.sources.get("weekly")).is_enabled
    desk.acted("source.changed", source="weekly", enabled=True)
    await desk.confirm("Delete")
    await desk.sees("Source weekly and its history were deleted. Its work stays.")
    assert [source.name for source in await _sources(desk)] == ["monday-report"]
    desk.acted("source.deleted", source="weekly")


# New.


@drives("/new/check", "/new")
async def create_a_task(desk: Desk) -> None:
    await desk.tab.open("/new")
    await desk.page.get_by_label("Type", exact=False).first.fill("sweep")
    await desk.page.get_by_label("Title").fill("Sweep the hall")
    await desk.page.get_by_label("Spec, as JSON").fill('{"floor": 2}')
    await desk.press("Can it run?")
    await expect(desk.page.locator(".findings")).to_contain_text("1 task would wait")
    await desk.press("Submit")
    await desk.sees("The task is submitted.")
    await expect(desk.page.get_by_role("heading", name="Sweep the hall")).to_be_visible()
    found = await desk.engine.read.task(desk.page.url.rpartition("/")[2])
    assert (found.type, found.spec, found.created_by) == ("sweep", {"floor": 2}, f"human:{NAME}")


@drives("/new/dag/check", "/new/dag")
async def create_a_dag(desk: Desk) -> None:
    await desk.tab.open("/new")
    await desk.page.get_by_role("link", name="DAG", exact=True).click()
    await desk.press("Preview")
    await expect(desk.page.get_by_role("heading", name="2 tasks")).to_be_visible()
    await desk.press("Submit")
    await desk.sees("The DAG is submitted.")
    found = await desk.engine.read.dag(desk.page.url.rpartition("/")[2])
    assert (found.title, len(found.tasks), found.created_by) == ("Landing page", 2, f"human:{NAME}")


@drives("/new/goal")
async def create_a_goal(desk: Desk) -> None:
    await desk.tab.open("/new/goal")
    await desk.page.get_by_label("Goal", exact=True).fill("A tidy office")
    await desk.page.get_by_label("Show me the plan").check()
    await desk.press("Submit")
    await desk.sees("The goal is submitted.")
    found = await desk.engine.read.task(desk.page.url.rpartition("/")[2])
    assert (found.type, found.created_by) == ("goal", f"human:{NAME}")
    assert found.spec == {"goal": "A tidy office", "approve": True, "max_tasks": 50}


@drives("/logout")
async def log_out(desk: Desk) -> None:
    await desk.tab.open("/")
    await desk.page.get_by_role("button", name="Log out").click()
    await expect(desk.page.get_by_role("heading", name="Log in to Lineshaft")).to_be_visible()
    assert desk.sessions() == 0
    await desk.tab.open("/tasks")
    await expect(desk.page.get_by_label("Token")).to_be_visible()


@pytest.mark.slow("a person does everything that the dashboard offers")
@pytest.mark.timeout(1200)
async def test_every_action_in_a_browser(
    served: Served, tab: Visitor, connection: psycopg.Connection
) -> None:
    token = (await served.service.tokens.create("setup", Scope.OPERATE)).token
    served.service.notice_token()
    faults = []
    async with Lineshaft(tab.address, token=token) as shaft:
        desk = Desk(served, tab, connection, shaft, await fill(shaft))
        for routes, drive in _DRIVES:
            try:
                await _drive(desk, routes, drive)
            except Exception as fault:  # noqa: BLE001 - raised with those of the other actions
                fault.add_note(f"in {drive.__name__}, on {tab.page.url}")
                faults.append(fault)
    if faults:
        raise ExceptionGroup("Not every action works in a browser", faults)


async def _drive(desk: Desk, routes: tuple[str, ...], drive: Drive) -> None:
    desk.used.clear()
    desk.tab.faults.clear()
    desk.acts("")
    await drive(desk)
    assert {*desk.used} == {*routes}
    assert desk.tab.faults == []


def test_every_action_is_driven_in_a_browser() -> None:
    driven = {route for routes, _ in _DRIVES for route in routes}
    assert driven == {*(action.path for action in ACTIONS), "/login", "/logout"}, "Add a drive to this file."
