"""The work that a template makes: a task, a DAG or a goal."""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from lineshaft.errors import CycleError, InvalidInputError, LineshaftError
from lineshaft.model import graph
from lineshaft.model.tasks import MAX_DAG_TASKS, NewTask, resolve
from lineshaft.sources.expressions import Budget
from lineshaft.sources.template import Template
from lineshaft.types import documents
from lineshaft.types.dags import NewDag

#: The type of a task whose spec is a goal, which an orchestrator plans.
GOAL_TYPE = "goal"
_GOAL_FIELDS = frozenset({"goal", "context", "budget_usd", "max_tasks", "approve", "tags"})
_MAX_TITLE = 200
#: Fields of a task and a DAG that the source sets.
_SET_BY_SOURCE = {"created_by": "is set by the source"}


class RenderedWork(Struct, frozen=True):
    """Rendered and checked, but not submitted."""

    #: As they are submitted, for a dry run.
    documents: list[dict[str, Any]]
    task: NewTask | None = None
    dag: NewDag | None = None


class WorkTemplate:
    def __init__(self, template: Mapping[str, Any]) -> None:
        """Compile and check a template; raises TemplateError or InvalidInputError."""
        self._form = _form(template)
        self._template = Template(dict(template), "template")
        _check_fields(template, self._form)
        if self._template.expressions == 0:
            # Nothing depends on the event, so everything can be checked now.
            work = self.render({}, "system:check")
            tasks = work.dag.tasks if work.dag is not None else [work.task] if work.task is not None else []
            for number, task in enumerate(tasks):
                place = "template.task" if work.dag is None else f"template.dag.tasks[{number}]"
                resolve(task, place=place)

    def render(self, data: Mapping[str, Any], created_by: str, budget: Budget | None = None) -> RenderedWork:
        """The work for an event; raises TemplateError or another LineshaftError."""
        rendered = self._template.render(data, budget or Budget())
        if self._form == "dag":
            return _dag(rendered["dag"], created_by)
        document = goal_task(rendered) if self._form == "goal" else rendered["task"]
        document = {**document, "created_by": created_by}
        return RenderedWork([document], task=_converted(document, NewTask, documents.task, "template.task"))


def _dag(template: dict[str, Any], created_by: str) -> RenderedWork:
    tasks = [{**task, "created_by": created_by} for task in template["tasks"]]
    document = {**template, "tasks": tasks, "created_by": created_by}
    dag = _converted(document, NewDag, documents.dag, "template.dag")
    # A dry run reports it too, though it submits nothing.
    graph.order({task.key: task.depends_on for task in dag.tasks if task.key is not None})
    return RenderedWork(tasks, dag=dag)


def goal_task(template: dict[str, Any]) -> dict[str, Any]:
    """The document of a task whose spec is a goal."""
    goal = template["goal"]
    if not isinstance(goal, str) or not goal.strip():
        raise InvalidInputError(errors=[("template.goal", "must be a text when it is rendered")])
    spec = {name: value for name, value in template.items() if name != "tags" and value is not None}
    title = goal if len(goal) <= _MAX_TITLE else f"{goal[: _MAX_TITLE - 1]}…"
    return {"type": GOAL_TYPE, "title": title, "spec": spec, "tags": template.get("tags") or []}


def _converted(document: Any, kind: Any, simplify: documents.Simplify, place: str) -> Any:
    try:
        return documents.converted(document, kind, simplify)
    except InvalidInputError as error:
        raise InvalidInputError(
            errors=[(f"{place}.{field}" if field else place, fault) for field, fault in error.errors]
        ) from None
    except LineshaftError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError(errors=[(place, f"can't be read: {type(error).__name__}")]) from None


def _form(template: Mapping[str, Any]) -> str:
    forms = [name for name in ("task", "dag", "goal") if name in template]
    if len(forms) != 1:
        names = ", ".join(sorted(map(str, template))) or "nothing"
        raise InvalidInputError(errors=[("template", f"must have one of task, dag and goal, got {names}")])
    return forms[0]


def _check_fields(template: Mapping[str, Any], form: str) -> None:
    """Refuse unknown and missing fields now; values may depend on the event."""
    faults: list[tuple[str, str]] = []
    allowed = _GOAL_FIELDS if form == "goal" else {form}
    faults += [(f"template.{name}", "unknown field") for name in template if name not in allowed]
    if form == "task":
        _check_task(template["task"], "template.task", faults, keys=False)
    elif form == "dag":
        _check_dag(template["dag"], faults)
    elif not isinstance(template["goal"], str) or not template["goal"].strip():
        faults.append(("template.goal", "must be a text"))
    if faults:
        raise InvalidInputError(errors=faults)


def _check_dag(dag: Any, faults: list[tuple[str, str]]) -> None:
    if not isinstance(dag, dict):
        faults.append(("template.dag", "must be an object with title and tasks"))
        return
    allowed = set(NewDag.__struct_fields__)
    faults += _unknown(dag, allowed, "template.dag")
    if "title" not in dag:
        faults.append(("template.dag.title", "is required"))
    tasks = dag.get("tasks")
    if not isinstance(tasks, list) or not 1 <= len(tasks) <= MAX_DAG_TASKS:
        faults.append(("template.dag.tasks", f"must be a list of 1 to {MAX_DAG_TASKS} tasks"))
        return
    for number, task in enumerate(tasks):
        _check_task(task, f"template.dag.tasks[{number}]", faults, keys=True)
    if not faults:
        _check_order(tasks, faults)


def _check_order(tasks: list[dict[str, Any]], faults: list[tuple[str, str]]) -> None:
    """Refuse a cycle, or a key used twice, that no event can change: a name that is an expression differs."""
    lists: dict[str, list[str]] = {}
    for number, task in enumerate(tasks):
        key = task.get("key")
        if not isinstance(key, str):
            continue
        if key in lists and "${" not in key:
            faults.append((f"template.dag.tasks[{number}].key", f"{key!r} is used twice in this template"))
        lists[key] = list(_waits_for(task))
    try:
        graph.order(lists)
    except CycleError as error:
        faults.append(("template.dag.tasks", f"{error.errors[0][0]} {error.errors[0][1]}"))


def _waits_for(task: Mapping[str, Any]) -> Iterator[str]:
    """What is in depends_on, and the tasks whose outputs are its inputs."""
    inputs = task.get("inputs")
    for names in (task.get("depends_on"), *(inputs.values() if isinstance(inputs, dict) else ())):
        for name in names if isinstance(names, list | tuple) else (names,):
            if isinstance(name, str):
                yield name


def _check_task(task: Any, place: str, faults: list[tuple[str, str]], *, keys: bool) -> None:
    if not isinstance(task, dict):
        faults.append((place, "must be an object with the fields of a task"))
        return
    allowed = set(NewTask.__struct_fields__) - (set() if keys else {"key"})
    faults += _unknown(task, allowed, place)
    if "type" not in task:
        faults.append((f"{place}.type", "is required"))
    children = task.get("children", [])
    for number, child in enumerate(children if isinstance(children, list) else []):
        _check_task(child, f"{place}.children[{number}]", faults, keys=True)


def _unknown(document: Mapping[str, Any], allowed: set[str], place: str) -> list[tuple[str, str]]:
    return [
        (f"{place}.{name}", _SET_BY_SOURCE.get(name, "unknown field"))
        for name in document
        if name in _SET_BY_SOURCE or name not in allowed
    ]
