"""Live pages: open pages are rendered again when something on them has changed, once for all their tabs.

One reader per process follows the event feed, however many tabs are open. Each page that is open says which
events concern it; tabs with the same page and the same rights share its rendering. A tab that is slow gets
the newest state and none in between.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct

from lineshaft.dashboard.visit import EVERYTHING
from lineshaft.engine.feed.events import NOW, Events
from lineshaft.errors import CursorExpiredError, LineshaftError, NotFoundError
from lineshaft.server.framework.streams import PING_EVERY_SEC, Allow, any_of, is_refused
from lineshaft.types import Event, Scope

#: How often the feed is read.
_LOOK_EVERY_SEC = 0.25
#: Events that are read at once. If there are more, every open page is taken to have changed.
_MOST_EVENTS = 500
#: The pause after an error.
_AGAIN_AFTER_SEC = 1.0

_log = logging.getLogger("lineshaft.http")


class PageKey(NamedTuple):
    """What decides how a page looks."""

    url: str
    scope: Scope


class RenderedPage(Struct, frozen=True):
    #: The parts of the page that change: its own, the navigation with its counts, and the banners.
    parts: Mapping[str, str]
    topics: frozenset[str]
    at_most_every_sec: float
    refresh_sec: float | None


Render = Callable[[PageKey], Awaitable[RenderedPage]]


class _Channel:
    """One open page."""

    def __init__(self, key: PageKey) -> None:
        self.key = key
        self.listeners = 0
        #: Until the first rendering is done, any event may concern it.
        self.topics: frozenset[str] = frozenset({EVERYTHING})
        self.changed = asyncio.Event()
        #: The newest message, and the event that is set when there is another.
        self.message: bytes | None = None
        self.news = asyncio.Event()
        self.running: asyncio.Task[None] | None = None

    def publish(self, kind: str, body: object) -> None:
        message = b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(body))
        if message != self.message:
            self.message = message
            news, self.news = self.news, asyncio.Event()
            news.set()


class Live:
    def __init__(self, events: Events, render: Render, stopping: asyncio.Event) -> None:
        self._events = events
        self._render = render
        self._stopping = stopping
        self._channels: dict[PageKey, _Channel] = {}
        self._following: asyncio.Task[None] | None = None

    async def close(self) -> None:
        tasks = [channel.running for channel in self._channels.values()]
        running = [task for task in (self._following, *tasks) if task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    @contextlib.contextmanager
    def _open(self, key: PageKey) -> Iterator[_Channel]:
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = _Channel(key)
            channel.running = asyncio.create_task(self._run(channel), name=f"lineshaft page {key.url[:80]}")
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow(), name="lineshaft live pages")
        channel.listeners += 1
        try:
            yield channel
        finally:
            channel.listeners -= 1
            if not channel.listeners and channel.running is not None:
                channel.running.cancel()
                del self._channels[key]

    async def messages(self, key: PageKey, allow: Allow) -> AsyncIterator[bytes]:
        """Server-sent events: the page now, and again whenever it has changed."""
        now = asyncio.get_running_loop().time
        allowed_until = now() + PING_EVERY_SEC
        with self._open(key) as channel:
            sent: bytes | None = None
            yield b"retry: 1000\n\n"
            while not self._stopping.is_set():
                if now() >= allowed_until:
                    if await is_refused(allow):
                        yield b"event: ended\ndata: null\n\n"
                        return
                    allowed_until = now() + PING_EVERY_SEC
                if channel.message is not None and channel.message is not sent:
                    sent = channel.message
                    yield sent
                elif not await any_of(channel.news, self._stopping):
                    yield b": keep-alive\n\n"

    async def _run(self, channel: _Channel) -> None:
        """Render a page again and again, while it is open."""
        while True:
            channel.changed.clear()
            again_sec: float | None = _AGAIN_AFTER_SEC
            pause_sec = _AGAIN_AFTER_SEC
            try:
                page = await self._render(channel.key)
            except NotFoundError as error:
                channel.publish("gone", str(error))
                again_sec = None
            except LineshaftError as error:
                channel.publish("away", str(error))
            except Exception:  # noqa: BLE001 - logged with its traceback; the page stands still until then
                _log.exception("Rendering an open page failed, retrying: %s", channel.key.url[:200])
            else:
                channel.topics = page.topics
                channel.publish("page", page.parts)
                pause_sec, again_sec = page.at_most_every_sec, page.refresh_sec
            await asyncio.sleep(pause_sec)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if again_sec is None else max(0.0, again_sec - pause_sec)):
                    await channel.changed.wait()

    async def _follow(self) -> None:
        """Read the feed while pages are open, and mark those that an event concerns."""
        position: str | None = NOW
        # A page may have been rendered before the place in the feed was known.
        missed = True
        while self._channels:
            try:
                page = await self._events.read(position, limit=_MOST_EVENTS)
                topics = {topic for event in page.items for topic in _topics(event)}
                position = page.next_cursor
                if not page.caught_up:
                    position, missed = NOW, True
                self._mark(topics, everything=missed)
                missed = position == NOW
            except CursorExpiredError:
                position, missed = NOW, True
            except Exception as error:  # noqa: BLE001 - without this task all pages would stand still
                _log.warning("Reading the event feed for open pages failed, retrying: %r", error)
                position, missed = NOW, True
                await asyncio.sleep(_AGAIN_AFTER_SEC)
            await asyncio.sleep(_LOOK_EVERY_SEC)

    def _mark(self, topics: set[str], *, everything: bool) -> None:
        if not topics and not everything:
            return
        for channel in self._channels.values():
            if everything or EVERYTHING in channel.topics or not channel.topics.isdisjoint(topics):
                channel.changed.set()


def _topics(event: Event) -> list[str]:
    found = [event.kind]
    if event.task_id is not None:
        found.append(f"task:{event.task_id}")
    if event.dag_id is not None:
        found.append(f"dag:{event.dag_id}")
    if event.agent_id is not None:
        found.append(f"agent:{event.agent_id}")
    return found
