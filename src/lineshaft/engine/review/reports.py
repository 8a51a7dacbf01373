"""Decision reports of completed tasks: why agents did what they did, found again by words."""

from dataclasses import dataclass
from datetime import datetime

import msgspec
from psycopg.rows import class_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.read.reading import (
    DEFAULT_LIMIT,
    Page,
    check_limit,
    decode_cursor,
    encode_cursor,
    refuse_unstorable,
)


@dataclass(frozen=True, slots=True)
class Report:
    #: Of the task.
    id: str
    type: str
    title: str
    dag_id: str
    agent_id: str | None
    model: str | None
    ended_at: datetime
    #: JSON.
    decision_report: bytes


class _Key(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    ended_at: datetime
    id: str


class Reports:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = catalog.load("review/reports")

    async def search(
        self,
        query: str = "",
        *,
        type_: str | None = None,
        dag_id: str | None = None,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[Report]:
        """Reports with all of these words, newest first. A phrase stands in quotes; `or` and `-word` work."""
        check_limit(limit)
        refuse_unstorable(q=[query], type=[type_ or ""], dag_id=[dag_id or ""])
        before = decode_cursor(cursor, _Key)
        async with (
            self._database.connection() as connection,
            connection.cursor(row_factory=class_row(Report)) as rows,
        ):
            await rows.execute(
                self._sql["search_reports" if query.strip() else "latest_reports"],
                {
                    "query": query,
                    "type": type_,
                    "dag_id": dag_id,
                    "upto": None if before is None else before.ended_at,
                    "before": None if before is None else before.id,
                    "limit": limit + 1,
                },
            )
            found = await rows.fetchall()
        page = found[:limit]
        more = len(found) > limit
        return Page(page, encode_cursor(_Key(page[-1].ended_at, page[-1].id)) if more else None)
