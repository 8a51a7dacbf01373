"""Event sources: the queue's own events create work, each exactly once.

Each source has its place in the event feed. Events are read from there; one transaction fires them and moves
the place, if no other server has moved it. Work carries the number of event sources that led to it, so that
sources which trigger each other in a circle come to an end.
"""

import logging
from collections import Counter
from typing import Any

import msgspec
from msgspec import Struct

from lineshaft.engine.feed.events import NOW, Events
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_row, fetch_rows, fetch_value
from lineshaft.engine.read.queries import Queries
from lineshaft.engine.sources.firing import Firings, Occasion, SourceRow, TooMuchOpenError
from lineshaft.errors import CursorExpiredError, NotFoundError
from lineshaft.sources.definition import compiled
from lineshaft.types import Event, Task
from lineshaft.types.json import encode
from lineshaft.types.sources import FiringOutcome

_SQL = catalog.load(__name__)
_log = logging.getLogger("lineshaft.sources")

#: Events that one transaction fires: it must be short.
_AT_ONCE = 20
_TRIES = 5
#: Leaves of a DAG whose outputs an event has, and how large each may be.
_MOST_OUTPUTS = 50
_MAX_OUTPUT_BYTES = 64 << 10

Counts = Counter[str]


class EventSource(Struct, frozen=True):
    name: str
    cursor: str
    definition: bytes


class EventSources:
    def __init__(self, database: Database, firings: Firings, queries: Queries) -> None:
        self._database = database
        self._firings = firings
        self._queries = queries
        self._events = Events(database)
        #: Sources at their limit.
        self._slowed: set[str] = set()

    async def all(self) -> list[EventSource]:
        """The event sources that are enabled."""
        async with self._database.connection() as connection:
            return await fetch_rows(connection, EventSource, _SQL["list_event_sources"], {})

    async def fire_next(
        self, source: EventSource, *, move_on: bool = True
    ) -> tuple[Counts, EventSource | None]:
        """Fire the next events of a source; returns their outcomes, and the source if it has more to read.

        Without `move_on`, its place stays if there are no events: moving it is a commit.
        """
        definition = compiled(source.definition)
        at_once = min(_AT_ONCE, await self._left(source.name, definition.max_per_minute))
        if at_once <= 0:
            return Counter(), None
        try:
            page = await self._events.read(source.cursor, limit=at_once, kinds=definition.source.on or None)
        except CursorExpiredError:
            return await self._start_again(source), None
        needs = _Needs.of(source.definition)
        described = [
            (event, await self._describe(event, needs))
            for event in page.items
            if not _is_about_a_source(event)
            and (definition.source.single is True or not _is_of_a_lone_task(event))
        ]

        async def work(connection: Connection) -> Counts | None:
            row = await self._lock(connection, source)
            if row is None:
                return None
            counts: Counts = Counter()
            for event, about in described:
                counts[await self._fire(connection, row, event, about)] += 1
            await connection.execute(_SQL["move"], {"id": row.id, "cursor": page.next_cursor})
            return counts

        if not described and page.caught_up and not move_on:
            return Counter(), None
        counts = await self._run(work)
        if counts is None or page.caught_up:
            return counts or Counter(), None
        return counts, EventSource(source.name, page.next_cursor, source.definition)

    async def _left(self, name: str, most: int) -> int:
        """How much a source may still create in this minute."""
        parameters = {**self._database.now, "name": name, "most": most}
        async with self._database.connection() as connection:
            created: int = await fetch_value(connection, _SQL["created_lately"], parameters)
        if created < most:
            self._slowed.discard(name)
        elif name not in self._slowed:
            self._slowed.add(name)
            _log.warning(
                "Source %s has created %d within a minute, its max_per_minute: events wait. Is it a loop?",
                name,
                created,
            )
        return most - created

    async def _run(self, work: Any) -> Counts | None:
        for _ in range(_TRIES):
            try:
                found: Counts | None = await self._database.run(work, pipeline=False)
            except TooMuchOpenError as full:
                await self._firings.make_room(full)
            else:
                return found
        return None

    async def _lock(self, connection: Connection, source: EventSource) -> SourceRow | None:
        own = {**self._database.now, "name": source.name, "cursor": source.cursor}
        return await fetch_row(connection, SourceRow, _SQL["lock_at"], own)

    async def _fire(self, connection: Connection, row: SourceRow, event: Event, about: dict[str, Any]) -> str:
        place = {"dag_id": event.dag_id, "task_id": event.task_id}
        depth = await fetch_value(connection, _SQL["depth"], place)
        occasion = Occasion(about, event_kind=event.kind, depth=depth + 1)
        fired = await self._firings.fire_in(connection, row, occasion, keep_filtered=False)
        return str(fired.outcome)

    async def _start_again(self, source: EventSource) -> Counts:
        """Retention has deleted events before they were read: continue with new ones, and report it."""
        start = (await self._events.read(NOW, limit=1)).next_cursor

        async def work(connection: Connection) -> Counts:
            row = await self._lock(connection, source)
            if row is None:
                return Counter()
            error = "events were deleted before this source has read them (LINESHAFT_KEEP_EVENTS_DAYS)"
            await self._firings.record(connection, row, FiringOutcome.FAILED, error=error)
            await connection.execute(_SQL["move"], {"id": row.id, "cursor": start})
            return Counter({FiringOutcome.FAILED.value: 1})

        return await self._run(work) or Counter()

    async def _describe(self, event: Event, needs: "_Needs") -> dict[str, Any]:
        """The event for templates: with its task or DAG, if the source mentions it."""
        about: dict[str, Any] = {
            "kind": event.kind,
            "at": event.at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "task_id": event.task_id,
            "dag_id": event.dag_id,
            "agent_id": event.agent_id,
            "data": _data(event),
        }
        try:
            if needs.task and event.task_id is not None:
                about["task"] = _plain(await self._queries.task(event.task_id))
            if needs.dag and event.dag_id is not None:
                about["dag"] = await self._describe_dag(event.dag_id)
        except NotFoundError:
            _log.info("Event %s is about something that was deleted", event.kind)
        return about

    async def _describe_dag(self, dag_id: str) -> dict[str, Any]:
        dag = await self._queries.dag(dag_id)
        leaves = await self._queries.tasks_by_id(dag.leaves[:_MOST_OUTPUTS])
        about: dict[str, Any] = _plain(dag)
        # A list of ten thousand ids is of no use to a template.
        del about["tasks"]
        return about | {"outputs": [_output(task) for task in leaves]}


class _Needs(Struct, frozen=True):
    """What a source may use besides the event itself."""

    task: bool
    dag: bool

    @classmethod
    def of(cls, definition: bytes) -> "_Needs":
        return cls(task=b"event.task" in definition, dag=b"event.dag" in definition)


def _is_about_a_source(event: Event) -> bool:
    """An alert that a source has failed: if alerts fired sources that fail, there would be no end."""
    data = _data(event) if event.kind == "alert" else None
    return isinstance(data, dict) and str(data.get("key", "")).startswith("source:")


def _is_of_a_lone_task(event: Event) -> bool:
    """An event of the DAG that a task has which was submitted on its own."""
    data = _data(event) if event.kind.startswith("dag.") else None
    return isinstance(data, dict) and data.get("single") is True


def _data(event: Event) -> Any:
    try:
        return event.data
    except msgspec.DecodeError:
        return None  # numbers that only PostgreSQL can hold


def _output(task: Task) -> dict[str, Any]:
    data = task.output.data_json
    small = len(bytes(data)) <= _MAX_OUTPUT_BYTES
    return {
        "task_id": task.id,
        "type": task.type,
        "title": task.title,
        "status": task.status.value,
        "data": msgspec.json.decode(data) if small else None,
    }


def _plain(value: Any) -> Any:
    """As it is over HTTP."""
    return msgspec.json.decode(encode(value))
