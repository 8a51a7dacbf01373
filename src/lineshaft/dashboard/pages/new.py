"""New: submit a task, a DAG or a goal, after a look at whether it can run."""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

from markupsafe import Markup

from lineshaft.dashboard.visit import Done, Pages, Values, View, Visit
from lineshaft.engine.submit.drafts import Draft, draft_dag, draft_each, off_the_loop
from lineshaft.errors import InvalidInputError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.operations import new_tasks
from lineshaft.pictures import DagNode, dag_svg, title_of_list
from lineshaft.sources.work import GOAL_TYPE, goal_task
from lineshaft.types import AgentInfo, NewDag, Scope, documents
from lineshaft.types.page import MAX_LIMIT
from lineshaft.types.written import read_written

pages = Pages()

_EXAMPLE = """\
title: Landing page
budget_ceiling_usd: 5
tasks:
  - key: research
    type: research
    spec: {topic: competitors}
  - key: write
    type: write
    depends_on: [research]
"""


class Finding(NamedTuple):
    """Whether a task can run."""

    key: str
    fault: str


# Tasks.


async def _task_view(visit: Visit, form: Values | None = None) -> View:
    types, capabilities, models = await _known(visit)
    context = {
        "form": form or visit.form,
        "types": types,
        "capabilities": capabilities,
        "models": models,
        "findings": None,
    }
    return View("new_task.html", "New task", context)


@pages.page("/new", Scope.SUBMIT)
async def new_task(visit: Visit) -> View:
    form = visit.query
    if not form.get("spec"):
        form = Values([*form.pairs(), ("spec", "{}")])
    return await _task_view(visit, form)


@pages.action("/new/check", Scope.SUBMIT, changes=False, refused=_task_view)
async def check_task(visit: Visit) -> View:
    task = _task(visit)
    _, drafts = await off_the_loop([task], partial(draft_each, [task], visit.engine.submission.rules))
    return await _with_findings(visit, await _task_view(visit), drafts)


@pages.action("/new", Scope.SUBMIT, refused=_task_view)
async def submit_task(visit: Visit) -> Done:
    (made,) = await visit.engine.submission.submit([_task(visit)])
    return _submitted(f"/tasks/{made.id}", "task", duplicate=made.duplicate)


def _task(visit: Visit) -> NewTask:
    form = visit.form
    given: dict[str, Any] = {"type": form.get("type"), "created_by": f"human:{visit.actor}"}
    if not given["type"]:
        raise InvalidInputError(errors=[("type", "is missing: which kind of work is it?")])
    given["spec"] = _json("spec", form.get("spec", "{}"))
    for name in ("title", "deadline", "run_at", "lock_key", "idempotency_key"):
        if form.get(name):
            given[name] = _time(form, name) if name in {"deadline", "run_at"} else form.get(name)
    for name in ("required_capabilities", "model_preferences", "tags", "depends_on"):
        if found := [part.strip() for part in form.get(name).split(",") if part.strip()]:
            given[name] = found
    for name, kind in (
        ("priority", int),
        ("max_attempts", int),
        ("max_cost_usd", float),
        ("max_duration_sec", float),
    ):
        if (number := form.number(name)) is not None:
            given[name] = kind(number)
    if form.get("output"):
        given["output"] = _json("output", form.get("output"))
    task = documents.converted(given, NewTask, documents.task)
    new_tasks.check_tasks([task], keys=False, place="")
    new_tasks.check_creators([task])
    return task


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(errors=[(name, f"is not valid JSON: {error}")]) from None


def _time(form: Values, name: str) -> str:
    """A time as the browser's field sends it: UTC without a zone."""
    try:
        return f"{datetime.fromisoformat(form.get(name)):%Y-%m-%dT%H:%M:%S}Z"
    except ValueError:
        raise InvalidInputError(errors=[(name, f"must be a time, got {form.get(name)[:50]!r}")]) from None


# DAGs.


async def _dag_view(visit: Visit, form: Values | None = None) -> View:
    return View("new_dag.html", "New DAG", {"form": form or visit.form, "findings": None, "picture": None})


@pages.page("/new/dag", Scope.SUBMIT)
async def new_dag(visit: Visit) -> View:
    return await _dag_view(visit, Values([("document", visit.query.get("document", _EXAMPLE))]))


@pages.action("/new/dag/check", Scope.SUBMIT, changes=False, refused=_dag_view)
async def check_dag(visit: Visit) -> View:
    dag = _dag(visit)
    drafts = await _draft(visit, dag)
    view = await _with_findings(visit, await _dag_view(visit), drafts)
    costs = [
        draft.row.max_cost_usd * (1 if draft.row.for_each is None else draft.row.for_each.max)
        for draft in drafts
        if draft.row.max_cost_usd is not None
    ]
    context = {
        "picture": _picture(dag.title, drafts),
        "count": len(drafts),
        "most_usd": sum(costs, Decimal(0)),
        "unlimited": len(drafts) - len(costs),
        "ceiling": dag.budget_ceiling_usd,
    }
    return view.with_context(**context)


@pages.action("/new/dag", Scope.SUBMIT, refused=_dag_view)
async def submit_dag(visit: Visit) -> Done:
    dag = _dag(visit)
    made = await visit.engine.submission.submit_dag(
        dag.title,
        dag.tasks,
        budget_ceiling_usd=dag.budget_ceiling_usd,
        created_by=dag.created_by or f"human:{visit.actor}",
        idempotency_key=dag.idempotency_key,
    )
    return _submitted(f"/dags/{made.id}", "DAG", duplicate=made.duplicate)


def _dag(visit: Visit) -> NewDag:
    given = read_written(visit.form.get("document"), "The document")
    if not isinstance(given, dict):
        raise InvalidInputError("The document must be a DAG: an object with 'title' and 'tasks'.")
    dag = documents.converted(given, NewDag, documents.dag)
    new_tasks.check_tasks(dag.tasks, keys=True)
    visit.caller.check_creator(dag.created_by)
    new_tasks.check_creators(dag.tasks)
    return dag


async def _draft(visit: Visit, dag: NewDag) -> list[Draft]:
    draft = partial(
        draft_dag,
        dag.title,
        dag.tasks,
        budget_ceiling_usd=dag.budget_ceiling_usd,
        created_by=dag.created_by,
        idempotency_key=dag.idempotency_key,
        rules=visit.engine.submission.rules,
    )
    _, _, drafts = await off_the_loop(dag.tasks, draft)
    return drafts


def _picture(title: str, drafts: Sequence[Draft]) -> Markup:
    nodes = [
        DagNode(
            id=draft.id,
            title=title_of_list(draft.row.title, draft.row.for_each),
            type=draft.row.type,
            status=Status.PENDING if draft.depends_on else Status.READY,
        )
        for draft in drafts
    ]
    edges = [(upstream, draft.id) for draft in drafts for upstream in draft.depends_on]
    return Markup(dag_svg(nodes, edges, title=title, standalone=False))  # noqa: S704 - escaped by the picture


# Goals.


async def _goal_view(visit: Visit, form: Values | None = None) -> View:
    takers = [agent.id for agent in await _agents(visit) if _fault(agent, GOAL_TYPE, ()) is None]
    return View("new_goal.html", "New goal", {"form": form or visit.form, "takers": takers})


@pages.page("/new/goal", Scope.SUBMIT)
async def new_goal(visit: Visit) -> View:
    return await _goal_view(visit, visit.query)


@pages.action("/new/goal", Scope.SUBMIT, refused=_goal_view)
async def submit_goal(visit: Visit) -> Done:
    form = visit.form
    goal: dict[str, Any] = {
        "goal": form.get("goal"),
        "context": form.get("context") or None,
        "budget_usd": form.number("budget_usd"),
        "max_tasks": None if (most := form.number("max_tasks")) is None else int(most),
        "approve": form.get("approve") == "yes",
    }
    if not goal["goal"]:
        raise InvalidInputError(errors=[("goal", "is missing: what should be achieved?")])
    document = {**goal_task(goal), "created_by": f"human:{visit.actor}"}
    task = documents.converted(document, NewTask, documents.task)
    new_tasks.check_creators([task])
    (made,) = await visit.engine.submission.submit([task])
    return _submitted(f"/tasks/{made.id}", "goal", duplicate=made.duplicate)


# Whether it can run.


async def _with_findings(visit: Visit, view: View, drafts: Sequence[Draft]) -> View:
    agents = await _agents(visit)
    known: dict[tuple[str, tuple[str, ...], Decimal | None], str] = {}
    findings = []
    for draft in drafts:
        row = draft.row
        need = (row.type, row.required_capabilities, row.max_cost_usd)
        if need not in known:
            known[need] = _why_not(agents, *need)
        if known[need]:
            findings.append(Finding(draft.key or row.title, known[need]))
    return view.with_context(findings=findings)


async def _agents(visit: Visit) -> list[AgentInfo]:
    """The active ones, or the first of them if there are many."""
    page = await visit.engine.fleet.page(status=("active",), limit=MAX_LIMIT, cursor=None)
    return page.items


def _why_not(
    agents: Iterable[AgentInfo], type_: str, capabilities: Sequence[str], cost: Decimal | None
) -> str:
    """Why no active agent could run it; empty: one could."""
    faults: list[str] = []
    for agent in agents:
        fault = _fault(agent, type_, capabilities)
        if fault is None and cost is not None:
            left = agent.budget_remaining_usd
            fault = None if left is None or left >= cost else f"{agent.id} has only ${left} left"
        if fault is None:
            return ""
        faults.append(fault)
    if not faults:
        return "no agent is active"
    return faults[0] if len(set(faults)) == 1 else f"no active agent takes type {type_!r} with these needs"


def _fault(agent: AgentInfo, type_: str, capabilities: Sequence[str]) -> str | None:
    if agent.types is not None and type_ not in agent.types:
        return f"no active agent takes type {type_!r}"
    missing = sorted(set(capabilities) - set(agent.capabilities))
    return f"{agent.id} lacks {', '.join(missing)}" if missing else None


async def _known(visit: Visit) -> tuple[list[str], list[str], list[str]]:
    """Types, capabilities and models of active agents, to choose from."""
    agents = await _agents(visit)

    def union(of: Callable[[AgentInfo], Sequence[str] | None]) -> list[str]:
        return sorted({name for agent in agents for name in of(agent) or ()})

    return union(lambda a: a.types), union(lambda a: a.capabilities), union(lambda a: a.models_available)


def _submitted(to: str, what: str, *, duplicate: bool) -> Done:
    if duplicate:
        return Done(to, f"A {what} with this idempotency key exists already: this is it.")
    return Done(to, f"The {what} is submitted.")
