"""Publishes the progress of tasks to `{prefix}sse:TASK`, where OfficePlane's pages listen.

Every server reads the event feed in order and publishes what no other has published yet: an event is marked
in the script that publishes it. So no server has to be elected, and the messages of a task keep their order.
What is published is stored nowhere: a page that comes later reads the task.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lineshaft.engine.feed.event_query import EventQuery
from lineshaft.engine.feed.events import NOW, Events
from lineshaft.integrations.redis.connection import RedisServer
from lineshaft.types import Event

_KINDS = ("task.started", "task.progress", "task.completed", "task.dead_lettered", "task.cancelled")
_EVENTS_AT_ONCE = 200
#: KEYS: the mark of the event. ARGV: channel, message, seconds.
_PUBLISH = """
if redis.call('SET', KEYS[1], '1', 'NX', 'EX', ARGV[3]) then redis.call('PUBLISH', ARGV[1], ARGV[2]) end
return ''
"""
#: No server is further behind another one, or it publishes again.
_MARK_SEC = 300


class SsePublisher:
    """A duty."""

    name = "SSE publisher"
    interval_sec = 0.2

    def __init__(self, events: Events, server: RedisServer, prefix: str = "officeplane:") -> None:
        self._feed = EventQuery(events, _EVENTS_AT_ONCE, kinds=_KINDS)
        self._server = server
        self._prefix = prefix + "sse:"
        self._place = NOW

    async def run_once(self) -> Mapping[str, int]:
        published = 0
        while True:
            page = await self._feed.after(self._place)
            if page.items:
                with self._server.reporting():
                    await self._publish(page.items)
            self._place = page.next_cursor
            published += len(page.items)
            if page.caught_up:
                return {"progress published": published} if published else {}

    async def _publish(self, events: Sequence[Event]) -> None:
        # A duty is never closed: it keeps no connection.
        async with self._server.connect("lineshaft-sse") as client:
            publish = client.register_script(_PUBLISH)
            for event in events:
                channel = self._prefix + str(event.task_id)
                mark = "lineshaft:sse:" + _digest(event)
                await publish(keys=[mark], args=[channel, encode_message(event), _MARK_SEC])


def encode_message(event: Event) -> bytes:
    """The message for an event of `_KINDS`: readers end at `stop` or `error`."""
    data = event.data if isinstance(event.data, dict) else {}
    about: dict[str, Any] = {"task_id": event.task_id}
    if event.kind == "task.started":
        name, about = "start", {**about, "task_type": event.type, "title": event.title}
    elif event.kind == "task.progress":
        name, about = "delta", data or {"content": event.data}
    elif event.kind == "task.completed":
        name = "stop"
    else:
        reason = data.get("error") or data.get("reason")
        state = "cancelled" if event.kind == "task.cancelled" else "failed"
        name, about = "error", {**about, "message": f"{state}: {reason}" if reason else state}
    return msgspec.json.encode({"event": name, "data": about})


def _digest(event: Event) -> str:
    """The same on every server; a cursor isn't."""
    parts = (event.at.isoformat(), event.kind, event.task_id, event.epoch, bytes(event.data_json))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
