"""Checks of new tasks in requests, and their idempotency keys."""

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lineshaft.engine.caller import caller
from lineshaft.engine.submit.drafts import (
    LARGEST_DAG,
    MAX_BATCH,
    check_dag_size,
    check_number,
    draft_by_key,
    draft_dag,
    draft_each,
)
from lineshaft.errors import InvalidInputError
from lineshaft.model.storable import is_storable
from lineshaft.model.tasks import Gate, NewTask, TaskRules
from lineshaft.types import NewDag

#: Characters of an Idempotency-Key; the database indexes it.
MAX_KEY = 1_000


# What a client checks before it sends tasks, as the engine checks them.


def _checked_by_server(_: Sequence[Gate]) -> Iterable[tuple[str, str]]:
    """Only the server knows which gates are configured."""
    return ()


_CHECKED_BY_SERVER = TaskRules(_checked_by_server, max_dag_tasks=LARGEST_DAG)


def check_batch(tasks: Sequence[NewTask]) -> None:
    draft_each(tasks, _CHECKED_BY_SERVER)


def check_children(tasks: Sequence[NewTask], parent_id: str) -> None:
    draft_by_key([replace(task, parent_id=parent_id) for task in tasks], "", [], _CHECKED_BY_SERVER)


def check_dag(dag: NewDag) -> None:
    draft_dag(
        dag.title,
        dag.tasks,
        budget_ceiling_usd=dag.budget_ceiling_usd,
        created_by=dag.created_by,
        idempotency_key=dag.idempotency_key,
        rules=_CHECKED_BY_SERVER,
    )


# What a server checks before it decodes tasks.


class _CountedTask(Struct, frozen=True, gc=False):
    children: "tuple[_CountedTask, ...]" = ()


class _Tasks(Struct, frozen=True):
    tasks: tuple[_CountedTask, ...] = ()
    #: If the body is a single task, its children.
    children: tuple[_CountedTask, ...] = ()


_count = msgspec.json.Decoder(_Tasks).decode
_SHORTEST_TASK = len('{"type":""}')


def check_task_count(body: bytes) -> None:
    """Refuse too many tasks before they are decoded, which takes much longer than counting.

    Raises the decoder's error if the body has the wrong form.
    """
    if len(body) > MAX_BATCH * _SHORTEST_TASK:
        counted = _count(body)
        check_number(_number_of(counted.tasks) + _number_of(counted.children))


def check_dag_count(body: bytes) -> None:
    """As `check_task_count`, for tasks of one DAG: the engine knows the limit of the installation."""
    if len(body) > LARGEST_DAG * _SHORTEST_TASK:
        check_dag_size(_number_of(_count(body).tasks), LARGEST_DAG)


def _number_of(tasks: tuple[_CountedTask, ...]) -> int:
    return len(tasks) + sum(_number_of(task.children) for task in tasks if task.children)


# What a handler checks.


def check_tasks(tasks: Sequence[NewTask], *, keys: bool, place: str = "tasks") -> None:
    """Refuse keys of tasks that can't depend on each other; `keys`: whether these tasks may have a key."""
    faults = []
    for number, task in enumerate(tasks):
        where = f"{place}[{number}]." if place else ""
        if task.key is not None and not keys:
            faults.append((f"{where}key", "unknown field: tasks that depend on each other are a DAG"))
        if task.children:
            check_tasks(task.children, keys=True, place=f"{where}children")
    if faults:
        raise InvalidInputError(errors=faults)


def check_creators(tasks: Iterable[NewTask]) -> None:
    """Refuse a `created_by` of others, if the caller is bound to an agent."""
    who = caller()
    if who.agent_id is not None:
        for task in tasks:
            who.check_creator(task.created_by)
            check_creators(task.children)


def key_of(header: str | None, body: str | None) -> str | None:
    """The idempotency key, from the header or the body."""
    if header is None:
        return body
    if not header or len(header) > MAX_KEY or not is_storable(header):
        raise InvalidInputError(errors=[("Idempotency-Key", f"must be a text of 1 to {MAX_KEY} characters")])
    if body is not None and body != header:
        raise InvalidInputError(
            errors=[("idempotency_key", f"is {body!r}, but the header Idempotency-Key is {header!r}")]
        )
    return header


def keyed(tasks: Sequence[NewTask], header: str | None, numbers: Iterable[int]) -> list[NewTask]:
    """Those without an idempotency key get one derived from the request's and their number in it."""
    key = key_of(header, None)
    if key is None:
        return list(tasks)
    return [
        task if task.idempotency_key is not None else replace(task, idempotency_key=_key_of_item(key, number))
        for task, number in zip(tasks, numbers, strict=False)
    ]


def _key_of_item(key: str, number: int) -> str:
    numbered = f"{key}#{number}"
    return numbered if len(numbered) <= MAX_KEY else f"{hashlib.sha256(key.encode()).hexdigest()}#{number}"


def with_key(task: NewTask, key: str | None) -> NewTask:
    return task if key == task.idempotency_key else replace(task, idempotency_key=key)
