"""Guards: limits, breakers, locks, slowdowns, pauses."""

from msgspec import UNSET

from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.routes import requests, responses
from lineshaft.server.service import Call
from lineshaft.types import Breaker, Limits, Lock, Page, Scope, Slowdown

routes = Routes()


@routes.get("/v1/limits", Scope.READ, Limits)
async def get_limits(call: Call) -> Answer:
    """Read the limits of the whole installation, and what was spent today. Null: no limit."""
    return Answer(await call.service.engine.limits.read())


@routes.patch("/v1/limits", Scope.OPERATE, Limits, example={"daily_budget_usd": 100})
async def change_limits(call: Call, body: requests.ChangeLimits) -> Answer:
    """Change limits of the whole installation. Every process obeys them from its next claim or heartbeat."""
    given = {name: getattr(body, name) for name in body.__struct_fields__ if name != "reason"}
    changes = {name: value for name, value in given.items() if value is not UNSET}
    return Answer(await call.service.engine.limits.patch(changes, reason=body.reason))


@routes.get("/v1/breakers", Scope.READ, Page[Breaker])
async def list_breakers(call: Call, query: requests.Page) -> Answer:
    """List circuit breakers that have counted a failure or were opened; all others are closed."""
    page = await call.service.engine.read.breakers(limit=query.limit, cursor=query.cursor)
    return Answer(page)


@routes.post("/v1/breakers/{key:path}/open", Scope.OPERATE, Breaker)
async def open_breaker(call: Call, body: requests.Act) -> Answer:
    """Stop claims of this type, or of `model:NAME`, until the breaker is reset."""
    await call.service.engine.breakers.open(call.path["key"], reason=body.reason)
    return await _breaker(call)


@routes.post("/v1/breakers/{key:path}/reset", Scope.OPERATE, Breaker)
async def reset_breaker(call: Call, body: requests.Act) -> Answer:
    """Close a breaker and forget its failures."""
    await call.service.engine.breakers.reset(call.path["key"], reason=body.reason)
    return await _breaker(call)


async def _breaker(call: Call) -> Answer:
    found = await call.service.engine.read.breaker(call.path["key"])
    return Answer(found)


@routes.get("/v1/locks", Scope.READ, Page[Lock])
async def list_locks(call: Call, query: requests.Page) -> Answer:
    """List held document locks, and how many tasks wait for each."""
    page = await call.service.engine.read.locks(limit=query.limit, cursor=query.cursor)
    return Answer(page)


@routes.delete("/v1/locks/{key:path}", Scope.OPERATE, codes=("not_found",))
async def release_lock(call: Call, query: requests.ActQuery) -> Answer:
    """Take a lock from its holder; the next waiter gets it.

    The old holder can't complete: it gets 409 `stale_claim`, and `lost` at its next heartbeat.
    """
    await call.service.engine.locks.release(call.path["key"], reason=query.reason)
    return Answer(status=204)


@routes.get("/v1/slowdowns", Scope.READ, Page[Slowdown])
async def list_slowdowns(call: Call, query: requests.Page) -> Answer:
    """List current slowdowns after rate limits."""
    page = await call.service.engine.read.slowdowns(limit=query.limit, cursor=query.cursor)
    return Answer(page)


@routes.delete("/v1/slowdowns/{key:path}", Scope.OPERATE, codes=("not_found",))
async def end_slowdown(call: Call, query: requests.ActQuery) -> Answer:
    """End a slowdown at once: `model:NAME` or `*`."""
    await call.service.engine.slowdowns.end(call.path["key"], reason=query.reason)
    return Answer(status=204)


@routes.post("/v1/pause", Scope.OPERATE, responses.Paused, example={"type": "research"})
async def pause(call: Call, body: requests.Pause) -> Answer:
    """Stop claims of a type, or all claims. Running tasks continue."""
    await call.service.engine.operations.pause(body.type, reason=body.reason)
    return Answer(responses.Paused(body.type, paused=True))


@routes.post("/v1/resume", Scope.OPERATE, responses.Paused, example={"type": "research"})
async def resume(call: Call, body: requests.Pause) -> Answer:
    """End a pause. Without a pause, nothing changes."""
    await call.service.engine.operations.resume(body.type, reason=body.reason)
    return Answer(responses.Paused(body.type, paused=False))
