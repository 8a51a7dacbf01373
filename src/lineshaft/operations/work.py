"""Cancelling a task, and what agents ask about work; claims and outcomes are in `server/routes/work.py`."""

from lineshaft.operations.operation import Engine, operation
from lineshaft.types import Scope, Task
from lineshaft.types.protocol import CancelItem, RetryDue
from lineshaft.types.request import Request, Seconds
from lineshaft.types.work import LeftBehind


class OfTypes(Request, frozen=True, kw_only=True):
    type: tuple[str, ...] = ()


class NextRetry(OfTypes, frozen=True, kw_only=True):
    within_sec: Seconds = 0.0


@operation("GET /v1/work/retries", Scope.AGENT)
async def next_retry(engine: Engine, request: NextRetry) -> RetryDue:
    """When the first retry of these types is due, if within `within_sec`, and how many are."""
    due = await engine.upcoming.retry_within(request.type, request.within_sec)
    return RetryDue(due.due_sec, due.count)


@operation("GET /v1/work/left-behind", Scope.AGENT)
async def left_behind(engine: Engine, request: OfTypes) -> LeftBehind:
    """How many tasks of these types wait for a time, are held, or are READY all the same."""
    return await engine.upcoming.left_behind(request.type)


@operation(
    "POST /v1/tasks/{id}/cancel",
    Scope.AGENT,
    by_hand=True,
    repeatable=True,
    codes=("not_found", "invalid_transition", "stale_claim"),
    example={"reason": "no longer needed"},
)
async def cancel_task(engine: Engine, request: CancelItem) -> Task:
    """Cancel a task, its children and, with `cascade`, everything that depends on it.

    With the scope `agent` only a task that the caller holds, with its `claim_token`. Cancelling again changes
    nothing.
    """
    await engine.cancel.cancel(request.id, request.reason, cascade=request.cascade)
    return await engine.read.task(request.id)
