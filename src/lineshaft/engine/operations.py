"""What people do to tasks: cancel, retry, change, add dependencies, pause and resume types."""

from collections.abc import Sequence

from lineshaft.engine.guards.pauses import Pauses
from lineshaft.engine.transition.cancel import Cancel
from lineshaft.engine.transition.change import Change
from lineshaft.engine.transition.dependencies import Dependencies
from lineshaft.engine.transition.revive import Revive
from lineshaft.model.states import Status
from lineshaft.types.changes import TaskChange


class Operations:
    def __init__(
        self, cancel: Cancel, revive: Revive, change: Change, dependencies: Dependencies, pauses: Pauses
    ) -> None:
        self._cancel = cancel
        self._revive = revive
        self._change = change
        self._dependencies = dependencies
        self._pauses = pauses

    async def cancel(self, task_id: str, reason: str, *, cascade: bool = True) -> list[str]:
        """Cancel a task, its children and, with `cascade`, its dependents; returns the cancelled tasks.

        Cancelling a cancelled task changes nothing; a COMPLETED or DEAD_LETTERED one can't be cancelled.
        """
        return await self._cancel.cancel(task_id, reason, cascade=cascade)

    async def cancel_dag(self, dag_id: str, reason: str) -> list[str]:
        """Cancel the tasks of a DAG that haven't ended, and their dependents elsewhere; returns them."""
        return await self._cancel.cancel_dag(dag_id, reason)

    async def retry(self, task_id: str, *, delay_sec: float = 0.0) -> Status:
        """Revive a DEAD_LETTERED or CANCELLED task with fresh counters, or end the wait of a RETRYING one."""
        return await self._revive.retry(task_id, delay_sec=delay_sec)

    async def change(self, task_id: str, change: TaskChange) -> None:
        """Change a task that hasn't ended, or the limits of a dead letter."""
        await self._change.change(task_id, change)

    async def add_dependencies(self, task_id: str, depends_on: Sequence[str]) -> Status:
        """Make a task that isn't claimed yet wait for other tasks too."""
        return await self._dependencies.add(task_id, depends_on)

    async def pause(self, type_: str | None = None, *, reason: str | None = None) -> None:
        """Stop claims of this type, or all claims, until `resume`; running tasks go on."""
        await self._pauses.pause(type_, reason=reason)

    async def resume(self, type_: str | None = None, *, reason: str | None = None) -> bool:
        """Whether it was paused."""
        return await self._pauses.resume(type_, reason=reason)
