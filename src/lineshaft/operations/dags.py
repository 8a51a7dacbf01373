"""Submitting, reading, funding and cancelling DAGs."""

from collections.abc import Mapping
from decimal import Decimal

from msgspec import UNSET, Struct, UnsetType

from lineshaft.engine.caller import caller
from lineshaft.errors import InvalidInputError
from lineshaft.model.fields import check_fields
from lineshaft.operations import examples, new_tasks
from lineshaft.operations.operation import Engine, operation
from lineshaft.operations.wire import Body, Header
from lineshaft.types import Dag, DagFilter, NewDag, Page, Scope, Submitted, documents
from lineshaft.types.page import DEFAULT_LIMIT
from lineshaft.types.request import ById, Limit, Name, OnePage, Request, Text


class SubmitDag(Request, frozen=True, kw_only=True):
    dag: Body[NewDag]
    idempotency_key: Header = None

    def check(self) -> None:
        new_tasks.check_dag(self.dag)


class CreatedDag(Struct, frozen=True):
    dag: Dag
    #: By the keys of the request.
    tasks: Mapping[str, str]
    #: The same, with whether each task existed before.
    submitted: Mapping[str, Submitted]
    duplicate: bool | UnsetType = UNSET


@operation(
    "POST /v1/dags",
    Scope.SUBMIT,
    created=lambda submitted: submitted.duplicate is UNSET,
    # With a key it is created once, however often it is sent.
    repeatable=lambda request: (request.idempotency_key or request.dag.idempotency_key) is not None,
    codes=(
        "cycle_detected",
        "dependency_not_found",
        "already_exists",
        "not_found",
        "rate_limited",
        "quota_full",
    ),
    example=examples.DAG,
    check_body=new_tasks.check_dag_count,
    simplify=documents.dag,
)
async def submit_dag(engine: Engine, request: SubmitDag) -> CreatedDag:
    """Submit tasks that depend on each other by `key`, or on existing ones by id; all or nothing.

    200 with `"duplicate": true` if a DAG with this idempotency key exists.
    """
    dag = request.dag
    new_tasks.check_tasks(dag.tasks, keys=True)
    caller().check_creator(dag.created_by)
    new_tasks.check_creators(dag.tasks)
    submitted = await engine.submission.submit_dag(
        dag.title,
        dag.tasks,
        budget_ceiling_usd=dag.budget_ceiling_usd,
        created_by=dag.created_by,
        idempotency_key=new_tasks.key_of(request.idempotency_key, dag.idempotency_key),
    )
    tasks = {key: task.id for key, task in submitted.tasks.items()}
    if submitted.duplicate:
        return CreatedDag(await engine.read.dag(submitted.id), tasks, submitted.tasks, duplicate=True)
    dag_id = submitted.id
    if all(task.duplicate for task in submitted.tasks.values()):
        # All tasks existed before, so no DAG was created: return the DAG of the first task.
        dag_id = (await engine.read.task(next(iter(tasks.values())))).dag_id
    return CreatedDag(await engine.read.dag(dag_id), tasks, submitted.tasks)


class ListDags(DagFilter, frozen=True, kw_only=True):
    limit: Limit = DEFAULT_LIMIT
    cursor: str | None = None

    check = OnePage.check


@operation("GET /v1/dags", Scope.READ)
async def list_dags(engine: Engine, request: ListDags) -> Page[Dag]:
    """List DAGs, newest first, including those of standalone tasks."""
    return await engine.read.dags(request, limit=request.limit, cursor=request.cursor)


@operation("GET /v1/dags/{id}", Scope.READ, codes=("not_found",))
async def get_dag(engine: Engine, request: ById) -> Dag:
    """Read a DAG."""
    return await engine.read.dag(request.id)


class ChangeDag(ById, frozen=True, kw_only=True):
    title: Name | UnsetType = UNSET
    add_budget_usd: Decimal | float | None = None
    #: None: no limit.
    budget_ceiling_usd: Decimal | float | UnsetType | None = UNSET

    def check(self) -> None:
        if self.title is not UNSET:
            check_fields(title=self.title)


@operation(
    "PATCH /v1/dags/{id}",
    Scope.OPERATE,
    repeatable=lambda request: request.add_budget_usd is None,
    codes=("not_found", "invalid_transition"),
    example={"add_budget_usd": 5},
)
async def change_dag(engine: Engine, request: ChangeDag) -> Dag:
    """Change the title of a DAG, add to its budget, or set it; null removes the limit.

    Tasks that it can now afford can be claimed at once.
    """
    adds, sets = request.add_budget_usd is not None, request.budget_ceiling_usd is not UNSET
    if adds and sets:
        fault = "give this, to add to the ceiling, or budget_ceiling_usd, to set it"
        raise InvalidInputError(errors=[("add_budget_usd", fault)])
    if not (adds or sets or request.title is not UNSET):
        fault = "nothing to change: give title, add_budget_usd or budget_ceiling_usd"
        raise InvalidInputError(errors=[("", fault)])
    await engine.budgets.change_dag(
        request.id,
        ceiling_usd=request.budget_ceiling_usd,
        add_usd=request.add_budget_usd,
        title=None if request.title is UNSET else request.title,
    )
    return await engine.read.dag(request.id)


class CancelDag(ById, frozen=True, kw_only=True):
    reason: Text = "cancelled by hand"


@operation(
    "POST /v1/dags/{id}/cancel",
    Scope.OPERATE,
    repeatable=True,
    codes=("not_found",),
    example={"reason": "the customer left"},
)
async def cancel_dag(engine: Engine, request: CancelDag) -> Dag:
    """Cancel all tasks of a DAG that have not ended, and tasks elsewhere that depend on them."""
    await engine.cancel.cancel_dag(request.id, request.reason)
    return await engine.read.dag(request.id)
