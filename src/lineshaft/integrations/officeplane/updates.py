"""Every transition of every task, told to whoever listens, in document 003's words.

One reader of the event feed serves all listeners: each task is read and written down once. A listener takes
messages at its own pace; one that falls too far behind is let go, so it neither holds up the others nor fills
the memory. It comes back and reads the list.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime

from msgspec.structs import replace

from lineshaft.engine.feed.event_query import EventQuery
from lineshaft.engine.feed.events import NOW, Events
from lineshaft.engine.read.queries import Queries
from lineshaft.errors import CursorExpiredError
from lineshaft.integrations.officeplane.tasks import DocumentTask, Officeplane
from lineshaft.server.framework.streams import AGAIN_AFTER_SEC, Tail, any_of
from lineshaft.types import Event, Task
from lineshaft.types.json import encode

#: What waits for one listener at most; a single message may be larger.
MAX_WAITING_BYTES = 4 << 20
_EVENTS_AT_ONCE = 50

_log = logging.getLogger("lineshaft.http")

#: The state that each transition leads to. What was read afterwards may be further on already. None: what
#: was read tells.
_LEADS_TO: Mapping[str, str | None] = {
    "task.created": "QUEUED",
    "task.ready": "QUEUED",
    "task.claimed": "RUNNING",
    "task.started": "RUNNING",
    "task.validating": "RUNNING",
    "task.completed": "COMPLETED",
    "task.failed": "FAILED",
    "task.retry_scheduled": "RETRYING",
    "task.rate_limited": "RETRYING",
    "task.released": "QUEUED",
    "task.waiting": "QUEUED",
    "task.dead_lettered": None,
    "task.resolved": None,
    "task.cancelled": "CANCELLED",
}


class Listener:
    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._some = asyncio.Event()
        #: Set when it has fallen too far behind: nothing more comes.
        self.lost = asyncio.Event()

    def tell(self, message: bytes) -> None:
        if self._waiting and self._size + len(message) > MAX_WAITING_BYTES:
            self._waiting.clear()
            self._size = 0
            self.lost.set()
            return
        self._waiting.append(message)
        self._size += len(message)
        self._some.set()

    async def next(self) -> bytes:
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        message = self._waiting.popleft()
        self._size -= len(message)
        return message


class Updates:
    def __init__(self, tail: Tail, events: Events, queries: Queries, officeplane: Officeplane) -> None:
        self._tail = tail
        self._reading = EventQuery(events, _EVENTS_AT_ONCE, kinds=tuple(_LEADS_TO))
        self._queries = queries
        self._officeplane = officeplane
        self._listeners: set[Listener] = set()
        self._telling: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def listener(self) -> AsyncIterator[Listener]:
        """Who hears of everything that happens from now on."""
        with self._tail.watched():
            own = Listener()
            if not self._tells():
                # Known before anybody is told that they listen.
                place = (await self._reading.after(NOW)).next_cursor
                if not self._tells():
                    self._telling = asyncio.create_task(self._tell(place), name="lineshaft updates")
            self._listeners.add(own)
            try:
                yield own
            finally:
                self._listeners.discard(own)
                if not self._listeners:
                    await self.close()

    def _tells(self) -> bool:
        return self._telling is not None and not self._telling.done()

    async def _tell(self, place: str) -> None:
        while True:
            news = self._tail.news
            try:
                page = await self._reading.after(place)
                messages = await self._messages(page.items)
            except CursorExpiredError:
                place = NOW
                continue
            except Exception as error:  # noqa: BLE001 - without this task all listeners would hear nothing more
                _log.warning("Updates of tasks can't be read, trying again: %r", error)
                await asyncio.sleep(AGAIN_AFTER_SEC)
                continue
            place = page.next_cursor
            for message in messages:
                self._tell_all(message)
            if page.caught_up:
                await any_of(news)

    def _tell_all(self, message: bytes) -> None:
        for listener in [*self._listeners]:
            listener.tell(message)
            if listener.lost.is_set():
                self._listeners.discard(listener)

    async def _messages(self, events: Sequence[Event]) -> list[bytes]:
        found = await self._tasks({event.task_id for event in events if event.task_id is not None})
        batches = {task.parent_id for task in found.values() if task.parent_id is not None} - found.keys()
        found |= {name: task for name, task in (await self._tasks(batches)).items() if task.is_batch}
        messages = []
        for event in events:
            task = found.get(event.task_id or "")
            if task is None:
                continue
            messages.append(_message(_at(self._officeplane.view(task), event.kind), event.at))
            batch = found.get(task.parent_id or "")
            if event.kind == "task.started" and batch is not None and batch.is_batch:
                # It has no transition of its own when it begins.
                messages.append(_message(self._officeplane.view(batch), event.at))
        return messages

    async def _tasks(self, ids: set[str]) -> dict[str, Task]:
        return {task.id: task for task in await self._queries.tasks_by_id(sorted(ids))} if ids else {}

    async def close(self) -> None:
        telling, self._telling = self._telling, None
        if telling is not None:
            telling.cancel()
            await asyncio.wait({telling})


def _at(task: DocumentTask, kind: str) -> DocumentTask:
    """As it was by that transition, as far as it matters: what came later is left out."""
    state = _LEADS_TO[kind]
    if state is None or state == task.state:
        return task
    return replace(task, state=state, result=None, completed_at=None, cancelled_at=None)


def _message(task: DocumentTask, at: datetime) -> bytes:
    encoded = encode(task)
    return b'{"type":"task_update","data":%s,"payload":%s,"timestamp":%s}' % (
        encoded,
        encoded,
        encode(at),
    )
