"""Lanes that transactions of this process gave claimable tasks to, for a process that passes them on itself.

While `active`, sessions get these lanes from PostgreSQL instead of sending a notification, which would make
all commits with one take turns. They arrive as messages during the transaction (`report_lanes_1`), and are
here once its connection is given back: after the commit. Those of a transaction that was rolled back arrive
too, because it may not be known; a superfluous wake-up costs an empty claim.
"""

import asyncio
from collections import Counter
from typing import Any

from psycopg import AsyncConnection
from psycopg.errors import Diagnostic

#: The most wake-ups for one lane at a time: an agent that finds more than it can take wakes another.
MOST_WAKES = 64

_PREFIX = "lineshaft lanes "
_SWITCH = "SELECT set_config('lineshaft.wakeups', %s, false)"


class ReportingConnection(AsyncConnection[Any]):
    """A connection that keeps the reports of its transaction."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reports_lanes = False
        self.reported: list[str] = []
        self.add_notice_handler(self._hear)

    def _hear(self, message: Diagnostic) -> None:
        text = message.message_primary
        if text is not None and text.startswith(_PREFIX):
            self.reported.append(text.removeprefix(_PREFIX))


class LaneReports:
    def __init__(self) -> None:
        self.active = False
        self._lanes: Counter[int] = Counter()
        self._arrived = asyncio.Event()

    async def prepare(self, connection: AsyncConnection[Any]) -> None:
        """Make the session of a connection report, or not: a round trip after a change."""
        if isinstance(connection, ReportingConnection) and connection.reports_lanes != self.active:
            active = self.active
            await connection.execute(_SWITCH, ["redis" if active else ""])
            connection.reports_lanes = active

    def collect(self, connection: AsyncConnection[Any]) -> None:
        if not isinstance(connection, ReportingConnection) or not connection.reported:
            return
        for report in connection.reported:
            for lane in report.split(","):
                lane_id, tasks = lane.split(":")
                self.add(int(lane_id), int(tasks))
        connection.reported.clear()

    def add(self, lane: int, wakes: int = 1) -> None:
        self._lanes[lane] = min(self._lanes[lane] + wakes, MOST_WAKES)
        self._arrived.set()

    @property
    def waiting(self) -> bool:
        return bool(self._lanes)

    async def take(self) -> dict[int, int]:
        """All that has arrived: the number of wake-ups by lane."""
        await self._arrived.wait()
        self._arrived.clear()
        lanes, self._lanes = self._lanes, Counter()
        return lanes
