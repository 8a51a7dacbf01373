"""Many standalone tasks that differ in their specs alone, as a bulk submission mostly has them.

What they share is checked and worked out once. Their specs are checked while they are written: the server
takes in one part of the first table as the next is made, so that neither waits for the other. A fault that is
found on the way ends the transaction, and nothing was changed.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime

from lineshaft.engine.postgres.copy import Copy, RowFormat, copy_all, copy_of
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
from lineshaft.model.fields import encoded_json
from lineshaft.model.tasks import GateFaults, NewTask, TaskRow, resolve

#: Enough for the server to be busy with while the next are made.
_PART = 250


class AlikeTasks:
    def __init__(self, tasks: Sequence[NewTask], gate_faults: GateFaults | None) -> None:
        self._tasks = tasks
        self.row: TaskRow = resolve(tasks[0], place="tasks[0]", gate_faults=gate_faults)
        #: Of those that are written.
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
        await copy_all(
            connection,
            [
                lambda: Copy(row_format.statement, self._parts(row_format)),
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
