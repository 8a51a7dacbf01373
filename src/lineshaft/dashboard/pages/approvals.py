"""Approvals: what waits for a person."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from lineshaft.checks.decision_report import REQUIRED
from lineshaft.dashboard import schema_form
from lineshaft.dashboard.command_lines import segment
from lineshaft.dashboard.schema_form import Field, FormError
from lineshaft.dashboard.visit import Done, Pages, Values, View, Visit
from lineshaft.engine.review.approvals import MAX_BLOCKED
from lineshaft.errors import InvalidInputError, InvalidTransitionError, LineshaftError
from lineshaft.types import Approval, ApprovalDecision, OutputGate, Task

pages = Pages()

_ITEMS = 100
#: Tasks whose outputs are shown beside an item.
_MOST_INPUTS = 20
_CONFLICT = 409
#: Changes of the list. A task for a person appears when it becomes READY, and goes when it is decided.
_TOPICS = frozenset(
    {
        "approval.waiting",
        "task.ready",
        "task.claimed",
        "task.completed",
        "task.failed",
        "task.retry_scheduled",
        "task.dead_lettered",
        "task.cancelled",
    }
)


@pages.page("/approvals")
async def inbox(visit: Visit) -> View:
    approvals = visit.engine.approvals
    page = await approvals.waiting(limit=_ITEMS, cursor=visit.query.get("cursor") or None)
    context = {
        "items": page.items,
        "next_cursor": page.next_cursor,
        "blocked": await approvals.blocked_by([item.task.id for item in page.items]),
        "most_blocked": MAX_BLOCKED,
    }
    return View(
        "approvals.html", "Approvals", context, topics=_TOPICS, at_most_every_sec=1.0, refresh_sec=15.0
    )


# One item.


class _AnswerForm(Struct, frozen=True):
    """The form of a task for a person, with what was entered so far."""

    fields: list[Field]
    texts: Mapping[str, list[str]]
    faults: Mapping[str, str] = field(default_factory=dict)
    report: Mapping[str, str] = field(default_factory=dict)
    is_json: bool = False
    note: str = ""


@pages.page("/approvals/{task_id}")
async def item(visit: Visit) -> View:
    found = await visit.engine.approvals.find(visit.path["task_id"])
    return await _view(visit, found, None if found is None else _empty_answer(visit, found))


def _empty_answer(visit: Visit, found: Approval) -> _AnswerForm:
    fields, is_json = _fields(visit.query, found)
    return _AnswerForm(fields, schema_form.texts_of(fields), is_json=is_json)


def _fields(values: Values, found: Approval) -> tuple[list[Field], bool]:
    if values.get("as") == "json":
        return [schema_form.json_field(found.schema)], True
    return schema_form.fields_of(found.schema), False


async def _view(visit: Visit, found: Approval | None, answer: _AnswerForm | None) -> View:
    task_id = visit.path["task_id"]
    task = found.task if found is not None else await visit.engine.read.task(task_id)
    approvals = visit.engine.approvals
    blocked = await approvals.blocked_by([task_id])
    context = {
        "item": found,
        "task": task,
        "criteria": _criteria(task),
        "inputs": await _inputs(visit, task),
        "answer": answer,
        "decision": await approvals.last_decision(task_id),
        "blocked": blocked.get(task_id, 0),
        "most_blocked": MAX_BLOCKED,
        "report_fields": REQUIRED,
    }
    return View("approval.html", f"Approve {task.title}", context, topics=frozenset({f"task:{task_id}"}))


def _criteria(task: Task) -> list[OutputGate]:
    """All gates of the output, in order."""
    if not isinstance(task.output.validation, str):
        return list(task.output.validation)
    if task.output.validation == "none":
        return []
    return [OutputGate(task.output.validation, task.output.validation_schema_json)]


async def _inputs(visit: Visit, task: Task) -> list[tuple[str, Task]]:
    """The tasks whose outputs it gets, by the name of the input."""
    named = [
        (name, task_id)
        for name, ids in task.inputs.items()
        for task_id in ([ids] if isinstance(ids, str) else ids)
    ][:_MOST_INPUTS]
    known = {found.id: found for found in await visit.engine.read.tasks_by_id([each for _, each in named])}
    return [(name, known[task_id]) for name, task_id in named if task_id in known]


# Decisions.


@pages.action("/approvals/{task_id}")
async def decide(visit: Visit) -> Done | View:
    task_id = visit.path["task_id"]
    approve = _is_approval(visit.form)
    found = await visit.engine.approvals.find(task_id)
    if found is None:
        return await _too_late(visit)
    following = await _following(visit, found)
    answer = _entered(visit, found)
    try:
        decision = _decision(visit, found, answer, approve=approve)
        await visit.engine.approvals.decide(task_id, decision)
    except FormError as error:
        fault = InvalidInputError("The answer is not complete: see the fields below. Nothing was sent.")
        return (await _view(visit, found, replace(answer, faults=error.faults))).refused(fault)
    except InvalidTransitionError:
        return await _too_late(visit)
    except InvalidInputError as error:
        return (await _view(visit, found, _with_reasons(answer, error))).refused(error)
    message = f"{'Approved' if approve else 'Rejected'} by {visit.actor}: {found.task.title[:200]}."
    if following is None:
        return Done("/approvals", f"{message} Nothing else waits for a person.")
    return Done(f"/approvals/{segment(following)}", f"{message} This is the next one.")


def _is_approval(form: Values) -> bool:
    choice = form.get("decision")
    if choice not in {"approve", "reject"}:
        raise InvalidInputError(errors=[("decision", f"must be approve or reject, got {choice[:100]!r}")])
    return choice == "approve"


async def _too_late(visit: Visit) -> View:
    """The task as it is now, with who decided and when."""
    task_id = visit.path["task_id"]
    view = await _view(visit, await visit.engine.approvals.find(task_id), None)
    decision, task = view.context["decision"], view.context["task"]
    if decision is None:
        text = f"The task doesn't wait for a person any more: it is {task.status}."
    else:
        what = "approved" if decision.approved else "rejected"
        text = f"{decision.reviewer} {what} it at {decision.at:%Y-%m-%d %H:%M:%S %Z}."
    error: LineshaftError = InvalidTransitionError(
        f"Your decision came too late. {text} Nothing was changed."
    )
    return replace(view.refused(error), status=_CONFLICT)


async def _following(visit: Visit, found: Approval) -> str | None:
    """The item behind this one, or the first; None: this is the only one."""
    page = await visit.engine.approvals.waiting(limit=_ITEMS)
    others = [item for item in page.items if item.task.id != found.task.id]
    behind = [item for item in others if (item.since, item.task.id) > (found.since, found.task.id)]
    chosen: Sequence[Approval] = behind or others
    return chosen[0].task.id if chosen else None


def _entered(visit: Visit, found: Approval) -> _AnswerForm:
    fields, is_json = _fields(visit.form, found)
    texts: dict[str, list[str]] = {}
    for name, text in visit.form.pairs():
        texts.setdefault(name, []).append(text)
    report = {name: visit.form.get(f"report_{name}") for name in REQUIRED}
    return _AnswerForm(fields, texts, report=report, is_json=is_json, note=visit.form.get("note"))


def _decision(visit: Visit, found: Approval, answer: _AnswerForm, *, approve: bool) -> ApprovalDecision:
    data: bytes | None = None
    report: bytes | None = None
    if approve and found.kind == "task":
        value: Any = schema_form.value_of(answer.fields, visit.form.pairs())
        data = msgspec.json.encode(value)
        if any(answer.report.values()):
            report = msgspec.json.encode(answer.report)
    return ApprovalDecision(approve, visit.actor, answer.note or None, data, report)


def _with_reasons(answer: _AnswerForm, error: InvalidInputError) -> _AnswerForm:
    """The reasons of the gate beside the fields that they are about."""
    faults: dict[str, str] = {}
    for place, reason in error.errors:
        name, text = schema_form.place_of(answer.fields, reason)
        if place == "data" and name is not None:
            faults[name] = f"{faults[name]}; {text}" if name in faults else text
        elif place == "decision_report":
            faults["report"] = reason
    return replace(answer, faults=faults)
