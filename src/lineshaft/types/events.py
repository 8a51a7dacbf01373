"""Events of the feed."""

from datetime import datetime
from functools import cached_property
from typing import Any

from msgspec import Raw, Struct, field

from lineshaft.types.json import JsonStruct, decoded, null


class Event(JsonStruct, frozen=True):
    #: Read after this to continue behind this event.
    cursor: str
    kind: str
    at: datetime
    task_id: str | None
    dag_id: str | None
    agent_id: str | None
    epoch: int | None
    data_json: Raw = field(name="data", default_factory=null)
    #: The type of the task; None: the event is about something else, or the task was deleted.
    type: str | None = None
    #: The title of the task, or of the DAG.
    title: str | None = None

    @cached_property
    def data(self) -> Any:
        return decoded(self.data_json)


class EventPage(Struct, frozen=True):
    items: list[Event]
    #: Always present, to continue from.
    next_cursor: str
    #: These are all events so far.
    caught_up: bool


class TaskEventPage(Struct, frozen=True):
    items: list[Event]
    #: Null: these are all events so far.
    next_cursor: str | None
    caught_up: bool
