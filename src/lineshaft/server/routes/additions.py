"""What a server adds to operations of the table."""

from functools import partial
from typing import Any

from starlette.responses import Response

from lineshaft.engine.feed.events import NOW
from lineshaft.operations import agents, events, health, reservations, sources, tokens, work
from lineshaft.server.framework.routing import Answer, serves
from lineshaft.server.framework.streams import stream
from lineshaft.server.long_poll import while_connected
from lineshaft.server.routes import work_calls
from lineshaft.server.routes.held_claims import verifier
from lineshaft.server.service import Call
from lineshaft.types import AgentInfo, EventPage, NewToken, Readiness, Scope
from lineshaft.types.protocol import BatchView, CancelItem, StartItem
from lineshaft.types.request import Nothing
from lineshaft.types.reservations import Reservation

STREAM = "text/event-stream"


@serves(agents.drain_agent)
async def drain_agent(call: Call, request: agents.InstanceOfAgent) -> AgentInfo:
    drained = await agents.drain_agent.run(call.service.engine, request)
    call.service.long_polls.end(request.id, request.incarnation)
    return drained


@serves(agents.leave_agent)
async def leave_agent(call: Call, request: agents.InstanceOfAgent) -> AgentInfo:
    left = await agents.leave_agent.run(call.service.engine, request)
    call.service.long_polls.end(request.id, request.incarnation)
    return left


@serves(work.cancel_task)
async def cancel_task(call: Call, request: CancelItem) -> Any:
    """An agent cancels what it holds, with its claim token."""
    return work_calls.only(await work_calls.cancel(call, [request], BatchView.FULL))


@serves(reservations.acquire)
async def acquire(call: Call, request: reservations.Acquire) -> Reservation:
    await _verify_claim(call, request)
    acquiring = reservations.acquire.run(call.service.engine, request)
    return await while_connected(acquiring, call.receive, call.service.stopping)


@serves(reservations.settle)
async def settle(call: Call, request: reservations.Settle) -> None:
    await _verify_claim(call, request)
    await reservations.settle.run(call.service.engine, request)


async def _verify_claim(call: Call, request: reservations.OfClaim) -> None:
    """As for all calls about a claim: a caller that is bound to an agent needs a claim of that agent."""
    item = StartItem(id=request.task_id, claim_token=request.claim_token)
    (await verifier(call, [item]))(item)


@serves(events.list_events)
async def list_events(call: Call, request: events.ListEvents) -> EventPage | Response:
    query = events.query_of(call.service.engine, request)
    if STREAM not in call.headers.get("accept", ""):
        return await query.after(request.place)
    place = call.headers.get("last-event-id") or request.place or NOW
    return stream(
        call.service.tail,
        query,
        await query.after(place),
        call.service.stopping,
        allow=partial(call.service.authenticate, Scope.READ, call.scope),
        token_id=call.caller.token_id,
        address=call.address,
    )


@serves(sources.put_source)
async def put_source(call: Call, request: sources.ReplaceSource) -> Answer:
    source, is_new = await sources.put(call.service.engine, request)
    return Answer(source, 201 if is_new else 200)


@serves(tokens.create_token)
async def create_token(call: Call, request: tokens.CreateToken) -> NewToken:
    """From now on calls need a token, and this server knows it at once."""
    made = await tokens.create_token.run(call.service.engine, request)
    call.service.notice_token()
    return made


@serves(health.ready)
async def ready(call: Call, request: Nothing) -> Readiness:  # noqa: ARG001 - it has no fields
    await call.service.check_database()
    wakeups = call.service.wakeups
    return Readiness("ready", "ok", wakeups.wakes_at_once, wakeups.mode, wakeups.mode_since)
