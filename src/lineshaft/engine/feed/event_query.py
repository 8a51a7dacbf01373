"""Pages of the event feed for a caller's filter."""

from dataclasses import dataclass

from lineshaft.engine.feed.events import Events
from lineshaft.types import Event, EventPage

#: A page of rare events ends after this many reads: the caller may be gone long before the end of the feed.
_READS_PER_PAGE = 20


@dataclass(frozen=True, slots=True)
class EventQuery:
    events: Events
    limit: int
    task_id: str | None = None
    dag_id: str | None = None
    kinds: tuple[str, ...] = ()

    async def after(self, place: str | None) -> EventPage:
        """A full page, unless there are no more events or they are far apart."""
        items: list[Event] = []
        reads = 0
        while True:
            reads += 1
            page = await self.events.read(
                place,
                limit=self.limit - len(items),
                task_id=self.task_id,
                dag_id=self.dag_id,
                kinds=self.kinds,
            )
            items += page.items
            place = page.next_cursor
            if page.caught_up or len(items) == self.limit or reads == _READS_PER_PAGE:
                return EventPage(items, place, page.caught_up)
