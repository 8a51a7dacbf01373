"""Schedules: each tick fires exactly once, however many servers run or die.

A transaction locks one due schedule, which others skip, fires its ticks and moves it to the next one. If its
server is killed at any moment, the transaction is rolled back, and another server finds the schedule as it
was.
"""

import logging
from collections import Counter
from datetime import datetime, timedelta

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_row, fetch_value
from lineshaft.engine.sources.firing import Firings, Key, Occasion, SourceRow, TooMuchOpenError, tick_event
from lineshaft.sources.ticks import due
from lineshaft.types.sources import FiringOutcome

_SQL = catalog.load(__name__)
_log = logging.getLogger("lineshaft.sources")

#: With `catch_up: all`; the rest is reported as skipped.
MOST_CAUGHT_UP = 1_000
#: Ticks that one transaction fires: it must be short.
_AT_ONCE = 20
#: A tick that fires later than this was missed.
_ON_TIME = timedelta(seconds=60)
#: Ticks are remembered for so long, so that a clock that was set back doesn't fire them again.
_REMEMBERED_SEC = 7 * 86_400.0
_AGAIN_AFTER = timedelta(hours=1)
_TRIES = 5

Counts = Counter[str]


class Schedules:
    def __init__(self, database: Database, firings: Firings) -> None:
        self._database = database
        self._firings = firings

    async def fire_due(self) -> Counts | None:
        """Fire the ticks of one due schedule; returns their outcomes, or None if nothing is due."""
        for _ in range(_TRIES):
            try:
                return await self._database.run(self._fire_one, pipeline=False)
            except TooMuchOpenError as full:
                await self._firings.make_room(full)
        # Others create work as fast as it is cancelled here: the next run continues.
        return None

    async def next_due_sec(self) -> float | None:
        """Seconds until a schedule is due; None: there is none."""
        async with self._database.connection() as connection:
            found = await fetch_value(connection, _SQL["next_due"], self._database.now)
        return None if found is None else max(float(found), 0.0)

    async def _fire_one(self, connection: Connection) -> Counts | None:
        row = await fetch_row(connection, SourceRow, _SQL["lock_due"], self._database.now)
        if row is None:
            return None
        if row.next_tick is None:
            raise AssertionError("a schedule that is due has a tick")
        counts: Counts = Counter()
        try:
            definition = row.compiled
            ticks = definition.ticks(row.created_at)
            found, earlier = due(ticks, row.next_tick, row.now, MOST_CAUGHT_UP)
            # The jitter of the last one may not be over yet.
            found = [tick for tick in found if definition.due_at(tick) <= row.now] or [row.next_tick]
            following = ticks.after(
                found[:_AT_ONCE][-1] if definition.source.catch_up == "all" else found[-1]
            )
        except Exception as error:  # noqa: BLE001 - one faulty schedule must not stop the others
            _log.exception("The ticks of source %s can't be computed", row.name)
            fault = f"The next tick can't be computed ({type(error).__name__}); trying again in an hour."
            await self._firings.record(connection, row, FiringOutcome.FAILED, error=fault)
            await self._move(connection, row, row.next_tick, row.now + _AGAIN_AFTER)
            return counts
        await self._fire_ticks(connection, row, found, earlier, counts)
        await self._move(connection, row, following, definition.due_at(following))
        return counts

    async def _fire_ticks(
        self, connection: Connection, row: SourceRow, found: list[datetime], earlier: int, counts: Counts
    ) -> None:
        """Fire due ticks, or one for all of them, as the source says."""
        catch_up, since = row.compiled.source.catch_up, row.next_tick or row.now
        if catch_up == "all":
            if earlier:
                await self._skip(connection, row, earlier, since, counts)
            for tick in found[:_AT_ONCE]:
                await self._fire(connection, row, tick, 0, counts)
            return
        missed = len(found) - 1 + earlier
        late = row.now - row.compiled.due_at(found[-1]) > _ON_TIME
        if catch_up == "skip" and (missed or late):
            await self._skip(connection, row, missed + late, since, counts)
        if catch_up != "skip" or not late:
            await self._fire(connection, row, found[-1], missed, counts)

    async def _fire(
        self, connection: Connection, row: SourceRow, tick: datetime, missed: int, counts: Counts
    ) -> None:
        key = Key(f"tick:{tick.isoformat()}", _REMEMBERED_SEC)
        fired = await self._firings.fire_in(connection, row, Occasion(tick_event(tick, missed), [key]))
        counts[str(fired.outcome)] += 1

    async def _skip(
        self, connection: Connection, row: SourceRow, missed: int, since: datetime, counts: Counts
    ) -> None:
        catch_up = row.compiled.source.catch_up
        error = f"{missed} ticks from {since:%Y-%m-%dT%H:%M:%SZ} on were missed (catch_up: {catch_up})"
        await self._firings.record(connection, row, FiringOutcome.SKIPPED, error=error)
        counts[FiringOutcome.SKIPPED] += 1

    async def _move(self, connection: Connection, row: SourceRow, tick: datetime, at: datetime) -> None:
        await connection.execute(_SQL["move"], {"id": row.id, "next_tick": tick, "next_at": at})
