"""Statistics of the whole queue."""

from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.service import Call
from lineshaft.types import Scope, Stats

routes = Routes()


@routes.get("/v1/stats", Scope.READ, Stats)
async def get_stats(call: Call) -> Answer:
    """Read queue depth by state and tier, the oldest READY task, throughput and spending.

    Each figure says whether it is exact: with very many tasks it is estimated from a sample.
    """
    return Answer(await call.service.engine.read.stats())
