"""Publishes the event feed to a stream of Redis."""

from collections.abc import Iterator, Sequence
from itertools import count

import msgspec
from msgspec import Struct, field

from lineshaft.duties.loop import Counts
from lineshaft.engine.feed.event_stream import EventStream
from lineshaft.integrations.redis.stream import EventBus
from lineshaft.types import Event

_BATCH = 200
#: Batches in one run; the next run continues.
_MOST = 50
#: Runs after which the place in the feed is moved although nothing happened.
_MOVE_EVERY = 20


class Publisher(Struct, frozen=True):
    stream: EventStream
    bus: EventBus
    interval_sec: float = 0.5
    name: str = "publisher"
    _runs: Iterator[int] = field(default_factory=count)

    async def run_once(self) -> Counts:
        published = 0
        move_on = next(self._runs) % _MOVE_EVERY == 0
        for _ in range(_MOST):
            number, has_more = await self.stream.publish_next(self._publish, most=_BATCH, move_on=move_on)
            published += number
            if not has_more:
                break
        return {"published": published}

    async def _publish(self, seq: int, events: Sequence[Event]) -> None:
        await self.bus.add([_entry(number, event) for number, event in enumerate(events, seq)])


def _entry(seq: int, event: Event) -> dict[str, str]:
    """The fields of an entry, all of them text; those without a value are missing."""
    fields = {
        "seq": seq,
        "kind": event.kind,
        "at": event.at.isoformat(),
        "task_id": event.task_id,
        "dag_id": event.dag_id,
        "agent_id": event.agent_id,
        "epoch": event.epoch,
        "type": event.type,
        "title": event.title,
        "data": None if event.data is None else msgspec.json.encode(event.data).decode(),
    }
    return {name: str(value) for name, value in fields.items() if value is not None}
