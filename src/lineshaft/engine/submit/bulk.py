"""Bulk submission of standalone tasks that differ only in their specs.

What they share is checked and computed once. Specs are checked while they are written: the server processes
one part of the first table while the next one is made. An invalid spec rolls back the transaction.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime

from lineshaft.engine.postgres.copy import Constant, RowFormat, copy_all, copy_of
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.submit.columns import (
    LIVE_DEFAULTS,
    TASK_DEFAULTS,
    event_columns,
    live_columns,
    row_values,
)
from lineshaft.engine.submit.drafts import Draft, virtual_dag
from lineshaft.ids import new_id
from lineshaft.model.admission import fair_key_of
from lineshaft.model.fields import encoded_json
from lineshaft.model.tasks import NewTask, TaskRow, TaskRules, resolve

#: Rows of one part: enough to keep the server busy while the next part is made.
_PART = 250


class UniformTasks:
    def __init__(self, tasks: Sequence[NewTask], rules: TaskRules) -> None:
        self._tasks = tasks
        self.row: TaskRow = resolve(tasks[0], place="tasks[0]", rules=rules)
        #: The tasks written so far.
        self.ids: list[str] = []

    async def write(self, connection: Connection, lane_id: int, now: datetime, generation: int) -> None:
        self.ids = []
        row_format = RowFormat(
            "task", ["id", "dag_id", "spec"], {**row_values(self.row), "created_at": now}, TASK_DEFAULTS
        )
        one = Draft(
            id="",
            row=self.row,
            spec=b"",
            place="",
            parent_id=None,
            dag_id="",
            live_dag_id=None,
            lane_id=lane_id,
        )
        live = live_columns([one], now, generation)
        if (key := fair_key_of(self.row.admission)) is not None and live["status"] == Constant("READY"):
            # All but the first are behind another of their key.
            live["parked_key"] = [None, *[key] * (len(self._tasks) - 1)]
        await copy_all(
            connection,
            [
                lambda: row_format.copy(self._parts(row_format)),
                lambda: copy_of("task_live", {**live, "id": self.ids}, LIVE_DEFAULTS),
                lambda: copy_of("event", event_columns({**live, "id": self.ids}, now), {}),
            ],
        )

    def _parts(self, row_format: RowFormat) -> Iterator[bytes]:
        for first in range(0, len(self._tasks), _PART):
            part = self._tasks[first : first + _PART]
            specs = [
                encoded_json("spec", task.spec, place=f"tasks[{n}]").decode()
                for n, task in enumerate(part, first)
            ]
            ids = [new_id("task") for _ in part]
            yield row_format.rows(ids, list(map(virtual_dag, ids)), specs)
            self.ids += ids
