"""Submitting, reading, funding and cancelling DAGs."""

from msgspec import UNSET

from lineshaft.errors import InvalidInputError
from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.routes import examples, requests, responses
from lineshaft.server.service import Call
from lineshaft.types import Dag, NewDag, Page, Scope, documents

routes = Routes()


@routes.post(
    "/v1/dags",
    Scope.SUBMIT,
    {201: responses.SubmittedDag, 200: responses.SubmittedDag},
    codes=("cycle_detected", "dependency_not_found", "already_exists", "not_found", "rate_limited"),
    example=examples.DAG,
    check_body=requests.check_dag_count,
    simplify=documents.dag,
)
async def submit_dag(call: Call, body: NewDag) -> Answer:
    """Submit tasks that depend on each other by `key`, or on existing ones by id; all or nothing.

    200 with `"duplicate": true` if a DAG with this idempotency key exists.
    """
    requests.check_tasks(body.tasks, keys=True)
    call.principal.check_creator(body.created_by)
    requests.check_creators(call.principal, body.tasks)
    submitted = await call.service.engine.submission.submit_dag(
        body.title,
        body.tasks,
        budget_ceiling_usd=body.budget_ceiling_usd,
        created_by=body.created_by,
        idempotency_key=requests.key_of(call.headers.get("idempotency-key"), body.idempotency_key),
    )
    tasks = {key: task.id for key, task in submitted.tasks.items()}
    if submitted.duplicate:
        dag = await call.service.engine.read.dag(submitted.id)
        return Answer(responses.SubmittedDag(dag, tasks, submitted.tasks, duplicate=True))
    dag_id = submitted.id
    if all(task.duplicate for task in submitted.tasks.values()):
        # All tasks existed before, so no DAG was created: return the DAG of the first task.
        dag_id = (await call.service.engine.read.task(next(iter(tasks.values())))).dag_id
    dag = await call.service.engine.read.dag(dag_id)
    return Answer(responses.SubmittedDag(dag, tasks, submitted.tasks), 201)


@routes.get("/v1/dags", Scope.READ, Page[Dag])
async def list_dags(call: Call, query: requests.DagQuery) -> Answer:
    """List DAGs, newest first, including those of standalone tasks."""
    return Answer(await call.service.engine.read.dags(query, limit=query.limit, cursor=query.cursor))


@routes.get("/v1/dags/{id}", Scope.READ, Dag, codes=("not_found",))
async def get_dag(call: Call) -> Answer:
    """Read a DAG."""
    return await _dag(call)


@routes.patch(
    "/v1/dags/{id}",
    Scope.OPERATE,
    Dag,
    codes=("not_found", "invalid_transition"),
    example={"add_budget_usd": 5},
)
async def change_dag(call: Call, body: requests.ChangeDag) -> Answer:
    """Change the title of a DAG, add to its budget, or set it; null removes the limit.

    Tasks that it can now afford can be claimed at once.
    """
    adds, sets = body.add_budget_usd is not None, body.budget_ceiling_usd is not UNSET
    if adds and sets:
        raise InvalidInputError(
            errors=[("add_budget_usd", "give this, to add to the ceiling, or budget_ceiling_usd, to set it")]
        )
    if not (adds or sets or body.title is not UNSET):
        raise InvalidInputError(
            errors=[("", "nothing to change: give title, add_budget_usd or budget_ceiling_usd")]
        )
    await call.service.engine.budgets.change_dag(
        call.path["id"],
        ceiling_usd=body.budget_ceiling_usd,
        add_usd=body.add_budget_usd,
        title=None if body.title is UNSET else body.title,
    )
    return await _dag(call)


@routes.post(
    "/v1/dags/{id}/cancel",
    Scope.OPERATE,
    Dag,
    codes=("not_found",),
    example={"reason": "the customer left"},
)
async def cancel_dag(call: Call, body: requests.CancelDag) -> Answer:
    """Cancel all tasks of a DAG that have not ended, and tasks elsewhere that depend on them."""
    await call.service.engine.operations.cancel_dag(call.path["id"], body.reason)
    return await _dag(call)


async def _dag(call: Call) -> Answer:
    return Answer(await call.service.engine.read.dag(call.path["id"]))
