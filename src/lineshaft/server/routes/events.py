"""The event feed: in pages, or as a stream."""

from functools import partial

from starlette.responses import Response

from lineshaft.engine.feed.event_query import EventQuery
from lineshaft.engine.feed.events import NOW
from lineshaft.errors import RateLimitedError
from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.framework.streams import stream
from lineshaft.server.routes import requests
from lineshaft.server.service import Call
from lineshaft.types import EventPage, Scope
from lineshaft.types.events import TaskEventPage

STREAM = "text/event-stream"

routes = Routes()


@routes.get("/v1/events", Scope.READ, EventPage, codes=(RateLimitedError.code, "cursor_expired"))
async def list_events(call: Call, query: requests.EventQuery) -> Answer | Response:
    """Read all events, in order; without `after` from the beginning.

    `after` is a cursor, `now`, `last:N` for the last N events (at most `limit`), or `since:TIME` in ISO 8601
    for those since then; some of the minute before may come first.

    Continue from `next_cursor`, which is always present; a page may be short, even empty, while `caught_up`
    is false. With `Accept: text/event-stream` it streams, from `Last-Event-ID` or `after`, else from now. No
    event is missed, repeated or out of order.
    """
    reading = EventQuery(call.service.events, query.limit, query.task_id, query.dag_id, query.kind)
    if STREAM in call.headers.get("accept", ""):
        place = call.headers.get("last-event-id") or query.place or NOW
        first = await reading.after(place)
        allow = partial(call.service.authenticate, Scope.READ, call.headers)
        return stream(
            call.service.tail,
            reading,
            first,
            call.service.stopping,
            allow=allow,
            token_id=call.principal.token_id,
            address=call.address,
        )
    return Answer(await reading.after(query.place))


@routes.get("/v1/tasks/{id}/events", Scope.READ, TaskEventPage, codes=("not_found", "cursor_expired"))
async def list_task_events(call: Call, query: requests.Page) -> Answer:
    """Read all events of a task, in order."""
    task_id = call.path["id"]
    page = await EventQuery(call.service.events, query.limit, task_id).after(query.cursor)
    if not page.items and query.cursor is None:
        # Every task has a first event: unless retention dropped it, the task doesn't exist.
        await call.service.engine.read.task(task_id)
    more = None if page.caught_up else page.next_cursor
    return Answer(TaskEventPage(page.items, more, page.caught_up))
