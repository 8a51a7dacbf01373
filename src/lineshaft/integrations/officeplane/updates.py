"""Messages for every change of a task's state, in OfficePlane's format and states.

One reader of the event feed serves all listeners: each task is read and encoded once. Listeners take
messages at their own pace. One that falls too far behind is disconnected, so that it neither delays the
others nor fills the memory; it should reconnect and read the list.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from lineshaft import background
from lineshaft.engine.feed.event_query import EventQuery
from lineshaft.engine.feed.events import NOW, Events
from lineshaft.engine.read.queries import Queries
from lineshaft.errors import CursorExpiredError
from lineshaft.integrations.officeplane.changes import KINDS, state_after
from lineshaft.integrations.officeplane.tasks import DocumentTask, TaskConverter
from lineshaft.server.framework.streams import AGAIN_AFTER_SEC, Tail, any_of
from lineshaft.types import Event, Task
from lineshaft.types.json import encode

#: The most that is buffered for one listener; a single message may be larger.
MAX_BUFFERED_BYTES = 4 << 20
_EVENTS_AT_ONCE = 50

_log = logging.getLogger("lineshaft.http")

#: States that are remembered, of the tasks that changed last.
_MOST_REMEMBERED = 20_000


class Shown:
    """The last state of each task in messages: a message tells a change, and no state twice in a row."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, str] = OrderedDict()

    def is_change(self, task_id: str, state: str, before: str | None) -> bool:
        """`before`: the state of a task that no message has shown, as far as its event tells it."""
        known = self._states.pop(task_id, before)
        self._states[task_id] = state
        if len(self._states) > _MOST_REMEMBERED:
            self._states.popitem(last=False)
        return known != state


class Listener:
    def __init__(self) -> None:
        self._buffer: deque[bytes] = deque()
        self._size = 0
        self._some = asyncio.Event()
        #: Set when it has fallen too far behind: it gets no more messages.
        self.lost = asyncio.Event()

    def put(self, message: bytes) -> None:
        if self._buffer and self._size + len(message) > MAX_BUFFERED_BYTES:
            self._buffer.clear()
            self._size = 0
            self.lost.set()
            return
        self._buffer.append(message)
        self._size += len(message)
        self._some.set()

    async def next(self) -> bytes:
        while not self._buffer:
            self._some.clear()
            await self._some.wait()
        message = self._buffer.popleft()
        self._size -= len(message)
        return message


class Updates:
    def __init__(self, tail: Tail, events: Events, queries: Queries, converter: TaskConverter) -> None:
        self._tail = tail
        self._reading = EventQuery(events, _EVENTS_AT_ONCE, kinds=KINDS)
        self._queries = queries
        self._converter = converter
        self._listeners: set[Listener] = set()
        self._sending: asyncio.Task[None] | None = None
        self._shown = Shown()

    @contextlib.asynccontextmanager
    async def listener(self, token_id: str | None, address: str) -> AsyncIterator[Listener]:
        """A listener of this caller for everything that happens from now on."""
        with self._tail.watched(token_id, address):
            own = Listener()
            if not self._is_sending():
                # The position is fixed before the client is accepted.
                position = (await self._reading.after(NOW)).next_cursor
                if not self._is_sending():
                    # Without a listener the changes were not followed.
                    self._shown = Shown()
                    self._sending = asyncio.create_task(self._send(position), name="lineshaft updates")
            self._listeners.add(own)
            try:
                yield own
            finally:
                self._listeners.discard(own)
                if not self._listeners:
                    await self.close()

    def _is_sending(self) -> bool:
        return self._sending is not None and not self._sending.done()

    async def _send(self, position: str) -> None:
        while True:
            news = self._tail.news
            try:
                page = await self._reading.after(position)
                messages = await self._messages(page.items)
            except CursorExpiredError:
                position = NOW
                continue
            except Exception as error:  # noqa: BLE001 - without this task no listener would get messages
                _log.warning("Reading updates of tasks failed, retrying: %r", error)
                await asyncio.sleep(AGAIN_AFTER_SEC)
                continue
            position = page.next_cursor
            for message in messages:
                self._send_to_all(message)
            if page.caught_up:
                await any_of(news)

    def _send_to_all(self, message: bytes) -> None:
        for listener in [*self._listeners]:
            listener.put(message)
            if listener.lost.is_set():
                self._listeners.discard(listener)

    async def _messages(self, events: Sequence[Event]) -> list[bytes]:
        found = await self._tasks({event.task_id for event in events if event.task_id is not None})
        batches = {task.parent_id for task in found.values() if task.parent_id is not None} - found.keys()
        found |= {name: task for name, task in (await self._tasks(batches)).items() if task.is_batch}
        messages = []
        for event in events:
            task, state = found.get(event.task_id or ""), state_after(event)
            if task is None or state is None:
                continue
            view = self._converter.view(task)
            if self._shown.is_change(task.id, state, _state_before(event, view)):
                messages.append(_message(view.at(state), event.at))
            batch = found.get(task.parent_id or "")
            if event.kind == "task.started" and batch is not None and batch.is_batch:
                # A batch has no transition of its own when its first child starts.
                first = batch.started_at is None or event.at <= batch.started_at
                if self._shown.is_change(batch.id, "RUNNING", None if first else "RUNNING"):
                    messages.append(_message(self._converter.view(batch).at("RUNNING"), event.at))
        return messages

    async def _tasks(self, ids: set[str]) -> dict[str, Task]:
        return {task.id: task for task in await self._queries.tasks_by_id(sorted(ids))} if ids else {}

    async def close(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            await background.stop(sending)


def _state_before(event: Event, task: DocumentTask) -> str | None:
    """The state that a task had for certain before this event; None: it may have been another."""
    if event.kind in {"task.started", "task.validating"}:
        return "RUNNING"
    # What has failed was RETRYING; what was revived has an event of that first.
    return "QUEUED" if event.kind == "task.ready" and not task.retry_count else None


def _message(task: DocumentTask, at: datetime) -> bytes:
    encoded = encode(task)
    return b'{"type":"task_update","data":%s,"payload":%s,"timestamp":%s}' % (
        encoded,
        encoded,
        encode(at),
    )
