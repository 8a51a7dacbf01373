"""Quotas: at most so many tasks of a key at once, or so much in a time."""

from decimal import Decimal

from lineshaft.model.quotas import check_quota
from lineshaft.operations.operation import Engine, operation
from lineshaft.types import Page, Quota, QuotaDetails, Scope
from lineshaft.types.request import Act, OnePage, Request


@operation("GET /v1/quotas", Scope.READ)
async def list_quotas(engine: Engine, request: OnePage) -> Page[Quota]:
    """List quotas by name: their limits, what runs and waits, and who holds them."""
    return await engine.quotas.page(limit=request.limit, cursor=request.cursor)


class NewRate(Request, frozen=True, kw_only=True):
    """At most `amount` in any window of `per_sec`. The unit `tasks` limits claims."""

    amount: Decimal | float
    #: tasks, requests, tokens or usd.
    unit: str
    per_sec: float


class SetQuota(Act, frozen=True, kw_only=True):
    """Null: no limit."""

    name: str
    #: A key; or `PREFIX:*`, for all keys that begin with `PREFIX:`.
    match: str
    #: Whether every matching key has its own limits; otherwise all share one.
    each: bool = True
    max_running: int | None = None
    max_waiting: int | None = None
    rate: NewRate | None = None
    #: The share of its keys among tasks with a `fair_key`.
    weight: float = 1.0

    def check(self) -> None:
        check_quota(self)


@operation(
    "PUT /v1/quotas/{name}",
    Scope.OPERATE,
    repeatable=True,
    example={"match": "customer:*", "max_running": 3},
)
async def set_quota(engine: Engine, request: SetQuota) -> Quota:
    """Set a quota. It applies from the next claim, also to tasks that wait; running tasks continue.

    They count, too.
    """
    return await engine.quotas.set(request, reason=request.reason)


class ByName(Request, frozen=True, kw_only=True):
    name: str


@operation("GET /v1/quotas/{name}", Scope.READ, codes=("not_found",))
async def get_quota(engine: Engine, request: ByName) -> QuotaDetails:
    """Read a quota with its busiest keys, and the tasks that hold it, use its rate and wait for it."""
    return await engine.quotas.details(request.name)


class DeleteQuota(Act, frozen=True, kw_only=True):
    name: str


@operation("DELETE /v1/quotas/{name}", Scope.OPERATE, codes=("not_found",))
async def delete_quota(engine: Engine, request: DeleteQuota) -> None:
    """Delete a quota: tasks that waited for it are claimed as if it had never been."""
    await engine.quotas.delete(request.name, reason=request.reason)
