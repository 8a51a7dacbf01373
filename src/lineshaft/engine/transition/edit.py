"""Editing a task: priority, deadline, tags and limits of one that hasn't ended, limits of a dead letter."""

from decimal import Decimal
from typing import Any

from msgspec import Struct

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.live.parking import reorder_parked
from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.live.waking import wake_ready
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_row, fetch_rows
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.transition.effects import log_events
from lineshaft.engine.transition.rows import NewEvent
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import InvalidTransitionError
from lineshaft.model import budget
from lineshaft.model.states import Status
from lineshaft.model.tasks import bits_of
from lineshaft.types.changes import LIMITS, TaskChange

_SQL = catalog.load(__name__)


class _EndedTask(Struct, frozen=True):
    status: str
    dag_id: str | None
    epoch: int
    #: The task is cancelled when its deadline passes: a new deadline lets it be retried or rerun.
    expires: bool


class Edit:
    def __init__(self, transitions: Transitions, lanes: Lanes) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._locks = transitions.locks
        self._lanes = lanes

    async def edit(self, task_id: str, change: TaskChange) -> None:
        values = change.wanted()

        async def work(connection: Connection) -> None:
            task = (await self._locks.lock(connection, [task_id])).get(task_id)
            if task is None:
                await self._change_dead_letter(connection, task_id, values)
            else:
                await self._change_live(connection, task, values)

        await self._database.run(work)

    async def _change_live(self, connection: Connection, task: LockedTask, values: dict[str, Any]) -> None:
        # An output that waits for a gate elsewhere may need a higher limit to pay for it.
        if any(name in values for name in LIMITS) and task.agent_id is not None:
            raise InvalidTransitionError(
                f"Can't change the limits of task {task.id}: it is {task.status}, and its attempt began with "
                "the present ones. Release or cancel it first."
            )
        lane_id = None
        limits = task.max_cost_usd, task.max_total_cost_usd
        wanted = values.get("max_cost_usd", limits[0]), values.get("max_total_cost_usd", limits[1])
        if wanted != limits:
            lane_id = await self._lanes.like(
                connection, task.lane_id, budget.attempt_limit(*wanted, task.cost_usd)
            )
        before = await self._write(connection, task.id, values, lane_id)
        changed = _changed(before, values)
        if not changed:
            return
        effects = self._transitions.effects()
        effects.event(task, ["task.changed"], with_actor(changed))
        await effects.write(connection)
        if task.status == Status.READY:
            await reorder_parked(connection, task, self._transitions.now)
            if lane_id is not None:
                await wake_ready(connection, [task.id])

    async def _change_dead_letter(self, connection: Connection, task_id: str, values: dict[str, Any]) -> None:
        ended = await fetch_row(connection, _EndedTask, _SQL["lock_ended"], {"id": task_id})
        status = await self._locks.end_status(connection, task_id) if ended is None else ended.status
        changeable = LIMITS if status == Status.DEAD_LETTERED else ()
        if ended is not None and ended.expires:
            changeable = (*changeable, "deadline")
        if ended is None or not changeable:
            raise InvalidTransitionError(f"Can't change task {task_id}: it is {status} already.")
        if refused := [name for name in values if name not in changeable]:
            again = "rerun" if status == Status.COMPLETED else "retry"
            raise InvalidTransitionError(
                f"Can't change {', '.join(refused)} of task {task_id}: it is {status}, so only "
                f"{', '.join(changeable)} can be changed; {again} it first."
            )
        changed = _changed(await self._write(connection, task_id, values, None), values)
        if changed:
            data = with_actor(changed)
            event = NewEvent.of(["task.changed"], task_id, ended.dag_id, epoch=ended.epoch, data=data)
            await log_events(connection, self._database.now, [event])

    async def _write(
        self, connection: Connection, task_id: str, values: dict[str, Any], lane_id: int | None
    ) -> TaskChange:
        parameters = {
            **self._database.now,
            **dict.fromkeys(TaskChange.__struct_fields__),
            **values,
            "id": task_id,
            "lane_id": lane_id,
            "fixed_limits": bits_of(values),
            "keep": [name for name in TaskChange.__struct_fields__ if name not in values],
        }
        (before,) = await fetch_rows(connection, TaskChange, _SQL["change_task"], parameters)
        return before


def _changed(before: TaskChange, values: dict[str, Any]) -> dict[str, Any]:
    """The changed fields, for the event; money is a number there."""
    return {
        name: {"from": _plain(getattr(before, name)), "to": _plain(value)}
        for name, value in values.items()
        if value != getattr(before, name)
    }


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value
