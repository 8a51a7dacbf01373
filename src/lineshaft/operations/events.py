"""The event feed, in pages."""

from typing import TYPE_CHECKING

from lineshaft.errors import RateLimitedError
from lineshaft.operations.operation import Engine, operation
from lineshaft.types import EventPage, Scope
from lineshaft.types.events import TaskEventPage
from lineshaft.types.request import OnePage

if TYPE_CHECKING:
    from lineshaft.engine.feed.event_query import EventQuery


class ListEvents(OnePage, frozen=True, kw_only=True):
    after: str | None = None
    task_id: str | None = None
    dag_id: str | None = None
    kind: tuple[str, ...] = ()

    def check(self) -> None:
        """Nothing: the feed takes any limit."""

    @property
    def place(self) -> str | None:
        return self.after or self.cursor


@operation("GET /v1/events", Scope.READ, codes=(RateLimitedError.code, "cursor_expired"))
async def list_events(engine: Engine, request: ListEvents) -> EventPage:
    """Read all events, in order; without `after` from the beginning.

    `after` is a cursor, `now`, `last:N` for the last N events (at most `limit`), or `since:TIME` in ISO 8601
    for those since then; some of the minute before may come first.

    Continue from `next_cursor`, which is always present; a page may be short, even empty, while `caught_up`
    is false. With `Accept: text/event-stream` it streams, from `Last-Event-ID` or `after`, else from now. No
    event is missed, repeated or out of order.
    """
    return await query_of(engine, request).after(request.place)


def query_of(engine: Engine, request: ListEvents) -> "EventQuery":
    from lineshaft.engine.feed.event_query import EventQuery  # noqa: PLC0415 - imports psycopg

    return EventQuery(engine.events, request.limit, request.task_id, request.dag_id, request.kind)


class ListTaskEvents(OnePage, frozen=True, kw_only=True):
    id: str


@operation("GET /v1/tasks/{id}/events", Scope.READ, codes=("not_found", "cursor_expired"))
async def list_task_events(engine: Engine, request: ListTaskEvents) -> TaskEventPage:
    """Read all events of a task, in order."""
    query = query_of(engine, ListEvents(limit=request.limit, task_id=request.id))
    page = await query.after(request.cursor)
    if not page.items and request.cursor is None:
        # Every task has a first event: unless retention dropped it, the task doesn't exist.
        await engine.read.task(request.id)
    more = None if page.caught_up else page.next_cursor
    return TaskEventPage(page.items, more, page.caught_up)
