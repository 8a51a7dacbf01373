"""Events as they happen: server-sent events, each with the cursor to go on from."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from starlette.responses import StreamingResponse

from lineshaft.engine.feed.event_query import EventQuery
from lineshaft.engine.feed.events import NOW, Events
from lineshaft.errors import (
    CursorExpiredError,
    ForbiddenError,
    LineshaftError,
    RateLimitedError,
    UnauthorizedError,
    UnavailableError,
)
from lineshaft.types import EventPage
from lineshaft.types.json import encode

#: How soon after its commit an event is sent, at the latest, if all goes well.
_LOOK_EVERY_SEC = 0.2
#: When what could not be read is tried again.
AGAIN_AFTER_SEC = 1.0
#: So often something is sent, so that a client that has gone is noticed, and proxies keep the line open.
PING_EVERY_SEC = 15.0
MAX_STREAMS = 500

_log = logging.getLogger("lineshaft.http")


class Tail:
    """Looks for new events while anybody streams, once for all of them."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._news = asyncio.Event()
        #: How many streams are open.
        self.watchers = 0
        self._looking: asyncio.Task[None] | None = None

    @property
    def news(self) -> asyncio.Event:
        """Set once something has happened after it was asked for."""
        return self._news

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        if self.watchers >= MAX_STREAMS:
            raise RateLimitedError(
                f"This server streams to {MAX_STREAMS} clients already. Close some, or read GET /v1/events "
                "page by page."
            )
        self.watchers += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        try:
            yield
        finally:
            self.watchers -= 1

    async def _look(self) -> None:
        place: str | None = NOW
        # Whoever streams may have read before this one knew its place, or could not read at all.
        may_have_missed = True
        while self.watchers:
            try:
                page = await self._events.read(place, limit=1)
                if page.items:
                    self._tell()
                    # Whoever streams reads by a cursor of its own; this one only tells when.
                    may_have_missed = True
                    page = await self._events.read(NOW, limit=1)
                place = page.next_cursor
                if may_have_missed:
                    self._tell()
                may_have_missed = False
            except CursorExpiredError:
                place, may_have_missed = NOW, True
            except Exception as error:  # noqa: BLE001 - without this task all streams would be late, for ever
                may_have_missed = True
                _log.warning("The event feed can't be read, trying again: %r", error)
                await asyncio.sleep(AGAIN_AFTER_SEC)
            await asyncio.sleep(_LOOK_EVERY_SEC)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})


Allow = Callable[[], Awaitable[object]]


async def is_refused(allow: Allow) -> bool:
    """Whether a token that was good when it began is no more; in doubt it goes on."""
    try:
        await allow()
    except (UnauthorizedError, ForbiddenError):
        return True
    except LineshaftError as error:
        _log.warning("Who streams can't be asked for their token again, going on: %s", error)
    return False


def stream(
    tail: Tail, reading: EventQuery, first: EventPage, stopping: asyncio.Event, allow: Allow
) -> StreamingResponse:
    """`first` was read already: what is wrong with a cursor is told before the stream begins.

    `allow` raises when the client may not read any more.
    """
    # Taken before the answer begins, so that one stream too many is refused.
    watching = contextlib.ExitStack()
    watching.enter_context(tail.watched())
    return StreamingResponse(
        _events(tail, reading, first, stopping, allow=allow, watching=watching),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _events(
    tail: Tail,
    reading: EventQuery,
    page: EventPage,
    stopping: asyncio.Event,
    *,
    allow: Allow,
    watching: contextlib.ExitStack,
) -> AsyncIterator[bytes]:
    with watching:
        now = asyncio.get_running_loop().time
        allowed_until = now() + PING_EVERY_SEC
        yield _place(page.next_cursor) if not page.items else b""
        while True:
            news = tail.news
            for event in page.items:
                item = encode(event)
                yield b"id: %s\nevent: %s\ndata: %s\n\n" % (event.cursor.encode(), event.kind.encode(), item)
            if stopping.is_set():
                return
            if page.caught_up and not await any_of(news, stopping):
                # A client that comes back with this goes on here, though nothing was for it.
                yield _place(page.next_cursor)
            if now() >= allowed_until:
                if await is_refused(allow):
                    return
                allowed_until = now() + PING_EVERY_SEC
            try:
                page = await reading.after(page.next_cursor)
            except UnavailableError:
                page = EventPage([], page.next_cursor, caught_up=True)
            except CursorExpiredError:
                # It comes back with its last cursor, and is told.
                return


def _place(cursor: str) -> bytes:
    return b": still here\nid: %s\n\n" % cursor.encode()


async def any_of(*signals: asyncio.Event) -> bool:
    """Whether one of them was set before it was time to say something."""
    waiting = [asyncio.ensure_future(signal.wait()) for signal in signals]
    try:
        done, _ = await asyncio.wait(waiting, timeout=PING_EVERY_SEC, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for task in waiting:
            task.cancel()
