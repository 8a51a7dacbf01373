"""Figures about the whole queue."""

from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.routes import requests
from lineshaft.server.service import Call
from lineshaft.types import Attention, Costs, Scope, Stats, ThroughputHistory, Waiting

routes = Routes()


@routes.get("/v1/stats", Scope.READ, Stats)
async def get_stats(call: Call) -> Answer:
    """Read queue depth by state and tier, the oldest READY task, throughput and spending.

    Each figure says whether it is exact: with very many tasks it is estimated from a sample.
    """
    return Answer(await call.service.engine.read.stats())


@routes.get("/v1/waiting", Scope.READ, Waiting)
async def get_waiting(call: Call) -> Answer:
    """Read how many tasks wait for which reason.

    Each figure says whether it is exact: with very many tasks it is estimated from a sample. A task with
    several reasons counts under the first that `/v1/tasks/{id}/why` has.
    """
    return Answer(await call.service.engine.read.waiting())


@routes.get("/v1/throughput", Scope.READ, ThroughputHistory)
async def get_throughput(call: Call) -> Answer:
    """Read what ended in each minute of the last hour, and how long recent tasks had waited."""
    return Answer(await call.service.engine.read.throughput())


@routes.get("/v1/costs", Scope.READ, Costs)
async def get_costs(call: Call, query: requests.CostQuery) -> Answer:
    """Read what tasks cost: today with a forecast, and by day, type, model, agent and DAG.

    An attempt counts with its whole cost on the UTC day on which it ended. `spent_usd` of a day is what was
    booked on it, also for attempts that still run. Attempts that used tokens and reported no cost are
    `unpriced`: what they cost is unknown.
    """
    found = await call.service.engine.read.costs(
        days=query.days, type=query.type, model=query.model, agent_id=query.agent_id
    )
    return Answer(found)


@routes.get("/v1/attention", Scope.READ, Attention)
async def get_attention(call: Call) -> Answer:
    """Read what needs a person and what holds work back. Counts end at 1,000."""
    return Answer(await call.service.engine.read.attention())
