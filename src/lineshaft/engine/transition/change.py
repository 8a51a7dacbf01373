"""Changing a task: priority, deadline, tags and limits of one that hasn't ended, limits of a dead letter."""

from decimal import Decimal
from typing import Any

from msgspec import Struct

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_row, fetch_rows
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.transition.changes import LockedTask, log_events, wake_ready
from lineshaft.engine.transition.dependencies import reorder_parked
from lineshaft.engine.transition.rows import NewEvent
from lineshaft.engine.transition.task_locks import HELD
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import InvalidTransitionError
from lineshaft.model.priority import Lane
from lineshaft.model.states import Status
from lineshaft.types.changes import LIMITS, TaskChange

_SQL = catalog.load(__name__)


class _LaneRow(Struct, frozen=True):
    type: str
    required_capabilities: list[str]
    models: list[str]
    boost_per_minute: float


class _EndedTask(Struct, frozen=True):
    status: str
    dag_id: str | None
    epoch: int
    #: It is cancelled when its deadline passes: a new deadline lets it be retried.
    expires: bool


class Change:
    def __init__(self, transitions: Transitions, lanes: Lanes) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._locks = transitions.locks
        self._lanes = lanes

    async def change(self, task_id: str, change: TaskChange) -> None:
        wanted = change.wanted()

        async def work(connection: Connection) -> None:
            task = (await self._locks.lock(connection, [task_id])).get(task_id)
            if task is None:
                await self._change_dead_letter(connection, task_id, wanted)
            else:
                await self._change_live(connection, task, wanted)

        await self._database.run(work)

    async def _change_live(self, connection: Connection, task: LockedTask, wanted: dict[str, Any]) -> None:
        if any(name in wanted for name in LIMITS) and task.status in HELD:
            raise InvalidTransitionError(
                f"Can't change the limits of task {task.id}: it is {task.status}, and its attempt began with "
                "the present ones. Release or cancel it first."
            )
        lane_id = None
        if "max_cost_usd" in wanted and wanted["max_cost_usd"] != task.max_cost_usd:
            lane_id = await self._lane(connection, task, wanted["max_cost_usd"])
        before = await self._write(connection, task.id, wanted, lane_id)
        changed = _changed(before, wanted)
        if not changed:
            return
        changes = self._transitions.changes()
        changes.event(task, ["task.changed"], with_actor(changed))
        await changes.write(connection)
        if task.status == Status.READY:
            await reorder_parked(connection, task)
            if lane_id is not None:
                await wake_ready(connection, [task.id])

    async def _change_dead_letter(self, connection: Connection, task_id: str, wanted: dict[str, Any]) -> None:
        ended = await fetch_row(connection, _EndedTask, _SQL["lock_ended"], {"id": task_id})
        status = await self._locks.end_status(connection, task_id) if ended is None else ended.status
        of_ended = LIMITS if status == Status.DEAD_LETTERED else ()
        if ended is not None and ended.expires and status != Status.COMPLETED:
            of_ended = (*of_ended, "deadline")
        if ended is None or not of_ended:
            raise InvalidTransitionError(f"Can't change task {task_id}: it is {status} already.")
        if refused := [name for name in wanted if name not in of_ended]:
            raise InvalidTransitionError(
                f"Can't change {', '.join(refused)} of task {task_id}: it is {status}, so only "
                f"{', '.join(of_ended)} can be changed; retry it first."
            )
        changed = _changed(await self._write(connection, task_id, wanted, None), wanted)
        if changed:
            data = with_actor(changed)
            event = NewEvent.of(["task.changed"], task_id, ended.dag_id, epoch=ended.epoch, data=data)
            await log_events(connection, self._database.now, [event])

    async def _write(
        self, connection: Connection, task_id: str, wanted: dict[str, Any], lane_id: int | None
    ) -> TaskChange:
        parameters = {
            **self._database.now,
            **dict.fromkeys(TaskChange.__struct_fields__),
            **wanted,
            "id": task_id,
            "lane_id": lane_id,
            "keep": [name for name in TaskChange.__struct_fields__ if name not in wanted],
        }
        (before,) = await fetch_rows(connection, TaskChange, _SQL["change_task"], parameters)
        return before

    async def _lane(self, connection: Connection, task: LockedTask, cost: Decimal | None) -> int:
        """The lane of the task with another cost. After failures its models are the fallback models."""
        row = await fetch_row(connection, _LaneRow, _SQL["read_lane"], {"id": task.lane_id})
        if row is None:
            raise AssertionError("a live task has a lane")
        lane = Lane.of(row.type, row.required_capabilities, row.models, row.boost_per_minute, cost)
        return (await self._lanes.find(connection, [lane]))[lane].id


def _changed(before: TaskChange, wanted: dict[str, Any]) -> dict[str, Any]:
    """For the event; money as a number."""
    return {
        name: {"from": _plain(getattr(before, name)), "to": _plain(value)}
        for name, value in wanted.items()
        if value != getattr(before, name)
    }


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value
