"""Figures about the whole queue."""

from lineshaft.engine.read import stats as store
from lineshaft.engine.tokens import Scope
from lineshaft.server.framework.routing import Answer, Call, Routes
from lineshaft.server.routes import responses

routes = Routes()


@routes.get("/v1/stats", Scope.READ, responses.Stats)
async def get_stats(call: Call) -> Answer:
    """Queue depth by state and tier, the oldest READY task, throughput and money.

    Each figure says whether it is exact: with very many tasks it is estimated from a sample.
    """
    insights = call.service.engine.insights
    found = await insights.stats()
    pauses = await insights.pauses()
    return Answer(
        responses.Stats(
            as_of=found.as_of,
            depth=[
                responses.Depth(d.status, None if d.tier is None else str(d.tier), d.count, d.exact)
                for d in found.depth
            ],
            by_status={str(status): count for status, count in found.by_status.items()},
            oldest_ready_at=found.oldest_ready_at,
            oldest_ready_sec=found.oldest_ready_sec,
            oldest_ready_exact=found.oldest_ready_exact,
            throughput={
                "last_minute": _throughput(found.last_minute),
                "last_hour": _throughput(found.last_hour),
            },
            spend_today_usd=found.spent_today_usd,
            spend_today_exact=found.spent_today_exact,
            paused=[pause.type for pause in pauses],
        )
    )


def _throughput(found: store.Throughput) -> responses.Throughput:
    return responses.Throughput(
        found.window_sec, found.completed, found.cancelled, found.dead_lettered, found.exact
    )
