"""Pages of the event feed for a caller's filter."""

from collections import deque
from datetime import UTC, datetime

from msgspec import Struct

from lineshaft.engine.feed.events import Events
from lineshaft.errors import InvalidInputError
from lineshaft.types import Event, EventPage

#: Places besides a cursor and "now": `last:50` is the last 50 events, `since:2030-01-31T09:00:00Z` a time.
LAST, SINCE = "last:", "since:"
#: A page of rare events ends after this many reads: the caller may be gone long before the end of the feed.
_READS_PER_PAGE = 20
#: How far to go back for the last events of a filter: first, and at most.
_NUMBERS_PER_EVENT, _MOST_NUMBERS = 4, 200_000


class EventQuery(Struct, frozen=True):
    events: Events
    limit: int
    task_id: str | None = None
    dag_id: str | None = None
    kinds: tuple[str, ...] = ()

    async def after(self, place: str | None) -> EventPage:
        """A full page, unless there are no more events or they are far apart."""
        if place is not None and place.startswith(LAST):
            return await self._last(min(_number(place), self.limit))
        if place is not None and place.startswith(SINCE):
            place = await self.events.cursor_of_time(_time(place))
        items: list[Event] = []
        reads = 0
        while True:
            reads += 1
            page = await self._read(place, self.limit - len(items))
            items += page.items
            place = page.next_cursor
            if page.caught_up or len(items) == self.limit or reads == _READS_PER_PAGE:
                return EventPage(items, place, page.caught_up)

    async def _last(self, most: int) -> EventPage:
        """The last events. Rare ones are searched for among the last `_MOST_NUMBERS` rows of the feed."""
        # The events of one task have an index.
        numbers = most * _NUMBERS_PER_EVENT if self.task_id is None else 2**62
        while True:
            place, is_all = await self.events.cursor_before_end(numbers)
            found: deque[Event] = deque(maxlen=most)
            while True:
                page = await self._read(place, self.limit)
                found += page.items
                place = page.next_cursor
                if page.caught_up:
                    break
            if is_all or len(found) == most or numbers >= _MOST_NUMBERS:
                return EventPage(list(found), place, caught_up=True)
            numbers = min(8 * numbers, _MOST_NUMBERS)

    async def _read(self, place: str | None, limit: int) -> EventPage:
        return await self.events.read(
            place, limit=limit, task_id=self.task_id, dag_id=self.dag_id, kinds=self.kinds
        )


def _number(place: str) -> int:
    text = place.removeprefix(LAST)
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0):  # noqa: PLR2004
        raise _invalid(place)
    return int(text)


def _time(place: str) -> datetime:
    try:
        time = datetime.fromisoformat(place.removeprefix(SINCE))
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise _invalid(place) from None


def _invalid(place: str) -> InvalidInputError:
    fault = f"must be a cursor, now, {LAST}N or {SINCE}TIME in ISO 8601, got {place[:60]!r}"
    return InvalidInputError(errors=[("after", fault)])
