"""Search in the decision reports of completed tasks."""

from datetime import datetime

import msgspec
from msgspec import Raw
from psycopg.rows import dict_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.read.pages import (
    decode_cursor,
    encode_cursor,
    refuse_unstorable,
)
from lineshaft.types import Page, Report
from lineshaft.types.page import DEFAULT_LIMIT, check_limit

_SQL = catalog.load(__name__)


class _ReportKey(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    ended_at: datetime
    id: str


class Reports:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def search(
        self,
        query: str = "",
        *,
        type_: str | None = None,
        dag_id: str | None = None,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[Report]:
        """Reports with all of these words, newest first. Quotes make a phrase; `or` and `-word` work."""
        check_limit(limit)
        refuse_unstorable(q=[query], type=[type_ or ""], dag_id=[dag_id or ""])
        before = decode_cursor(cursor, _ReportKey)
        async with (
            self._database.connection() as connection,
            connection.cursor(row_factory=dict_row) as rows,
        ):
            await rows.execute(
                _SQL["search_reports" if query.strip() else "latest_reports"],
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
        page = [
            Report(decision_report_json=Raw(row.pop("decision_report")), task_id=row.pop("id"), **row)
            for row in found[:limit]
        ]
        more = len(found) > limit
        return Page(page, encode_cursor(_ReportKey(page[-1].ended_at, page[-1].task_id)) if more else None)
