"""Figures about the whole queue."""
# ruff: noqa: ARG001 - requests without fields

from typing import Annotated

from msgspec import Meta

from lineshaft.operations.operation import Engine, operation
from lineshaft.types import Attention, Costs, Scope, Stats, ThroughputHistory, Waiting
from lineshaft.types.costs import DEFAULT_DAYS, MOST_DAYS, check_days
from lineshaft.types.request import Nothing, Request


@operation("GET /v1/stats", Scope.READ)
async def get_stats(engine: Engine, request: Nothing) -> Stats:
    """Read queue depth by state and tier, the oldest READY task, throughput and spending.

    Each figure says whether it is exact: with very many tasks it is estimated from a sample.
    """
    return await engine.read.stats()


@operation("GET /v1/waiting", Scope.READ)
async def get_waiting(engine: Engine, request: Nothing) -> Waiting:
    """Read how many tasks wait for which reason.

    Each figure says whether it is exact: with very many tasks it is estimated from a sample. A task with
    several reasons counts under the first that `/v1/tasks/{id}/why` has.
    """
    return await engine.read.waiting()


@operation("GET /v1/throughput", Scope.READ)
async def get_throughput(engine: Engine, request: Nothing) -> ThroughputHistory:
    """Read what ended in each minute of the last hour, and how long recent tasks had waited."""
    return await engine.read.throughput()


class GetCosts(Request, frozen=True, kw_only=True):
    days: Annotated[int, Meta(ge=1, le=MOST_DAYS)] = DEFAULT_DAYS
    type: str | None = None
    model: str | None = None
    agent_id: str | None = None

    def check(self) -> None:
        check_days(self.days)


@operation("GET /v1/costs", Scope.READ)
async def get_costs(engine: Engine, request: GetCosts) -> Costs:
    """Read what tasks cost: today with a forecast, and by day, type, model, agent and DAG.

    An attempt counts with its whole cost on the UTC day on which it ended. `spent_usd` of a day is what was
    booked on it, also for attempts that still run. Attempts that used tokens and reported no cost are
    `unpriced`: what they cost is unknown.
    """
    return await engine.read.costs(
        days=request.days, type=request.type, model=request.model, agent_id=request.agent_id
    )


@operation("GET /v1/attention", Scope.READ)
async def get_attention(engine: Engine, request: Nothing) -> Attention:
    """Read what needs a person and what holds work back. Counts end at 1,000."""
    return await engine.read.attention()
