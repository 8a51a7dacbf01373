"""Submitting, reading and operating tasks."""

from decimal import Decimal
from itertools import count
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, field
from msgspec.structs import replace

from lineshaft import types as t
from lineshaft.errors import InvalidInputError
from lineshaft.integrations.loki import records
from lineshaft.operations import examples, new_tasks
from lineshaft.operations.operation import Engine, operation
from lineshaft.operations.wire import Body, Header
from lineshaft.types import Page, Scope, Task, documents
from lineshaft.types.features import FEATURES
from lineshaft.types.json import null
from lineshaft.types.page import DEFAULT_LIMIT
from lineshaft.types.request import ActById, ById, Limit, Name, OnePage, Reason, Request, Seconds, Text
from lineshaft.types.waits import NewSignal, SentSignal

#: How many ids one call may ask for.
MAX_IDS = 10_000
_SUBMIT_CODES = ("dependency_not_found", "already_exists", "not_found", "rate_limited", "quota_full")


class SubmitTask(Request, frozen=True, kw_only=True):
    #: `Raw` in another format.
    task: Body[t.NewTask]
    idempotency_key: Header = None
    #: The body is a record of a `.loki` queue file (docs/loki.md).
    format: Literal["loki"] | None = None

    def new_task(self) -> t.NewTask:
        """The task, with its idempotency key."""
        if self.format is None:
            key = new_tasks.key_of(self.idempotency_key, self.task.idempotency_key)
            return new_tasks.with_key(self.task, key)
        try:
            record = msgspec.json.decode(cast("Raw", self.task))
        except msgspec.ValidationError as error:
            # A number that is too large. What isn't JSON was refused before.
            raise InvalidInputError(errors=[("", str(error))]) from None
        task = records.new_task(record)
        named = record.get("idempotencyKey")
        # A key that is derived from the content counts if there is no other.
        return new_tasks.with_key(task, new_tasks.key_of(self.idempotency_key, named) or task.idempotency_key)


@operation(
    "POST /v1/tasks",
    Scope.SUBMIT,
    created=lambda task: task.duplicate is UNSET and task.replaced is UNSET,
    codes=_SUBMIT_CODES,
    example=examples.TASK,
    check_body=new_tasks.check_task_count,
    simplify=documents.task,
    formats=("loki",),
)
async def submit_task(engine: Engine, request: SubmitTask) -> Task:
    """Submit a task; with `format=loki` a record of a `.loki` queue file.

    200 with `"duplicate": true` and the existing task if one with this idempotency key exists. `on_conflict`
    changes that: `reject` (409), `replace_waiting` (200 with `"replaced": true` if that task waits) or
    `cancel_running` (a running one is cancelled, and this one created).
    """
    new = request.new_task()
    new_tasks.check_tasks([new], keys=False, place="")
    new_tasks.check_creators([new])
    (submitted,) = await engine.submission.submit([new])
    task = await engine.read.task(submitted.id)
    return with_outcome(task, submitted)


def with_outcome(task: Task, submitted: t.Submitted) -> Task:
    """A task with what its submission found."""
    return replace(
        task,
        duplicate=submitted.duplicate or UNSET,
        mismatch=submitted.mismatch or UNSET,
        replaced=submitted.replaced or UNSET,
    )


class TaskBatch(Request, frozen=True, kw_only=True):
    tasks: Annotated[list[t.NewTask], Meta(min_length=1)]


class SubmitBatch(TaskBatch, frozen=True, kw_only=True):
    idempotency_key: Header = None

    def check(self) -> None:
        new_tasks.check_batch(self.tasks)


class SubmittedItems(Struct, frozen=True):
    items: list[t.Submitted]


@operation(
    "POST /v1/tasks/batch",
    Scope.SUBMIT,
    created=True,
    codes=_SUBMIT_CODES,
    example={"tasks": [examples.TASK]},
    check_body=new_tasks.check_task_count,
    simplify=documents.with_tasks,
)
async def submit_batch(engine: Engine, request: SubmitBatch) -> SubmittedItems:
    """Submit up to 10,000 tasks, all or nothing.

    They may depend on existing tasks; tasks that depend on each other are a DAG.
    """
    new_tasks.check_tasks(request.tasks, keys=False)
    new_tasks.check_creators(request.tasks)
    tasks = new_tasks.keyed(request.tasks, request.idempotency_key, count())
    return SubmittedItems(await engine.submission.submit(tasks))


class ListTasks(t.TaskFilter, frozen=True, kw_only=True):
    order: str = t.TaskOrder.CREATED_AT
    limit: Limit = DEFAULT_LIMIT
    cursor: str | None = None

    check = OnePage.check


@operation("GET /v1/tasks", Scope.READ)
async def list_tasks(engine: Engine, request: ListTasks) -> Page[Task]:
    """List tasks, newest first, or in the order of the queue with `order=priority`.

    A repeated filter matches any of its values. A page may be short and have more behind it: continue until
    `next_cursor` is null.
    """
    return await engine.read.tasks(request, order=request.order, limit=request.limit, cursor=request.cursor)


class GetTask(ById, frozen=True, kw_only=True):
    #: With the data of a large output, which is null otherwise.
    full: bool = False


@operation("GET /v1/tasks/{id}", Scope.READ, codes=("not_found", "payload_too_large"))
async def get_task(engine: Engine, request: GetTask) -> Task:
    """Read a task. With `full=1` its output has the data also if that is large."""
    task = await engine.read.task(request.id)
    return await engine.artifacts.with_data(task) if request.full else task


@operation("GET /v1/tasks/{id}/attempts", Scope.READ, codes=("not_found",))
async def list_attempts(engine: Engine, request: ById) -> Page[t.Attempt]:
    """List all claims of a task, in order, including the current and the successful one."""
    return Page(await engine.read.attempts(request.id))


@operation("GET /v1/tasks/{id}/steps", Scope.READ, response={200: dict[str, Any]}, codes=("not_found",))
async def list_steps(engine: Engine, request: ById) -> dict[str, Raw]:
    """Read results of durable steps by name, in the order in which they were recorded."""
    return await engine.read.steps(request.id)


@operation("GET /v1/tasks/{id}/why", Scope.READ, codes=("not_found",))
async def explain_task(engine: Engine, request: ById) -> t.Why:
    """Explain what a task is waiting for, what it is doing, or how it ended."""
    return await engine.read.why(request.id)


class ChangeTask(ById, frozen=True, kw_only=True):
    change: Body[t.TaskChange]

    def check(self) -> None:
        self.change.wanted()


@operation(
    "PATCH /v1/tasks/{id}",
    Scope.OPERATE,
    codes=("not_found", "invalid_transition"),
    example={"priority": 10, "tags": ["urgent"]},
)
async def change_task(engine: Engine, request: ChangeTask) -> Task:
    """Change priority, deadline, tags or limits of a task that has not ended, or the limits of a dead letter.

    The limits are `max_cost_usd`, `max_total_cost_usd`, `max_attempts` and `max_duration_sec`; a task that is
    held keeps those that its attempt began with. Null removes the deadline or a cost limit.
    The deadline of a task with `expire_at_deadline` can be changed after it ended, to retry or rerun it.
    """
    await engine.edit.edit(request.id, request.change)
    return await engine.read.task(request.id)


class Dependencies(ById, frozen=True, kw_only=True):
    depends_on: Annotated[list[Name], Meta(min_length=1, max_length=10_000)]


@operation(
    "POST /v1/tasks/{id}/dependencies",
    Scope.OPERATE,
    repeatable=True,
    codes=("not_found", "invalid_transition", "dependency_not_found", "cycle_detected"),
    example={"depends_on": ["task_01J8K2M3N4P5Q6R7S8T9V0W1X2"]},
)
async def add_dependencies(engine: Engine, request: Dependencies) -> Task:
    """Add dependencies to a task that has not been claimed yet."""
    await engine.dependencies.add(request.id, request.depends_on)
    return await engine.read.task(request.id)


class Retry(ById, frozen=True, kw_only=True):
    delay_sec: Seconds = 0.0


@operation(
    "POST /v1/tasks/{id}/retry",
    Scope.OPERATE,
    codes=("not_found", "invalid_transition", "already_exists"),
    example={},
)
async def retry_task(engine: Engine, request: Retry) -> Task:
    """Revive a DEAD_LETTERED or CANCELLED task with fresh counters, or retry a RETRYING task now."""
    await engine.revive.retry(request.id, delay_sec=request.delay_sec)
    return await engine.read.task(request.id)


class CorrectCost(ById, frozen=True, kw_only=True):
    reason: Reason
    #: What the task has cost, with nothing disputed any more.
    cost_usd: Decimal | float | None = None
    #: Instead of an amount: what is disputed counts (`accept`), or never does (`refuse`).
    disputed: Literal["accept", "refuse"] | None = None

    @property
    def correction(self) -> t.CostCorrection:
        disputed = None if self.disputed is None else t.Disputed(self.disputed)
        return t.CostCorrection(reason=self.reason, cost_usd=self.cost_usd, disputed=disputed)

    def check(self) -> None:
        self.correction.checked_cost()


@operation(
    "POST /v1/tasks/{id}/cost",
    Scope.OPERATE,
    repeatable=True,
    codes=("not_found",),
    example={"cost_usd": 0.31, "reason": "the agent counted cents as dollars"},
)
async def correct_cost(engine: Engine, request: CorrectCost) -> Task:
    """Correct what a task has cost, or decide on what is disputed of it.

    The difference is booked today: on the task, the agents of its claims, its DAG and the day. Reports that
    come later are compared with earlier reports, not with the corrected cost. The same cost again books
    nothing. An amount also decides on what is disputed: it is refused, as far as it isn't in the amount.
    """
    await engine.corrections.correct(request.id, request.correction)
    return await engine.read.task(request.id)


class RerunTask(ActById, frozen=True, kw_only=True):
    #: Completed, dead-lettered and cancelled tasks below it run again too, after it.
    downstream: bool = False
    #: Tasks that depend on it and are running stop, and run again after it.
    cancel_running: bool = False
    #: Recorded steps and checkpoints of what runs again are deleted.
    forget_steps: bool = True


@operation(
    "POST /v1/tasks/{id}/rerun",
    Scope.OPERATE,
    codes=("not_found", "invalid_transition", "already_exists", "dependents_running", "cycle_detected"),
    example={"downstream": True, "reason": "the parser was fixed"},
)
async def rerun_task(engine: Engine, request: RerunTask) -> Task:
    """Run a COMPLETED task again; tasks that depend on it and haven't begun wait for it again.

    Its completed attempt is kept with its output. Attempts start at 0, cost adds up, and its DAG opens again.
    With `downstream` completed, dead-lettered and cancelled tasks below it run again after it, in order.
    While tasks that depend on it are running, it is refused with `dependents_running`, unless
    `cancel_running`.
    """
    await engine.rerun.rerun(
        request.id,
        downstream=request.downstream,
        cancel_running=request.cancel_running,
        forget_steps=request.forget_steps,
        reason=request.reason,
    )
    return await engine.read.task(request.id)


class RetryMatching(Request, frozen=True, kw_only=True):
    filter: t.TaskFilter
    #: Only report which tasks match.
    dry_run: bool = False


class CancelMatching(RetryMatching, frozen=True, kw_only=True):
    reason: Text = "cancelled by hand"


@operation(
    "POST /v1/tasks/cancel",
    Scope.OPERATE,
    example={"filter": {"type": ["crawl"], "status": ["READY"]}, "dry_run": True},
)
async def cancel_matching(engine: Engine, request: CancelMatching) -> t.MatchedTasks:
    """Cancel all tasks that match a filter and have not ended, with their children and dependents.

    In chunks, each in its own transaction. With `dry_run` it only returns which tasks match.
    """
    return await engine.matching.cancel(request.filter, request.reason, dry_run=request.dry_run)


@operation(
    "POST /v1/tasks/retry",
    Scope.OPERATE,
    example={"filter": {"status": ["DEAD_LETTERED"], "tag": ["sprint:12"]}, "dry_run": True},
)
async def retry_matching(engine: Engine, request: RetryMatching) -> t.MatchedTasks:
    """Retry all tasks that match a filter and are DEAD_LETTERED, CANCELLED or RETRYING.

    In chunks, each in its own transaction. One that can't be retried is left as it is. With `dry_run` it only
    returns which tasks match.
    """
    return await engine.matching.retry(request.filter, dry_run=request.dry_run)


class SignalBody(Request, frozen=True, kw_only=True):
    #: At most 64 KiB of JSON.
    data: Raw = field(default_factory=null)
    idempotency_key: Name | None = None
    #: That of the task's parent, whose holder may send signals too.
    claim_token: str | None = None


class SendSignal(SignalBody, frozen=True, kw_only=True):
    id: str
    name: Name

    @property
    def signal(self) -> NewSignal:
        return NewSignal(self.name, bytes(self.data), self.idempotency_key)

    def check(self) -> None:
        _ = self.signal


@operation(
    "POST /v1/tasks/{id}/signals/{name:path}",
    Scope.SUBMIT,
    response={202: SentSignal},
    repeatable=lambda request: request.idempotency_key is not None,
    by_hand=True,
    codes=("not_found", "invalid_transition", "stale_claim", "rate_limited"),
    example={"data": {"by": "ann"}, "idempotency_key": "review-17"},
)
async def signal_task(engine: Engine, request: SendSignal) -> SentSignal:
    """Send a signal to a task that has not ended: what it waits for with `ctx.wait_for`, now or later.

    The signal is kept until the task receives it, which it does once; at most 1,000 wait for a task. With an
    `idempotency_key` that the task had before, nothing is sent, and `duplicate` is true. It needs the scope
    `operate`, the token that created the task, or the claim token of the task's parent.
    """
    return await engine.waits.signal(request.id, request.signal, request.claim_token)


class AskEnded(Request, frozen=True, kw_only=True):
    ids: Annotated[list[str], Meta(max_length=MAX_IDS)]


class Ended(Struct, frozen=True):
    #: By id: `open`, or ended as a `task` or as a `dag`, or `unknown`.
    ids: dict[str, str]
    #: As in the answer to a registration: clients that don't register call this when they open.
    features: list[str] = field(default_factory=list)


@operation(
    "POST /v1/ended", Scope.READ, repeatable=True, example={"ids": ["task_01J8K2M3N4P5Q6R7S8T9V0W1X2"]}
)
async def which_ended(engine: Engine, request: AskEnded) -> Ended:
    """Report which of these tasks and DAGs have ended."""
    return Ended(await engine.read.ended(request.ids), sorted(FEATURES))


class FindIds(Request, frozen=True, kw_only=True):
    #: A short form, such as `J8K2M3N4-W1X2`, or the first characters of an id, at least 4.
    name: Name
    #: Only ids of tasks or of DAGs; null: of both.
    kind: Literal["task", "dag"] | None = None


class FoundIds(Struct, frozen=True):
    ids: list[str]


@operation("GET /v1/ids", Scope.READ)
async def find_ids(engine: Engine, request: FindIds) -> FoundIds:
    """Find the tasks and DAGs that a short form or a prefix of an id means, at most 20 of each.

    The short form of `task_01J8K2M3N4P5Q6R7S8T9V0W1X2` is `J8K2M3N4-W1X2`. A complete id means only itself.
    """
    return FoundIds(await engine.read.find_ids(request.name, request.kind))
