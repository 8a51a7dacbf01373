"""Server-sent events: the event feed as a stream, each event with the cursor to continue from."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from starlette.responses import StreamingResponse

from lineshaft import background
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

#: How often the feed is polled: the normal delay between commit and delivery.
_LOOK_EVERY_SEC = 0.2
#: The pause after a failed read.
AGAIN_AFTER_SEC = 1.0
#: Interval of keep-alive messages, which detect closed connections and keep proxies from closing open ones.
PING_EVERY_SEC = 15.0
MAX_STREAMS = 500
MAX_STREAMS_PER_TOKEN = 100
MAX_STREAMS_PER_ADDRESS = 250

_log = logging.getLogger("lineshaft.http")


class Tail:
    """Polls the feed while streams are open, once for all of them."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._news = asyncio.Event()
        #: How many streams are open, and how many of them need the feed to be polled.
        self.watchers = 0
        self._polled = 0
        #: By token and by address.
        self._of: Counter[str] = Counter()
        self._looking: asyncio.Task[None] | None = None

    @property
    def news(self) -> asyncio.Event:
        """Set by the first event after this call."""
        return self._news

    @contextlib.contextmanager
    def watched(self, token_id: str | None, address: str) -> Iterator[None]:
        """Poll the feed for a stream or a socket; raises RateLimitedError if the caller has too many."""
        with self.counted(token_id, address):
            self._polled += 1
            if self._looking is None or self._looking.done():
                self._looking = asyncio.get_running_loop().create_task(self._look())
            try:
                yield
            finally:
                self._polled -= 1

    @contextlib.contextmanager
    def counted(self, token_id: str | None, address: str) -> Iterator[None]:
        """Count an open connection; raises RateLimitedError if there are too many of the same caller."""
        keys = [f"address {address}"] + ([] if token_id is None else [f"token {token_id}"])
        if self.watchers >= MAX_STREAMS:
            raise _too_many("This server", MAX_STREAMS)
        if token_id is not None and self._of[f"token {token_id}"] >= MAX_STREAMS_PER_TOKEN:
            raise _too_many("With this token, this server", MAX_STREAMS_PER_TOKEN)
        if self._of[f"address {address}"] >= MAX_STREAMS_PER_ADDRESS:
            raise _too_many("At this address, this server", MAX_STREAMS_PER_ADDRESS)
        self.watchers += 1
        self._of.update(keys)
        try:
            yield
        finally:
            self.watchers -= 1
            self._of.subtract(keys)
            # Without those that are zero.
            self._of = +self._of

    async def _look(self) -> None:
        position: str | None = NOW
        # Streams may have read before this task found its position, or could not read at all.
        may_have_missed = True
        while self._polled:
            try:
                page = await self._events.read(position, limit=1)
                if page.items:
                    self._notify()
                    # Streams read with their own cursors; this one only notifies them.
                    may_have_missed = True
                    page = await self._events.read(NOW, limit=1)
                position = page.next_cursor
                if may_have_missed:
                    self._notify()
                may_have_missed = False
            except CursorExpiredError:
                position, may_have_missed = NOW, True
            except Exception as error:  # noqa: BLE001 - without this task all streams would stall
                may_have_missed = True
                _log.warning("Reading the event feed failed, retrying: %r", error)
                await asyncio.sleep(AGAIN_AFTER_SEC)
            await asyncio.sleep(_LOOK_EVERY_SEC)

    def _notify(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def close(self) -> None:
        if self._looking is not None:
            await background.stop(self._looking)


def _too_many(who: str, most: int) -> RateLimitedError:
    return RateLimitedError(
        f"{who} already streams to {most} clients. Close some, or read GET /v1/events page by page."
    )


Allow = Callable[[], Awaitable[object]]


async def is_refused(allow: Allow) -> bool:
    """Whether a token that was valid when the stream began has been revoked; on errors, no."""
    try:
        await allow()
    except (UnauthorizedError, ForbiddenError):
        return True
    except LineshaftError as error:
        _log.warning("Checking the token of a stream failed, continuing: %s", error)
    return False


def stream(
    tail: Tail,
    reading: EventQuery,
    first: EventPage,
    stopping: asyncio.Event,
    *,
    allow: Allow,
    token_id: str | None,
    address: str,
) -> StreamingResponse:
    """Stream events. `first` is read before the stream begins, so that an invalid cursor is refused.

    `allow` raises when the client is no longer allowed to read.
    """
    # Counted before the response begins, so that one stream too many is refused.
    watching = contextlib.ExitStack()
    watching.enter_context(tail.watched(token_id, address))
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
        yield _position(page.next_cursor) if not page.items else b""
        while True:
            news = tail.news
            for event in page.items:
                item = encode(event)
                yield b"id: %s\nevent: %s\ndata: %s\n\n" % (event.cursor.encode(), event.kind.encode(), item)
            if stopping.is_set():
                return
            if page.caught_up and not await any_of(news, stopping):
                # A client that reconnects continues from here, even if no event matched its filter.
                yield _position(page.next_cursor)
            if now() >= allowed_until:
                if await is_refused(allow):
                    return
                allowed_until = now() + PING_EVERY_SEC
            try:
                page = await reading.after(page.next_cursor)
            except UnavailableError:
                page = EventPage([], page.next_cursor, caught_up=True)
            except CursorExpiredError:
                # The client reconnects with its last cursor and gets the error.
                return


def _position(cursor: str) -> bytes:
    return b": keep-alive\nid: %s\n\n" % cursor.encode()


async def any_of(*signals: asyncio.Event) -> bool:
    """Whether one of them was set before the next keep-alive message is due."""
    waiting = [asyncio.ensure_future(signal.wait()) for signal in signals]
    try:
        done, _ = await asyncio.wait(waiting, timeout=PING_EVERY_SEC, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for task in waiting:
            task.cancel()
