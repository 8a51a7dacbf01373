"""Tasks: the list with its filters, search, and what is done to many at once."""

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from msgspec import Struct
from starlette.responses import RedirectResponse, Response

from lineshaft.dashboard.pages.overview import WORDS
from lineshaft.dashboard.visit import EVERYTHING, Done, Pages, Values, View, Visit
from lineshaft.engine.read.ids import IdKind
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.model.printable import printable
from lineshaft.model.states import ENDED, LIVE, TRANSIENT, Status
from lineshaft.model.storable import is_storable
from lineshaft.types import Page, Scope, Stats, Task, TaskFilter, TaskOrder, Why
from lineshaft.types.filters import MatchedTasks

pages = Pages()

_ROWS = 50
#: Tasks that can be chosen one by one, and those of a bulk action that are shown before it.
_MOST_CHOSEN, _SAMPLE = 500, 10
#: Lanes of a page whose tasks are explained.
_MOST_LANES = 10
#: A bulk action stops after this time, reports what it did, and offers to continue.
_LONGEST_SEC = 15.0
_CHUNK = 100
_MOST_TEXT = 1_000
#: Fields of the filter as they are in the address, with the flags of the command line.
_TEXTS = {
    "q": "--search",
    "type": "--type",
    "agent_id": "--agent-id",
    "tag": "--tag",
    "created_by": "--created-by",
    "dag_id": "--dag-id",
    "parent_id": "--parent-id",
}
_LABELS = {
    "q": "title contains",
    "type": "type",
    "agent_id": "agent",
    "tag": "tag",
    "created_by": "created by",
    "dag_id": "DAG",
    "parent_id": "parent",
    "status": "status",
}
#: In the order in which a task passes through them.
_TABS = tuple(status for status in Status if status not in TRANSIENT)


class TaskListQuery(Struct, frozen=True):
    """The filter of an address; what is not valid in it is left out."""

    filter: TaskFilter
    order: str
    cursor: str | None
    #: As in the address, without the cursor.
    fields: dict[str, list[str]]

    @property
    def query(self) -> str:
        return urlencode(self.fields, doseq=True)

    @property
    def filters(self) -> dict[str, list[str]]:
        return {name: values for name, values in self.fields.items() if name != "order"}

    @property
    def described(self) -> str:
        return ", ".join(f"{_LABELS[name]} {' or '.join(values)}" for name, values in self.filters.items())

    @property
    def flags(self) -> str:
        """The same filter on the command line."""
        flags = {**_TEXTS, "status": "--status"}
        return " ".join(
            f"{flags[name]} {shlex.quote(printable(value))}"
            for name, values in self.filters.items()
            for value in values
        )


async def wanted_tasks(visit: Visit, values: Values) -> TaskListQuery:
    fields: dict[str, list[str]] = {}
    if statuses := [name for name in map(str.upper, values.all("status")) if name in _TABS]:
        fields["status"] = statuses
    for name in _TEXTS:
        if given := [text for text in values.all(name) if is_storable(text) and len(text) <= _MOST_TEXT]:
            fields[name] = given
    if "dag_id" in fields:
        fields["dag_id"] = [await _whole_dag_id(visit, text) for text in fields["dag_id"]]
    wanted = TaskFilter(**fields)  # type: ignore[arg-type]  # names of its fields
    order = TaskOrder.CREATED_AT
    if values.get("order") == TaskOrder.PRIORITY and not ENDED & set(statuses):
        order = TaskOrder.PRIORITY
        fields["order"] = [order]
    return TaskListQuery(wanted, order, values.get("cursor") or None, fields)


async def _whole_dag_id(visit: Visit, text: str) -> str:
    found = await visit.engine.read.find_ids(text, "dag")
    return found[0] if len(found) == 1 else text


@pages.page("/tasks")
async def tasks(visit: Visit) -> View:
    wanted = await wanted_tasks(visit, visit.query)
    page = await _page(visit, wanted)
    # The figures are those of all tasks, so they say nothing about a filter.
    stats = None if wanted.filters.keys() - {"status"} else await visit.engine.read.stats()
    context = {
        "wanted": wanted,
        "page": page,
        "tabs": _tabs(wanted, stats),
        "stuck": await _stuck(visit, page.items),
        "can_order": not ENDED & set(wanted.fields.get("status", ())),
        "suggestions": _suggestions(page),
        "verbs": [verb for verb in VERBS.values() if verb.suits(wanted)],
        "without_cursor": f"/tasks?{wanted.query}",
        "labels": _LABELS,
        "without": {name: _without(wanted, name) for name in wanted.filters},
    }
    return View(
        "tasks.html",
        "Tasks",
        context,
        topics=frozenset({EVERYTHING}),
        at_most_every_sec=1.0,
        # Times of waiting tasks pass without an event.
        refresh_sec=15.0,
    )


async def _page(visit: Visit, wanted: TaskListQuery) -> Page[Task]:
    read = visit.engine.read
    try:
        return await read.tasks(wanted.filter, order=wanted.order, limit=_ROWS, cursor=wanted.cursor)
    except InvalidInputError:
        if wanted.cursor is None:
            raise
        # The cursor of another order, or a damaged one.
        return await read.tasks(wanted.filter, order=wanted.order, limit=_ROWS)


async def _stuck(visit: Visit, tasks: Sequence[Task]) -> dict[str, str]:
    """Why READY tasks stay so, by their ids. Tasks of one lane have the same agents: one of each is asked."""
    lanes: dict[object, list[str]] = {}
    for task in tasks:
        if task.status is Status.READY and task.parked in {None, "fair"}:
            wishes = (task.required_capabilities, task.model_preferences, task.fallback_models)
            lanes.setdefault((task.type, str(wishes), task.max_cost_usd), []).append(task.id)
    asked = list(lanes.values())[:_MOST_LANES]
    found = await asyncio.gather(*(visit.engine.read.why(ids[0]) for ids in asked), return_exceptions=True)
    words: dict[str, str] = {}
    for ids, why in zip(asked, found, strict=True):
        # The task may have been deleted meanwhile.
        if isinstance(why, Why) and why.reasons:
            words |= dict.fromkeys(ids, WORDS.get(why.reasons[0].code, why.reasons[0].detail))
    return words


class Tab(Struct, frozen=True):
    label: str
    status: Status | None
    href: str
    current: bool
    #: Empty: it isn't known for these filters.
    count: str


def _tabs(wanted: TaskListQuery, stats: Stats | None) -> list[Tab]:
    chosen = wanted.fields.get("status", [])
    others = {name: values for name, values in wanted.fields.items() if name != "status"}
    tabs = [Tab("All", None, f"/tasks?{urlencode(others, doseq=True)}", not chosen, "")]
    for status in _TABS:
        own = {**others, "status": [status.value]}
        if status in ENDED:
            own.pop("order", None)
        count = "" if stats is None else _count(stats, status)
        tabs.append(
            Tab(status, status, f"/tasks?{urlencode(own, doseq=True)}", chosen == [status.value], count)
        )
    return tabs


def _count(stats: Stats, status: Status) -> str:
    return rough(stats.by_status.get(status, 0), exact=status not in stats.by_status_estimated)


def rough(count: int, *, exact: bool) -> str:
    """A number of tasks; one that was estimated says so."""
    if exact:
        return f"{count:,}"
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count // size}{unit}+"
    return f"{count}+"


def _suggestions(page: Page[Task]) -> dict[str, list[str]]:
    """Values of the filters that occur on this page."""
    found = {
        "type": {task.type for task in page.items},
        "agent_id": {task.claim.agent_id for task in page.items if task.claim.agent_id},
        "tag": {tag for task in page.items for tag in task.tags},
        "created_by": {task.created_by for task in page.items if task.created_by},
    }
    return {name: sorted(values)[:_ROWS] for name, values in found.items()}


def _without(wanted: TaskListQuery, name: str) -> str:
    return urlencode({key: values for key, values in wanted.fields.items() if key != name}, doseq=True)


# Search.


@pages.page("/search")
async def search(visit: Visit) -> Response:
    """An id, or the short form of one, leads to its page; anything else is part of a title."""
    text = visit.query.get("q")[:_MOST_TEXT]
    to = f"/tasks?{urlencode({'q': text})}" if text else "/tasks"
    # A standalone task and its virtual DAG have the same short form; its task is what people mean.
    kinds: tuple[IdKind, ...] = ("dag", "task") if text.startswith("dag_") else ("task", "dag")
    for kind in kinds if text else ():
        found = await visit.engine.read.find_ids(text, kind)
        if len(found) == 1:
            to = f"/{kind}s/{quote(found[0], safe='')}"
            break
    return RedirectResponse(to, 303, headers={"Cache-Control": "no-store"})


# Many at once.


class Verb(Struct, frozen=True):
    name: str
    done: str
    #: What it can be done to.
    statuses: frozenset[Status]
    consequence: str

    def suits(self, wanted: TaskListQuery) -> bool:
        """Whether it can be done to any task that matches."""
        statuses = wanted.fields.get("status", [])
        return not statuses or any(status in self.statuses for status in statuses)

    async def find(self, visit: Visit, wanted: TaskFilter) -> MatchedTasks:
        matching = visit.engine.matching
        if self.name == "cancel":
            return await matching.cancel(wanted, "", dry_run=True)
        return await matching.retry(wanted, dry_run=True)

    def change(self, visit: Visit, reason: str) -> Callable[[list[str]], Awaitable[MatchedTasks]]:
        matching = visit.engine.matching
        if self.name == "cancel":
            return lambda ids: matching.cancel_tasks(ids, reason)
        return matching.retry_tasks


VERBS = {
    "cancel": Verb(
        "cancel",
        "Cancelled",
        LIVE,
        "Agents that work on them are stopped at their next heartbeat. Children and tasks that depend on "
        "them are cancelled too.",
    ),
    "retry": Verb(
        "retry",
        "Retried",
        frozenset({Status.DEAD_LETTERED, Status.CANCELLED, Status.RETRYING}),
        "Dead letters and cancelled tasks start again with fresh counters; tasks that wait for a retry are "
        "due at once. One that can't be retried is left as it is.",
    ),
}


class Choice(Struct, frozen=True):
    """The tasks of a bulk action: those that were ticked, or all that match a filter."""

    verb: Verb
    wanted: TaskListQuery
    chosen: list[str]
    found: MatchedTasks

    @property
    def back(self) -> str:
        return f"/tasks?{self.wanted.query}"

    @property
    def command(self) -> str:
        if not self.chosen:
            return f"lineshaft task {self.verb.name}-matching {self.wanted.flags}"
        ids = " ".join(shlex.quote(printable(name)) for name in self.found.ids[:1])
        more = "   # and so on" if self.found.count > 1 else ""
        return f"lineshaft task {self.verb.name} {ids}{more}"


def _verb(visit: Visit) -> Verb:
    found = VERBS.get(visit.path["verb"])
    if found is None:
        raise NotFoundError(f"There is no page {visit.url}.")
    return found


async def _choice(visit: Visit, values: Values) -> Choice:
    verb = _verb(visit)
    wanted = await wanted_tasks(visit, values)
    chosen = [name for name in values.all("id") if is_storable(name)][:_MOST_CHOSEN]
    if chosen:
        known = await visit.engine.read.tasks_by_id(chosen)
        ids = [task.id for task in known if task.status in verb.statuses]
        return Choice(verb, wanted, chosen, MatchedTasks(ids, len(ids)))
    return Choice(verb, wanted, [], await verb.find(visit, wanted.filter))


async def _confirm(visit: Visit, choice: Choice) -> View:
    sample = await visit.engine.read.tasks_by_id(choice.found.ids[:_SAMPLE])
    verb = choice.verb
    title = f"{verb.name.capitalize()} {choice.found.count:,} task{'' if choice.found.count == 1 else 's'}"
    context: dict[str, Any] = {"choice": choice, "sample": sample, "question": f"{title}?"}
    return View("bulk.html", title, context)


@pages.page("/bulk/{verb}", Scope.OPERATE)
async def confirm(visit: Visit) -> View:
    """Count exactly what would be changed, and ask."""
    return await _confirm(visit, await _choice(visit, visit.query))


@pages.action("/bulk/{verb}", Scope.OPERATE)
async def change_many(visit: Visit) -> Done | View:
    """In batches, for a bounded time: what is done stays done."""
    choice = await _choice(visit, visit.form)
    verb = choice.verb
    reason = visit.form.get("reason")[:_MOST_TEXT] or f"{verb.done.lower()} by {visit.actor}"
    change = verb.change(visit, reason)
    ids, done, looked_at = choice.found.ids, 0, 0
    end = time.monotonic() + _LONGEST_SEC
    while looked_at < len(ids) and time.monotonic() < end:
        batch = ids[looked_at : looked_at + _CHUNK]
        done += (await change(batch)).count
        looked_at += len(batch)
    left = len(ids) - looked_at
    message = f"{verb.done} {done:,} task{'' if done == 1 else 's'}."
    if done < looked_at:
        message += f" {looked_at - done:,} had changed in the meantime and were left as they were."
    if not left:
        return Done(choice.back, message)
    message += f" {left:,} are left: confirm again to continue."
    rest = {"id": ids[looked_at:]} if choice.chosen else choice.wanted.fields
    return Done(f"/bulk/{verb.name}?{urlencode(rest, doseq=True)}", message)
