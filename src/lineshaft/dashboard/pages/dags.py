"""DAGs: the list, and one DAG with its picture, its money and what holds it up."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup
from msgspec import UNSET, Struct
from starlette.responses import RedirectResponse, Response

from lineshaft.dashboard.visit import EVERYTHING, Done, Pages, View, Visit
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.model import graph
from lineshaft.model.states import Status
from lineshaft.model.storable import is_storable
from lineshaft.pictures import (
    DagNode,
    DagPicture,
    critical_path,
    dag_mermaid,
    dag_svg,
    edges_of,
    nodes_of,
)
from lineshaft.pictures.dag import stands_for_several
from lineshaft.pictures.nodes import Box
from lineshaft.types import Dag, DagFilter, Task, TaskFilter
from lineshaft.types.dags import ListItems

pages = Pages()

_ROWS = 50
_STATUSES = ("running", "pending", "failed", "completed", "cancelled")
#: Tasks that are read for one page. The table of a larger DAG is the list of tasks.
_MOST_TASKS = 2_000
#: From here on an open page is rendered less often.
_MANY_TASKS = 100
_BLOCKERS = 5


@pages.page("/dags")
async def dags(visit: Visit) -> View:
    query = visit.query
    status = [name for name in query.all("status") if name in _STATUSES]
    virtual = query.get("all") == "yes"
    wanted = DagFilter(
        status=status, q=[text for text in query.all("q")[:1] if is_storable(text)], virtual=virtual
    )
    try:
        found = await visit.engine.read.dags(wanted, limit=_ROWS, cursor=query.get("cursor") or None)
    except InvalidInputError:
        # A cursor of another list: begin at the first page.
        found = await visit.engine.read.dags(wanted, limit=_ROWS)
    return View(
        "dags.html",
        "DAGs",
        {
            "dags": found.items,
            "next_cursor": found.next_cursor,
            "chosen": status,
            "statuses": _STATUSES,
            "virtual": virtual,
            "states": _states,
        },
        topics=frozenset({EVERYTHING}),
        at_most_every_sec=2.0,
    )


@pages.page("/dags/{id}")
async def dag(visit: Visit) -> View | Response:
    return await _view(visit)


async def _view(visit: Visit) -> View | Response:
    shown = await _read(visit)
    if isinstance(shown, Response):
        return shown
    nodes = shown.nodes
    # The one that the picture draws: by how long tasks take.
    longest = set(critical_path(nodes, edges_of(shown.tasks)))
    return View(
        "dag.html",
        shown.dag.title,
        {
            "dag": shown.dag,
            "tasks": shown.tasks,
            "more": len(shown.dag.tasks) - len(shown.tasks) - sum(shown.items.values()),
            "items": shown.items,
            "states": _states(shown.dag.counts),
            "open_count": sum(
                count for status, count in shown.dag.counts.items() if not Status(status).ended
            ),
            "failed_count": shown.dag.counts.get(Status.DEAD_LETTERED, 0),
            "picture": _picture(shown, visit),
            "collapsed": _is_collapsed(visit),
            "critical": longest,
            "steps_left": sum(node.id in longest and not node.status.ended for node in nodes),
            "blockers": _blockers(shown.tasks),
            "spans": _spans(shown.tasks),
        },
        topics=frozenset({f"dag:{shown.dag.id}"}),
        at_most_every_sec=0.25 if len(shown.tasks) <= _MANY_TASKS else 1.0,
        refresh_sec=30.0,
    )


@pages.page("/dags/{id}/picture.svg")
async def picture_file(visit: Visit) -> Response:
    shown = await _read(visit)
    if isinstance(shown, Response):
        return shown
    text = dag_svg(shown.nodes, edges_of(shown.tasks), title=shown.dag.title)
    return _file(text, "image/svg+xml", f"{shown.dag.id}.svg")


@pages.page("/dags/{id}/picture.mmd")
async def mermaid_file(visit: Visit) -> Response:
    shown = await _read(visit)
    if isinstance(shown, Response):
        return shown
    return _file(
        dag_mermaid(shown.nodes, edges_of(shown.tasks), title=shown.dag.title),
        "text/plain; charset=utf-8",
        f"{shown.dag.id}.mmd",
    )


# What is done to a DAG.


@pages.action("/dags/{id}/cancel")
async def cancel(visit: Visit) -> Done:
    cancelled = await visit.engine.cancel.cancel_dag(
        visit.path["id"], visit.form.get("reason", "cancelled on the dashboard")
    )
    count = len(cancelled)
    return Done(_address(visit), f"Cancelled {count:,} task{'' if count == 1 else 's'}.")


@pages.action("/dags/{id}/budget")
async def change_budget(visit: Visit) -> Done | View | Response:
    try:
        how, amount = visit.form.get("how"), visit.form.number("usd")
        if how not in {"add", "set", "none"}:
            raise InvalidInputError(errors=[("how", "must be add, set or none")])  # noqa: TRY301 - as the others
        if how != "none" and amount is None:
            raise InvalidInputError(errors=[("usd", "is missing: how much?")])  # noqa: TRY301
        await visit.engine.budgets.change_dag(
            visit.path["id"],
            ceiling_usd=None if how == "none" else amount if how == "set" else UNSET,
            add_usd=amount if how == "add" else None,
            title=None,
        )
    except InvalidInputError as error:
        view = await _view(visit)
        return view.refused(error) if isinstance(view, View) else view
    return Done(_address(visit), "The budget is changed. Tasks that it can pay for run now.")


@pages.action("/dags/{id}/retry")
async def retry_failed(visit: Visit) -> Done:
    wanted = TaskFilter(dag_id=visit.path["id"], status=(Status.DEAD_LETTERED,))
    count = (await visit.engine.matching.retry(wanted)).count
    what = "task; what waits for it" if count == 1 else "tasks; what waits for them"
    return Done(_address(visit), f"Retried {count:,} failed {what} follows.")


# How it is shown.


class _Shown(Struct, frozen=True):
    dag: Dag
    tasks: Sequence[Task]
    #: The children of lists, counted.
    lists: Mapping[str, ListItems]
    #: Lists whose children are shown.
    opened: Sequence[str]

    @property
    def nodes(self) -> list[DagNode]:
        return nodes_of(self.tasks, datetime.now(UTC), opened=self.opened, lists=self.lists)

    @property
    def items(self) -> dict[str, int]:
        """The number of children that aren't shown, by the task with their list."""
        return {name: each.counts.total() for name, each in self.lists.items() if name not in self.opened}


async def _read(visit: Visit) -> _Shown | Response:
    """The DAG with its tasks, or the address of the one that a short id means."""
    name = visit.path["id"]
    try:
        found = await visit.engine.read.dag(name)
    except NotFoundError:
        candidates = await visit.engine.read.find_ids(name, "dag")
        if len(candidates) != 1:
            raise
        return RedirectResponse(f"/dags/{quote(candidates[0], safe='')}", 303)
    opened = visit.query.all("open")
    read = await visit.engine.read.dag_tasks(found.id, opened=opened, most=_MOST_TASKS)
    return _Shown(found, read.tasks, read.lists, opened)


def _is_collapsed(visit: Visit) -> bool | None:
    """What the address asks for; None: as the number of tasks suggests."""
    return {"yes": True, "no": False}.get(visit.query.get("collapse"))


def _picture(shown: _Shown, visit: Visit) -> Markup:
    picture = DagPicture(
        shown.nodes, edges_of(shown.tasks), collapse=_is_collapsed(visit), expanded=shown.opened
    )

    def link(box: Box) -> str:
        if stands_for_several(box):
            opened = "&".join(f"open={quote(name, safe='')}" for name in (*shown.opened, box.id))
            return f"{_address(visit)}?{opened}"
        return f"/tasks/{quote(box.id, safe='')}"

    return Markup(picture.svg(title=shown.dag.title, standalone=False, link=link))  # noqa: S704 - it escapes


class Blocker(NamedTuple):
    task: Task
    #: Unfinished tasks that wait for it, directly or not.
    behind: int


def _blockers(tasks: Sequence[Task]) -> list[Blocker]:
    """Tasks that could be worked on, by how much unfinished work waits behind them."""
    finished = {Status.COMPLETED, Status.CANCELLED}
    unfinished = {task.id: task for task in tasks if task.status not in finished}
    waits_for = {
        name: [upstream for upstream in task.depends_on if upstream in unfinished]
        for name, task in unfinished.items()
    }
    behind: dict[str, set[str]] = {name: set() for name in unfinished}
    for name in reversed(graph.order(waits_for)):
        for upstream in waits_for[name]:
            behind[upstream] |= {name, *behind[name]}
    first = [Blocker(task, len(behind[name])) for name, task in unfinished.items() if not waits_for[name]]
    return sorted((each for each in first if each.behind), key=lambda each: -each.behind)[:_BLOCKERS]


class WorkPeriod(NamedTuple):
    """When a task was worked on, in percent of the DAG's time."""

    start: float
    width: float


def _spans(tasks: Sequence[Task]) -> Mapping[str, WorkPeriod]:
    started = {task.id: task.first_started_at for task in tasks if task.first_started_at is not None}
    if not started:
        return {}
    now = datetime.now(UTC)
    ends = {task.id: task.ended_at or now for task in tasks if task.id in started}
    begin = min(started.values())
    whole = max((max(ends.values()) - begin).total_seconds(), 0.001)
    spans = {}
    for name, at in started.items():
        start = (at - begin).total_seconds() / whole * 100
        width = max((ends[name] - at).total_seconds() / whole * 100, 0.5)
        spans[name] = WorkPeriod(round(min(start, 99.5), 2), round(width, 2))
    return spans


class StateShare(NamedTuple):
    status: str
    number: int
    #: In percent: where its part of a bar begins, and how wide it is.
    start: float
    width: float


def _states(counts: Mapping[str, int]) -> list[StateShare]:
    """The parts of a bar, in the order of the states."""
    total = max(sum(counts.values()), 1)
    shares, start = [], 0.0
    for status in sorted(Status.in_order(counts), key=lambda status: status is not Status.COMPLETED):
        if count := counts[status]:
            width = count / total * 100
            shares.append(StateShare(status.value, count, round(start, 2), round(width, 2)))
            start += width
    return shares


def _address(visit: Visit) -> str:
    return f"/dags/{quote(visit.path['id'], safe='')}"


def _file(text: str, media_type: str, name: str) -> Response:
    headers: dict[str, Any] = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(text, media_type=media_type, headers=headers)
