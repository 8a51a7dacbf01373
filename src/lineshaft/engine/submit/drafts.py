"""Drafts of new tasks: checked, numbered and linked in memory, before anything is written."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar, overload

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lineshaft.engine.submit.surface import stored_surface
from lineshaft.errors import InvalidInputError
from lineshaft.ids import new_id
from lineshaft.model import graph
from lineshaft.model.admission import locks_of
from lineshaft.model.budget import money
from lineshaft.model.fields import RETURN, STEERING, check_fields
from lineshaft.model.idempotency import content_hash
from lineshaft.model.parts import ForEach, Part, Source, StoredForEach, part_named
from lineshaft.model.resolving import Resolver
from lineshaft.model.tasks import DEFAULT_RULES, MAX_CHILD_DEPTH, NewTask, TaskRow, TaskRules

T = TypeVar("T")
#: Names of inputs, with the upstream tasks by key or id.
Inputs = Mapping[str, Source | Sequence[Source]]
_NONE: Inputs = MappingProxyType({})


class Draft(msgspec.Struct, eq=False, kw_only=True):
    """A new task before it is written. A Struct, because bulk submissions create many."""

    id: str
    #: Shared by uniform tasks of a call; the spec is separate.
    row: TaskRow
    spec: bytes
    #: What a compatible API received and returns unchanged.
    surface: bytes | None = None
    place: str
    parent_id: str | None
    dag_id: str
    #: None while the DAG is virtual.
    live_dag_id: str | None
    #: Dependencies as the caller wrote them: keys of the call, or ids.
    requested: tuple[str, ...] = ()
    depends_on: Sequence[str] = ()
    #: What the task gets of others: `inputs`, `depends_on` and `spec.context_refs`.
    inputs: Inputs = _NONE
    #: The list for whose items it has children, in the output of another task of the call.
    over: Part | None = None
    #: Its name in the call.
    key: str | None = None
    batch: "Draft | None" = None
    first_child: "Draft | None" = None
    is_batch: bool = False
    #: It joins an existing DAG, its parent's or the one in `dag_id`, which is found when it is written.
    joins: bool = False
    #: `dag_id` is the caller's.
    names_dag: bool = False
    lock_owner: str | None = None
    content: bytes = b""
    blocked: int = 0
    downstream: int = 0
    lane_id: int = 0

    def stored_inputs(self) -> bytes | None:
        return msgspec.json.encode(self.inputs) if self.inputs else None

    def stored_for_each(self) -> bytes | None:
        asked = self.row.for_each
        if asked is None or self.over is None:
            return None
        return msgspec.json.encode(StoredForEach(asked.over, self.over, asked.max, asked.concurrency))


class DagDraft(Struct, frozen=True):
    id: str
    title: str
    created_by: str | None
    ceiling: Decimal | None = None
    key: str | None = None

    def parameters(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "title": self.title,
            "key": self.key,
            "created_by": self.created_by,
            "ceiling": self.ceiling,
        }


def draft_task(
    task: NewTask,
    *,
    place: str,
    drafts: list[Draft],
    resolver: Resolver,
    dag_id: str | None = None,
    parent: Draft | None = None,
    depth: int = 0,
    keys: Collection[str] = (),
) -> Draft:
    """Check a task and add it, and its children in order, to the drafts.

    `keys`: the other tasks of a DAG.
    """
    row, spec = resolver(task, place=place)
    task_id = task.id or new_id("task")
    joins = parent is None and dag_id is None and (task.parent_id or task.dag_id) is not None
    in_dag = dag_id is not None or bool(task.children)
    dag = dag_id or task.dag_id or (f"dag_{task_id}" if task.id else virtual_dag(task_id))
    if task.on_failure is not None and (task.parent_id is None or parent is not None):
        fault = "is for subtasks, which have a parent and are not part of a batch"
        raise InvalidInputError(errors=[(f"{place}.on_failure" if place else "on_failure", fault)])
    if parent is not None:
        refuse_place(task, place, "its batch", dag_id=dag_id, parent_id=parent.id)
    draft = Draft(
        id=task_id,
        row=row,
        spec=spec,
        surface=stored_surface(task, place),
        place=place,
        parent_id=task.parent_id if parent is None else parent.id,
        dag_id=dag,
        live_dag_id=dag if in_dag and not joins else None,
        batch=parent,
        is_batch=bool(task.children) or row.for_each is not None,
        joins=joins,
        names_dag=task.dag_id is not None,
        lock_owner=None if parent is None else _lock_owner(row, parent, place),
    )
    if task.depends_on or task.inputs or row.context_tasks:
        draft.inputs = _inputs(task, row, place, keys)
        draft.requested = tuple(
            dict.fromkeys(map(_task_of, chain.from_iterable(map(_listed, draft.inputs.values()))))
        )
    if row.for_each is not None:
        draft.over = _over(row.for_each, place, keys if parent is None else ())
        draft.requested = tuple(dict.fromkeys([*draft.requested, draft.over.task]))
    if row.idempotency_key is not None:
        if parent is not None:
            fault = "a child is created with its batch: set the key on the batch"
            raise InvalidInputError(errors=[(f"{place}.idempotency_key", fault)])
        draft.content = content_hash(row.type, msgspec.json.decode(spec))
    drafts.append(draft)
    if task.children:
        if depth >= MAX_CHILD_DEPTH:
            raise InvalidInputError(
                errors=[(f"{place}.children", f"are nested deeper than {MAX_CHILD_DEPTH}")]
            )
        _draft_children(task, draft, drafts=drafts, resolver=resolver, depth=depth, keys=keys)
    return draft


def _inputs(task: NewTask, row: TaskRow, place: str, keys: Collection[str]) -> Inputs:
    declared: dict[str, Source | Sequence[Source]] = {
        name: part_named(of, keys) if isinstance(of, str) else [part_named(one, keys) for one in of]
        for name, of in (task.inputs or {}).items()
    }
    spec: Any = task.spec
    for name in declared:
        if name in spec:
            fault = f"{name!r} is in the spec too: leave it out of one of them"
            raise InvalidInputError(errors=[(f"{place}.inputs" if place else "inputs", fault)])
    refs = {f"task:{name}:output": name for name in row.context_tasks}
    return {name: name for name in task.depends_on} | refs | declared


def _over(for_each: ForEach, place: str, keys: Collection[str]) -> Part:
    named = part_named(for_each.over, keys)
    part = Part(named) if isinstance(named, str) else named
    if part.task not in keys:
        # A list that exists already needs no engine that waits for it.
        fault = (
            f"must begin with the key of a task in the same DAG or spawn, got {for_each.over!r}: the task "
            "becomes one child for each item of the list that the other one returns"
        )
        raise InvalidInputError(errors=[(f"{place}.for_each.over" if place else "for_each.over", fault)])
    return part


def _listed(sources: Source | Sequence[Source]) -> Sequence[Source]:
    return (sources,) if isinstance(sources, str | Part) else sources


def _task_of(source: Source) -> str:
    return source if isinstance(source, str) else source.task


def renamed(inputs: Inputs, ids: Mapping[str, str]) -> Inputs:
    """The same inputs of the tasks with these ids."""
    return {
        name: with_id(of, ids) if isinstance(of, str | Part) else [with_id(one, ids) for one in of]
        for name, of in inputs.items()
    }


@overload
def with_id(source: Part, ids: Mapping[str, str]) -> Part: ...
@overload
def with_id(source: Source, ids: Mapping[str, str]) -> Source: ...
def with_id(source: Source, ids: Mapping[str, str]) -> Source:
    if isinstance(source, str):
        return ids.get(source, source)
    return replace(source, task=ids.get(source.task, source.task))


def refuse_place(
    task: NewTask, place: str, where: str, *, dag_id: str | None = None, parent_id: str | None = None
) -> None:
    """Refuse a DAG or parent of the caller, unless it is this one: the call places the task elsewhere."""
    prefix = f"{place}." if place else ""
    for name, wanted, found in (("dag_id", task.dag_id, dag_id), ("parent_id", task.parent_id, parent_id)):
        if wanted is not None and wanted != found:
            fault = f"is {wanted!r}, but the task belongs to {where}: leave it out"
            raise InvalidInputError(errors=[(f"{prefix}{name}", fault)])


def virtual_dag(task_id: str) -> str:
    """The id of a standalone task's DAG, which has no row, derived from the task's id."""
    return f"dag_{task_id[5:]}"


def _draft_children(
    task: NewTask,
    batch: Draft,
    *,
    drafts: list[Draft],
    resolver: Resolver,
    depth: int,
    keys: Collection[str],
) -> None:
    previous: Draft | None = None
    for number, child in enumerate(task.children):
        inherited = msgspec.structs.replace(
            child,
            lock_key=child.lock_key if _names_locks(child) else task.lock_key,
            lock_keys=child.lock_keys if _names_locks(child) else task.lock_keys,
            priority=task.priority if child.priority is None else child.priority,
            max_attempts=task.max_attempts if child.max_attempts is None else child.max_attempts,
            preset=task.preset if child.preset is None else child.preset,
            created_by=task.created_by if child.created_by is None else child.created_by,
            # A batch has no work of its own to postpone, but its first child has.
            run_at=task.run_at if child.run_at is None and number == 0 else child.run_at,
        )
        below = draft_task(
            inherited,
            place=f"{batch.place}.children[{number}]" if batch.place else f"children[{number}]",
            drafts=drafts,
            resolver=resolver,
            dag_id=batch.dag_id,
            parent=batch,
            depth=depth + 1,
            keys=keys,
        )
        if previous is None:
            batch.first_child = below
        else:
            wait_for(below, [previous.id])
        batch.depends_on = [*batch.depends_on, below.id]
        previous = below


def _names_locks(task: NewTask) -> bool:
    return task.lock_key is not None or bool(task.lock_keys)


def _lock_owner(row: TaskRow, batch: Draft | None, place: str) -> str | None:
    """The outermost batch around a task with a lock of it: it holds its locks for all its tasks."""
    owner = None
    locks = locks_of(row.lock_key, row.admission)
    while locks and batch is not None:
        held = locks_of(batch.row.lock_key, batch.row.admission)
        if not held.keys().isdisjoint(locks):
            owner = batch.id
        for key in held.keys() & locks:
            if held[key] and not locks[key]:
                fault = f"asks for {key!r} alone, which its batch shares: let the batch have it alone"
                raise InvalidInputError(errors=[(f"{place}.lock_keys", fault)])
        batch = batch.batch
    return owner


def check_conflicts(drafts: Sequence[Draft], *, alone: bool) -> None:
    """Refuse an `on_conflict` that these drafts can't have; `alone`: they don't belong to one DAG."""
    keys: dict[str, Draft] = {}
    for draft in drafts:
        how = draft.row.on_conflict
        place = f"{draft.place}." if draft.place else ""
        if how in STEERING and not alone:
            fault = f"can't be {how} for a task of a DAG, or a spawned one: submit it on its own"
            raise InvalidInputError(errors=[(f"{place}on_conflict", fault)])
        if (key := draft.row.idempotency_key) is not None:
            first = keys.setdefault(key, draft)
            if first is not draft and (how != RETURN or first.row.on_conflict != RETURN):
                fault = (
                    f"is that of {first.place} too; with on_conflict, each task of a call needs another one"
                )
                raise InvalidInputError(errors=[(f"{place}idempotency_key", fault)])


def wait_for(draft: Draft, names: Iterable[str]) -> None:
    """Add dependencies. The children of a batch run in sequence, so its first child gets them too."""
    held: Draft | None = draft
    while held is not None:
        held.depends_on = list(dict.fromkeys([*held.depends_on, *names]))
        held = held.first_child


def link(drafts: Iterable[Draft], ids: Mapping[str, str]) -> None:
    """Turn requested dependencies into edges; `ids` has the ids of the call's keys."""
    for draft in drafts:
        if draft.requested:
            wait_for(draft, [ids.get(name, name) for name in draft.requested])
            draft.inputs = renamed(draft.inputs, ids)
            if draft.over is not None:
                draft.over = with_id(draft.over, ids)


def refuse_cycle(drafts: Sequence[Draft], keys_of: Mapping[str, str]) -> None:
    own = {draft.id for draft in drafts}
    later = set(own)
    for draft in drafts:
        if not later.isdisjoint(draft.depends_on):
            break
        later.discard(draft.id)
    else:
        # Each comes after what it depends on, as in most calls.
        return
    named = {
        keys_of.get(draft.id, draft.id): [keys_of.get(name, name) for name in draft.depends_on if name in own]
        for draft in drafts
    }
    graph.order(named)


def place_in_graph(new: Sequence[Draft], satisfied: set[str]) -> None:
    """Set how many tasks each draft waits for, and the length of the path below it."""
    if not any(draft.depends_on for draft in new):
        return
    lengths = graph.downstream_lengths({draft.id: draft.depends_on for draft in new})
    for draft in new:
        draft.blocked = sum(name not in satisfied for name in draft.depends_on)
        draft.downstream = min(lengths[draft.id], 32_000)


#: Standalone tasks of one call.
MAX_BATCH = 10_000
#: The highest limit that an installation may set for the tasks of a DAG.
LARGEST_DAG = 100_000


def draft_each(tasks: Sequence[NewTask], rules: TaskRules) -> tuple[list[Draft], list[Draft]]:
    """Drafts of standalone tasks; and all drafts, including children."""
    check_number(len(tasks))
    drafts: list[Draft] = []
    resolver = Resolver(rules)
    heads = []
    for number, task in enumerate(tasks):
        place = f"tasks[{number}]" if len(tasks) > 1 else ""
        heads.append(draft_task(task, place=place, drafts=drafts, resolver=resolver))
    check_number(len(drafts))
    check_conflicts(drafts, alone=True)
    link(drafts, {})
    return heads, drafts


def draft_dag(
    title: str,
    tasks: Sequence[NewTask],
    *,
    budget_ceiling_usd: Decimal | float | None,
    created_by: str | None,
    idempotency_key: str | None,
    rules: TaskRules,
) -> tuple[DagDraft, dict[str, Draft], list[Draft]]:
    """A DAG, the drafts of its tasks by key; and all drafts, including children."""
    if not tasks:
        raise InvalidInputError(errors=[("tasks", "a DAG needs at least one task")])
    check_dag_size(len(tasks), rules.max_dag_tasks)
    check_fields(title=title)
    dag_id = new_id("dag")
    for number, task in enumerate(tasks):
        refuse_place(task, f"tasks[{number}]", "the new DAG of this call")
    drafts: list[Draft] = []
    heads = draft_by_key(tasks, dag_id, drafts, rules)
    dag = DagDraft(
        id=dag_id,
        title=title,
        created_by=created_by,
        ceiling=None if budget_ceiling_usd is None else money(budget_ceiling_usd, "budget_ceiling_usd"),
        key=idempotency_key,
    )
    if idempotency_key is not None:
        check_fields(idempotency_key=idempotency_key)
    if created_by is not None:
        check_fields(created_by=created_by)
    return dag, heads, drafts


def draft_by_key(
    tasks: Sequence[NewTask], dag_id: str, drafts: list[Draft], rules: TaskRules = DEFAULT_RULES
) -> dict[str, Draft]:
    """Tasks of one call that may depend on each other by `key`; without a key, a task's id is its key."""
    heads: dict[str, Draft] = {}
    resolver = Resolver(rules)
    keys = {key for task in tasks if (key := task.key or task.id) is not None}
    for number, task in enumerate(tasks):
        place = f"tasks[{number}]"
        head = draft_task(task, place=place, drafts=drafts, resolver=resolver, dag_id=dag_id, keys=keys)
        head.key = task.key
        key = task.key or head.id
        if heads.setdefault(key, head) is not head:
            raise InvalidInputError(errors=[(f"{place}.key", f"{key!r} is used twice in this call")])
    check_dag_size(len(drafts), rules.max_dag_tasks)
    check_conflicts(drafts, alone=False)
    link(drafts, {key: head.id for key, head in heads.items()})
    refuse_cycle(drafts, {head.id: key for key, head in heads.items()})
    return heads


async def off_the_loop(tasks: Sequence[NewTask], draft: Callable[[], T]) -> T:
    """Draft in a thread if the tasks have gates: compiling many schemas would block the event loop."""
    if any(task.output is not None or task.children for task in tasks):
        return await asyncio.to_thread(draft)
    return draft()


def check_number(tasks: int) -> None:
    if tasks > MAX_BATCH:
        raise InvalidInputError(
            f"A call can submit at most {MAX_BATCH} tasks, including children; this one has {tasks}. "
            "Split it into several calls."
        )


def check_dag_size(tasks: int, limit: int) -> None:
    if tasks > limit:
        raise InvalidInputError(
            f"A DAG can have at most {limit} tasks, including children; this call has {tasks}. Split it into "
            "several DAGs, or raise LINESHAFT_MAX_DAG_TASKS."
        )
